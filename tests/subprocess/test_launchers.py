"""launch/run.sh and `init` under the launchers of both MPI libraries: sizes, bindings, signals, what was planted."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hpc_inflight.launch_command import LOCAL_BASE
from hpc_inflight.launch_env import clean_env
from hpc_inflight.launch_find import usable_cores
from tests import mpis

if TYPE_CHECKING:
    from tests.mpis import MPI

RUN_SH = str(Path(__file__).parents[2] / "launch" / "run.sh")
# What other launchers say of their own ranks; none of it may reach the ranks that are started below them.
PLANTED = {
    "OMPI_COMM_WORLD_SIZE": "7",
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_LOCAL_RANK": "5",
    "PMIX_RANK": "5",
    "PMIX_NAMESPACE": "prterun-elsewhere@1",
    "PMI_SIZE": "7",
    "PMI_RANK": "5",
    "PMI_FD": "99",
    "MPI_LOCALRANKID": "5",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_PROCID": "5",
}


@pytest.fixture(params=mpis.VENDORS)
def mpi(request: pytest.FixtureRequest) -> MPI:
    found = mpis.installed().get(request.param)
    if found is None:
        pytest.skip(mpis.missing(request.param))
    return found


def environment(mpi: MPI, **more: str) -> dict[str, str]:
    own = {name: value for name, value in clean_env(os.environ).items() if name not in {"MPI", "OMP_NUM_THREADS"}}
    return own | {"VIRTUAL_ENV": sys.prefix} | mpi.env | more


def run(
    mpi: MPI, *arguments: str, timeout_s: float = 500, more: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [RUN_SH, *arguments],
        env=environment(mpi, **(more or {})),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout_s,
        check=False,
    )


WHERE = (
    "import os; from mpi4py import MPI; w = MPI.COMM_WORLD; cores = sorted(os.sched_getaffinity(0)); "
    "os.write(1, f'<{w.rank} of {w.size}, cores {cores}, threads {os.environ[\"OMP_NUM_THREADS\"]}>\\n'.encode())"
)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_n_ranks_are_one_world(mpi: MPI, n: int) -> None:
    done = run(mpi, "-n", str(n), "--", "python", "-c", WHERE)
    assert done.returncode == 0, done.stderr
    threads = max(1, usable_cores() // n)
    every = sorted(os.sched_getaffinity(0))
    found = sorted(re.findall("<.*?>", done.stdout))
    assert found == [f"<{rank} of {n}, cores {every}, threads {threads}>" for rank in range(n)]
    assert mpi.vendor in done.stderr


@pytest.mark.skipif(usable_cores() < 2, reason="two ranks cannot have a core each here")
def test_bind_core_gives_each_rank_its_own(mpi: MPI) -> None:
    done = run(mpi, "-n", "2", "--bind", "core", "python", "-c", WHERE)
    assert done.returncode == 0, done.stderr
    found = [set(map(int, cores.split(","))) for cores in re.findall(r"cores \[(.*?)\]", done.stdout)]
    assert len(found) == 2
    assert not found[0] & found[1]


def test_bind_core_and_many_threads_is_warned_about(mpi: MPI) -> None:
    dry = run(mpi, "-n", "1", "--bind=core", "--dry-run", "true", more={"OMP_NUM_THREADS": "4096"})
    assert "warning: --bind core gives a rank" in dry.stderr
    assert "OMP_NUM_THREADS is 4096" in dry.stderr
    assert "warning" not in run(mpi, "-n", "1", "--bind=core", "--dry-run", "true").stderr


def test_ranks_below_another_launcher_are_a_world_of_their_own(mpi: MPI) -> None:
    program = "import os, hpc_inflight as hi; w = hi.init(); os.write(1, f'<{w.rank} of {w.world_size}>\\n'.encode()); hi.finalize()"
    done = run(mpi, "-n", "2", "python", "-c", program, more=PLANTED)
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall("<.*?>", done.stdout)) == ["<0 of 2>", "<1 of 2>"]


def test_plain_python_is_a_world_of_one(mpi: MPI) -> None:
    program = "import hpc_inflight as hi; w = hi.init(); print(f'<{w.rank} of {w.world_size}>'); hi.finalize()"
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(mpi), capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "<0 of 1>\n", "")


def alive(marker: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                arguments = (entry / "cmdline").read_bytes()
            except OSError:
                continue  # ended meanwhile
            if marker.encode() in arguments:
                found.append(int(entry.name))
    return found


# Open MPI ends the ranks of a killed mpirun only once one of their threads is in MPI, as the package's watchdog is.
ENDLESS = {
    signal.SIGKILL: "import os, time, hpc_inflight as hi; hi.init(); os.write(1, b'up\\n'); time.sleep(600)",
    signal.SIGTERM: "import os, time; from mpi4py import MPI; os.write(1, b'up\\n'); time.sleep(600)",
    signal.SIGINT: "import os; from mpi4py import MPI; os.write(1, b'up\\n'); MPI.COMM_WORLD.recv()",
}


@pytest.mark.parametrize("number", list(ENDLESS))
def test_no_rank_survives_its_launcher(mpi: MPI, number: signal.Signals) -> None:
    marker = f"marker-{uuid.uuid4().hex}"
    with subprocess.Popen(
        [RUN_SH, "-n", "2", "python", "-c", ENDLESS[number], marker],
        env=environment(mpi),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as job:
        try:
            assert job.stdout is not None
            assert [job.stdout.readline() for _ in range(2)] == ["up\n", "up\n"]
            assert len(alive(marker)) >= 3, "the launcher and two ranks"
            job.send_signal(number)
            if number is signal.SIGINT:
                # hydra passes the first one on and waits; Python's handler does not run in a rank that is inside MPI
                with contextlib.suppress(subprocess.TimeoutExpired):
                    job.wait(timeout=5)
                job.send_signal(number)
            assert job.wait(timeout=300) != 0
            deadline = time.monotonic() + 120
            while alive(marker) and time.monotonic() < deadline:
                time.sleep(0.1)
            assert alive(marker) == []
        finally:
            job.kill()
            for pid in alive(marker):
                os.kill(pid, signal.SIGKILL)


def test_the_other_mpi_s_launcher_is_said(mpi: MPI, tmp_path: Path) -> None:
    others = [found for vendor, found in mpis.installed().items() if vendor != mpi.vendor]
    if not others:
        pytest.skip("one MPI library is installed")
    dry = run(others[0], "-n", "2", "--dry-run", "true")
    launcher = next(word for word in dry.stdout.split() if word.endswith(("/mpirun", "/mpiexec", "/mpiexec.hydra")))
    env = environment(mpi, OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    program = "import hpc_inflight as hi; hi.init(); print('went on')"
    done = subprocess.run(
        [launcher, "-n", "2", sys.executable, "-c", program],
        env=env | {LOCAL_BASE: str(tmp_path)},
        capture_output=True,
        text=True,
        errors="replace",
        timeout=500,
        check=False,
    )
    assert done.returncode != 0
    assert "went on" not in done.stdout
    # anywhere: both ranks print a traceback, piece by piece, and hydra passes the pieces on as they come
    said = rf" started 2 ranks, but mpi4py loaded {mpi.vendor} [^;]*; use /[^`]*, or `srun --mpi={mpi.kind}`"
    assert 0 < len(re.findall(said, done.stderr)) == done.stderr.count(" started 2 ranks, but "), done.stderr


def test_a_launcher_that_fails_passes_its_code_on(mpi: MPI) -> None:
    # a command that is there when run.sh looks, and cannot be started
    assert run(mpi, "-n", "1", "sh", "-c", "exit 3").returncode != 0
    assert run(mpi, "-n", "1", "/etc/passwd").returncode != 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_thirty_two_ranks_start_reduce_and_end(capsys: pytest.CaptureFixture[str]) -> None:
    mpi = next(iter(mpis.installed().values()))
    program = (
        "import os, torch, torch.distributed as dist, hpc_inflight as hi\n"
        "w = hi.init(timeout_s=1000)\n"
        "for i in range(100):\n"
        "    dist.all_reduce(t := torch.full((4,), float(w.rank + i)))\n"
        "    assert t.tolist() == [496.0 + 32 * i] * 4, t\n"
        "os.write(1, f'<{w.rank} of {w.world_size}>\\n'.encode())\n"
        "hi.finalize(timeout_s=1000)\n"
    )
    started = time.monotonic()
    done = run(mpi, "-n", "32", "python", "-c", program, timeout_s=1700)
    seconds = time.monotonic() - started
    assert done.returncode == 0, done.stderr[-4000:]
    assert len(set(re.findall(r"<\d+ of 32>", done.stdout))) == 32
    with capsys.disabled():
        cores = usable_cores()
        print(f"\n32 ranks on {cores} cores ({mpi.vendor}): start, 100 all_reduces and end took {seconds:.1f} s")  # noqa: T201  # asked for
