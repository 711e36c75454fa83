"""Tables of situations for what `hpc-inflight info` says of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hpc_inflight.cli._info_checks import Check, Status, checks, numbers, spread, without_world
from hpc_inflight.cli._info_facts import Facts, Timing

GPU: dict[str, Any] = {
    "device": "cuda:0",
    "device_name": "NVIDIA H200",
    "nvidia_devices": True,
    "torch_cuda": "13.0",
    "cupy": "cupy-cuda13x 14.2.0",
    "nccl": "2.28.9",
    "nccl_path": "/x/libnccl.so.2",
}


def ranks(count: int = 4, per_node: int = 2, **changes: Any) -> list[Facts]:
    """Return ranks on which all is well; a change that is a list has an entry a rank."""
    made = []
    for rank in range(count):
        node, local = divmod(rank, per_node)
        facts = Facts(
            rank=rank,
            world_size=count,
            node_rank=node,
            local_rank=local,
            local_world_size=per_node,
            hostname=f"n{node}",
            address=f"10.0.0.{node}",
            device_uuid=f"GPU-{rank}",
            cores=(2 * local, 2 * local + 1),
            cpus_of_node=2 * per_node,
            threads=2,
            shm_free_mib=10_000,
            launcher="srun --mpi=pmix",
            mpi="Open MPI v5.0.11",
            thread_level="multiple",
            torch="2.13.0",
        )
        own = {name: value[rank] if isinstance(value, list) else value for name, value in changes.items()}
        made.append(replace(facts, **own))
    return made


def run(facts: list[Facts], timings: list[list[Timing]] | None = None) -> dict[str, Check]:
    return {c.name: c for c in checks(facts, timings or [[Timing("cpu", 10.0, 2000.0)] for _ in facts])}


def test_all_is_well() -> None:
    for found in (run(ranks()), run(ranks(**GPU)), run(ranks(1, 1))):
        assert {c.status for c in found.values()} == {Status.PASS}, found
        assert not any(c.remedy for c in found.values())


@pytest.mark.parametrize(
    ("changes", "name", "status", "found", "remedy"),
    [
        ({"thread_level": "funneled"}, "MPI threads", "warn", "funneled", "let init() start MPI"),
        ({"torch": ["2.13.0", "2.13.0", "2.14.1", "2.13.0"]}, "torch on all ranks", "fail", "rank 0-1,3: 2.13.0; rank 2: 2.14.1", "same"),
        ({"mpi": ["a", "a", "b", "b"]}, "mpi on all ranks", "fail", "rank 0-1: a; rank 2-3: b", "same environment"),
        ({"hostname": "localhost"}, "host names", "fail", "several nodes are called localhost", "its own"),
        ({"hostname": ["n1", "n1", "localhost.local", "localhost.local"]}, "host names", "warn", "localhost.local", "host name"),
        ({"address": ["", "", "1.2.3.4", "1.2.3.4"]}, "host names", "warn", "n0 cannot be resolved", "/etc/hosts"),
        ({"threads": [2, 2, 8, 2]}, "cores", "warn", "rank 2 may use 2 and torch starts 8 threads", "OMP_NUM_THREADS"),
        (
            {"cores": (0,), "threads": 1, "cpus_of_node": 64, "launcher": "Open MPI's mpirun"},
            "cores", "warn", "rank 0 is bound to 1 of 64", "--bind-to none",
        ),
        ({"cores": (0, 1)}, "cores", "warn", "the 2 ranks of node 0 start 4 threads on 2 CPUs", "fewer ranks"),
        ({"shm_free_mib": [10_000, 10_000, 64, 64]}, "/dev/shm", "warn", "64 MiB free on n1; 2 ranks want 128", "--shm-size"),
        ({"shm_free_mib": -1}, "/dev/shm", "warn", "0 MiB free on n0", "--ipc=host"),
        ({"nvidia_devices": True}, "GPUs", "warn", "this torch (2.13.0) has no CUDA", "CUDA build"),
        ({"nvidia_devices": True, "torch_cuda": "13.0", "cuda_visible_devices": ""}, "GPUs", "warn", "torch sees none", "--gpus-per-task=1"),
        (GPU | {"device_uuid": ["a", "b", "c", "c"]}, "GPUs", "fail", "rank 2-3 use c", "--gpus-per-task=1"),
        (
            GPU | {"device_uuid": "a", "nccl": "2.32.3", "nccl_env": {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}},
            "GPUs", "warn", "rank 0-1 use a", "take turns",
        ),
        (
            GPU | {"device_uuid": "a", "nccl": "2.28.9", "nccl_env": {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}},
            "GPUs", "fail", "rank 0-1 use a", "its own",
        ),
        (GPU | {"nccl": "2.17.1"}, "NCCL", "warn", "2.17.1 (/x/libnccl.so.2)", "older than 2.18"),
        (GPU | {"nccl": "", "nccl_path": ""}, "NCCL", "fail", "no libnccl", "CUDA build of torch"),
        (GPU | {"cupy": ""}, "CuPy", "fail", "not installed for rank 0-3", "pip install 'hpc_inflight[cuda13]'"),
    ],
)  # fmt: skip
def test_each_problem_is_found_and_nothing_else(
    changes: dict[str, Any], name: str, status: str, found: str, remedy: str
) -> None:
    made = run(ranks(**changes))
    check = made.pop(name)
    assert check.status.value == status
    assert found in check.found
    assert remedy in check.remedy
    assert {c.status for c in made.values()} <= {Status.PASS}, made


def test_all_reduce() -> None:
    slow = run(ranks(2), [[Timing("cpu", 10.0, 2000.0)], [Timing("cpu", 30.0, 1000.0)]])["all_reduce, MPI"]
    assert slow.found == "4 B: 30.0 us, 4 MiB: 2.00 ms (the slowest rank's median)"
    broken = run(ranks(2), [[Timing("cuda", 1.0, 1.0)], [Timing("cuda", error="lost")]])["all_reduce, NCCL"]
    assert (broken.status, broken.found) == (Status.FAIL, "rank 1: lost")


def test_without_a_world_the_error_is_the_first_check() -> None:
    found = without_world(
        Facts(hostname="n0", address="x", shm_free_mib=100, cores=(0,)), "srun started 4, MPI sees 1; use `srun x`; y"
    )
    assert found[0] == Check("ranks", Status.FAIL, "srun started 4, MPI sees 1", "use `srun x`; y")
    assert {c.status for c in found[1:]} == {Status.PASS}


@pytest.mark.parametrize(("values", "text"), [((0, 1, 2, 5, 7, 8), "0-2,5,7-8"), ((3,), "3"), ((), "")])
def test_numbers(values: tuple[int, ...], text: str) -> None:
    assert numbers(values) == text


def test_spread() -> None:
    assert spread(["a", "a"]) == "a"
    assert spread(["a", "", "a"]) == "rank 0,2: a; rank 1: none"
    assert spread([str(r % 2) for r in range(40)]).startswith("rank 0,2,4,6,8,10,12,14, ...: 0; ")
