"""launch/bind_gpu.sh on machines made of files: which GPUs and which cores a rank gets."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from hpc_inflight.testing.launch import clean_env

BIND_GPU = str(Path(__file__).parents[2] / "launch" / "bind_gpu.sh")
CPUS = sorted(os.sched_getaffinity(0))


def mpirun(rank: int, size: int) -> dict[str, str]:
    return {"OMPI_COMM_WORLD_LOCAL_RANK": str(rank), "OMPI_COMM_WORLD_LOCAL_SIZE": str(size)}


def hydra(rank: int, size: int) -> dict[str, str]:
    return {"MPI_LOCALRANKID": str(rank), "MPI_LOCALNRANKS": str(size)}


def srun(rank: int, tasks: str, node: int = 0) -> dict[str, str]:
    step = {"SLURM_STEP_ID": "0", "SLURM_LOCALID": str(rank), "SLURM_NODEID": str(node)}
    return step | {"SLURM_STEP_TASKS_PER_NODE": tasks}


def machine(
    folder: Path, numa: list[int], mig: tuple[int, ...] = (), cpus: dict[int, str] | None = None
) -> dict[str, str]:
    """Make an nvidia-smi that knows a GPU for each entry of `numa`, and a /sys with their NUMA nodes."""
    lines = []
    for index, node in enumerate(numa):
        lines.append(f"GPU {index}: NVIDIA H200 (UUID: GPU-{index:08x}-aaaa)")
        lines += [f"  MIG 1g.18gb     Device  {i}: (UUID: MIG-{index}{i}bbbb-cc)" for i in range(2) if index in mig]
        device = folder / "sys" / "bus" / "pci" / "devices" / f"0000:{index:02x}:00.0"
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{node}\n")
    for node, text in (cpus or {0: ",".join(map(str, CPUS))}).items():
        where = folder / "sys" / "devices" / "system" / "node" / f"node{node}"
        where.mkdir(parents=True)
        (where / "cpulist").write_text(f"{text}\n")
    (folder / "list").write_text("\n".join(lines) + "\n")
    smi = folder / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text(
        f'#!/bin/sh\n[ "$1" = -L ] && exec cat {folder}/list\n'
        "for i; do :; done\n"  # the last argument
        'case $i in GPU-*) i=$(printf %02x 0x${i#GPU-} 2>/dev/null || echo "${i#GPU-}" | cut -c7-8);; MIG-*) i=00;; '
        '*) i=$(printf %02x "$i");; esac\necho "00000000:$(echo $i | cut -c1-2):00.0"\n'
    )
    smi.chmod(0o755)
    return {"PATH": f"{smi.parent}{os.pathsep}{os.environ['PATH']}", "BIND_GPU_SYS": str(folder / "sys")}


def run(*arguments: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    own = {name: value for name, value in clean_env(os.environ).items() if name != "CUDA_VISIBLE_DEVICES"}
    return subprocess.run(
        [BIND_GPU, *arguments], env=own | env, capture_output=True, text=True, timeout=60, check=False
    )


def gpus(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[0].removeprefix("CUDA_VISIBLE_DEVICES=")


@pytest.mark.parametrize(
    ("launcher", "arguments", "mask", "expected"),
    [
        (mpirun(2, 4), [], None, "GPU-00000002-aaaa"),
        (hydra(3, 4), [], None, "GPU-00000003-aaaa"),
        (srun(1, "4(x2)", 1), [], None, "GPU-00000001-aaaa"),
        (mpirun(1, 4) | srun(0, "1(x2)"), [], None, "GPU-00000001-aaaa"),
        (mpirun(1, 2), ["--gpus", "2"], None, "GPU-00000002-aaaa,GPU-00000003-aaaa"),
        ({}, [], None, "GPU-00000000-aaaa"),
        (mpirun(1, 2), [], "3,2", "2"),
        (mpirun(1, 2), [], "GPU-x,GPU-y", "GPU-y"),
        (srun(3, "4"), [], "3", "3"),  # srun showed this rank one already
        (srun(1, "2"), ["--gpus", "2"], "2,3", "2,3"),
    ],
)
def test_gpus(tmp_path: Path, launcher: dict[str, str], arguments: list[str], mask: str | None, expected: str) -> None:
    env = machine(tmp_path, [0, 0, 0, 0]) | launcher | ({} if mask is None else {"CUDA_VISIBLE_DEVICES": mask})
    assert gpus(run("--no-cores", *arguments, "--dry-run", "true", env=env)) == expected


def test_mig_instances_stand_for_their_gpu(tmp_path: Path) -> None:
    env = machine(tmp_path, [0, 0, 0], mig=(1,))
    found = [gpus(run("--no-cores", "--dry-run", "true", env=env | mpirun(rank, 4))) for rank in range(4)]
    assert found == ["GPU-00000000-aaaa", "MIG-10bbbb-cc", "MIG-11bbbb-cc", "GPU-00000002-aaaa"]


@pytest.mark.skipif(len(CPUS) < 2, reason="this machine lends one CPU, which cannot be shared out")
def test_cores_are_those_beside_the_gpu(tmp_path: Path) -> None:
    first, second = CPUS[:2]
    env = machine(tmp_path, [0, 1], cpus={0: str(first), 1: f"{second},4096"})  # a CPU that this process may not use
    for rank, core in enumerate((first, second)):
        done = run("python3", "-c", "import os; print(os.sched_getaffinity(0))", env=env | mpirun(rank, 2))
        assert done.stdout.strip() == f"{{{core}}}", done.stderr


@pytest.mark.skipif(len(CPUS) < 2, reason="this machine lends one CPU, which cannot be shared out")
def test_ranks_beside_the_same_cores_share_them(tmp_path: Path) -> None:
    env = machine(tmp_path, [0, 0], cpus={0: f"{CPUS[0]}-{CPUS[1]}"})
    found = [run("--dry-run", "true", env=env | hydra(rank, 2)).stdout.split()[1:4] for rank in range(2)]
    assert found == [["taskset", "-c", str(CPUS[0])], ["taskset", "-c", str(CPUS[1])]]


def test_more_ranks_than_cores_are_not_bound(tmp_path: Path) -> None:
    env = machine(tmp_path, [0] * 64, cpus={0: str(CPUS[0])})
    assert "taskset" not in run("--dry-run", "true", env=env | mpirun(3, 64)).stdout


def test_the_exit_code_is_the_command_s(tmp_path: Path) -> None:
    env = machine(tmp_path, [0])
    assert run("sh", "-c", 'test "$CUDA_VISIBLE_DEVICES" = GPU-00000000-aaaa && exit 7', env=env).returncode == 7


@pytest.mark.parametrize(
    ("arguments", "launcher", "says"),
    [
        (["true"], mpirun(2, 3), "local rank 2 on .* wants GPU 3 of 2: start fewer ranks per node"),
        (["--gpus", "0", "true"], {}, "--gpus wants a number from 1 on, and got '0'"),
        (["--cores", "true"], {}, "there is no option --cores"),
        ([], {}, "say what to run"),
        (["no-such-command"], {}, "no command 'no-such-command'"),
    ],
)
def test_a_wrong_call_gets_one_sentence_and_2(
    tmp_path: Path, arguments: list[str], launcher: dict[str, str], says: str
) -> None:
    done = run(*arguments, env=machine(tmp_path, [0, 0]) | launcher)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert re.search(says, done.stderr), done.stderr


def test_no_gpu_is_said(tmp_path: Path) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\nexit 9\n")
    smi.chmod(0o755)
    done = run("true", env={"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"})
    assert done.returncode == 2
    assert "nvidia-smi finds no GPU on" in done.stderr
