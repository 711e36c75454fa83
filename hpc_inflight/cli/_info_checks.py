"""What ``hpc-inflight info`` makes of the ranks' facts: pure functions, so that tables of situations test them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from itertools import groupby
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from hpc_inflight.cli._info_facts import Facts, Timing

_SHM_MIB_PER_RANK = 64
_OLDEST_NCCL = (2, 18)  # ncclCommSplit came with it
_SHARING_NCCL = (2, 30)  # several ranks on one GPU
_LISTED = 8


class Status(str, Enum):
    """How a check went."""

    PASS = "pass"  # noqa: S105  # no password
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Check:
    """One line of the report; ``remedy`` is empty where nothing is to be done."""

    name: str
    status: Status
    found: str
    remedy: str = ""


def checks(ranks: Sequence[Facts], timings: Sequence[Sequence[Timing]]) -> list[Check]:
    """Return all checks of a world that formed.

    Args:
        ranks: Every rank's facts, in rank order.
        timings: Every rank's timings, in rank order; each rank has the same kinds.
    """
    return [
        _world(ranks),
        _threads(ranks),
        *_versions(ranks),
        _hostnames(ranks),
        _cores(ranks),
        _shared_memory(ranks),
        *_gpus(ranks),
        *[_all_reduce([of_rank[i] for of_rank in timings]) for i in range(len(timings[0]))],
    ]


def without_world(facts: Facts, problem: str) -> list[Check]:
    """Return the checks that can be made where no world formed.

    Args:
        facts: This process's.
        problem: The error.
    """
    found, _, remedy = problem.partition("; ")
    alone = [facts]
    return [
        Check("ranks", Status.FAIL, found, remedy),
        _hostnames(alone),
        _cores(alone),
        _shared_memory(alone),
    ]


def spread(values: Sequence[str]) -> str:
    """Write down one value, or which ranks have which.

    Args:
        values: Every rank's, in rank order.
    """
    if len(set(values)) == 1:
        return values[0]
    return "; ".join(f"rank {_ranks(ranks)}: {value or 'none'}" for value, ranks in _by(values).items())


def numbers(values: Sequence[int]) -> str:
    """Write down ascending numbers with their runs, such as ``0-3,8``."""
    runs = [[n for _, n in group] for _, group in groupby(enumerate(values), key=lambda pair: pair[1] - pair[0])]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _world(ranks: Sequence[Facts]) -> Check:
    nodes = len({rank.node_rank for rank in ranks})
    count = f"{len(ranks)} {'rank' if len(ranks) == 1 else 'ranks'} on {nodes} {'node' if nodes == 1 else 'nodes'}"
    return Check("ranks", Status.PASS, f"{count}, launcher: {ranks[0].launcher}")


def _threads(ranks: Sequence[Facts]) -> Check:
    found = spread([rank.thread_level for rank in ranks])
    if found == "multiple":
        return Check("MPI threads", Status.PASS, found)
    return Check(
        "MPI threads",
        Status.WARN,
        found,
        "asynchronous collectives run in their caller: let init() start MPI, with a library built for threads",
    )


def _versions(ranks: Sequence[Facts]) -> list[Check]:
    differ = [
        Check(f"{name} on all ranks", Status.FAIL, spread(values), "give all nodes the same environment")
        for name in ("python", "hpc_inflight", "mpi", "mpi4py", "torch", "cupy", "nccl")
        if len(set(values := [str(getattr(rank, name)) for rank in ranks])) > 1
    ]
    return differ or [Check("versions", Status.PASS, "the same on all ranks")]


def _hostnames(ranks: Sequence[Facts]) -> Check:
    odd = sorted({r.hostname for r in ranks if r.hostname.split(".")[0] in {"", "localhost", "(none)"}})
    unresolved = sorted({r.hostname for r in ranks if not r.address})
    nodes_of = _by([r.hostname for r in ranks])
    twice = sorted(n for n, members in nodes_of.items() if len({ranks[m].node_rank for m in members}) > 1)
    if twice:
        remedy = (
            "MPI libraries tell nodes apart by their names: give each its own, or start the ranks so that they share"
        )
        return Check("host names", Status.FAIL, f"several nodes are called {', '.join(twice)}", remedy)
    if odd:
        return Check("host names", Status.WARN, f"{', '.join(odd)!r} names no node", "set the node's host name")
    if unresolved:
        remedy = "put them into DNS or /etc/hosts: MPI over TCP and Gloo look them up"
        return Check("host names", Status.WARN, f"{', '.join(unresolved[:_LISTED])} cannot be resolved", remedy)
    return Check("host names", Status.PASS, "known and distinct")


def _cores(ranks: Sequence[Facts]) -> Check:
    for rank in ranks:
        if rank.threads > len(rank.cores):
            found = f"rank {rank.rank} may use {len(rank.cores)} and torch starts {rank.threads} threads"
            return Check("cores", Status.WARN, found, "set OMP_NUM_THREADS to the cores of a rank, or bind to more")
        alone = len(rank.cores) == 1 < rank.cpus_of_node // max(1, rank.local_world_size)
        if alone and rank.launcher == "Open MPI's mpirun":
            found = f"rank {rank.rank} is bound to 1 of {rank.cpus_of_node}"
            remedy = "mpirun does so at few ranks: add --bind-to none, or use launch/run.sh"
            return Check("cores", Status.WARN, found, remedy)
    for node, members in _by([rank.node_rank for rank in ranks]).items():
        usable = len({core for m in members for core in ranks[m].cores})
        wanted = sum(ranks[m].threads for m in members)
        if wanted > usable:
            found = f"the {len(members)} ranks of node {node} start {wanted} threads on {usable} CPUs"
            return Check("cores", Status.WARN, found, "start fewer ranks or set OMP_NUM_THREADS")
    return Check("cores", Status.PASS, "enough for the threads of every rank")


def _shared_memory(ranks: Sequence[Facts]) -> Check:
    for rank in ranks:
        need = _SHM_MIB_PER_RANK * rank.local_world_size
        if rank.shm_free_mib < need:
            found = (
                f"{max(0, rank.shm_free_mib)} MiB free on {rank.hostname}; {rank.local_world_size} ranks want {need}"
            )
            remedy = "in a container: docker run --ipc=host or --shm-size=1g; else: free it"
            return Check("/dev/shm", Status.WARN, found, remedy)  # noqa: S108  # a name
    return Check("/dev/shm", Status.PASS, f"{min(rank.shm_free_mib for rank in ranks)} MiB free")  # noqa: S108


def _gpus(ranks: Sequence[Facts]) -> list[Check]:
    on_gpu = [rank for rank in ranks if rank.device != "cpu"]
    if not on_gpu:
        if ranks[0].nvidia_devices and not ranks[0].torch_cuda:
            found = f"{ranks[0].hostname} has NVIDIA devices, and this torch ({ranks[0].torch}) has no CUDA"
            return [Check("GPUs", Status.WARN, found, "install a CUDA build of torch")]
        if ranks[0].nvidia_devices:
            found = f"torch sees none; CUDA_VISIBLE_DEVICES is {ranks[0].cuda_visible_devices}"
            return [Check("GPUs", Status.WARN, found, "ask the launcher for some, such as --gpus-per-task=1")]
        return [Check("GPUs", Status.PASS, "none here: the ranks use the CPU")]
    found_nccl = min(_version(rank.nccl) for rank in on_gpu)
    return [_sharing(on_gpu, found_nccl), _nccl(on_gpu, found_nccl), _cupy(on_gpu)]


def _sharing(on_gpu: Sequence[Facts], nccl: tuple[int, ...]) -> Check:
    users = _by([(rank.hostname, rank.device_uuid) for rank in on_gpu])
    shared = [(uuid, members) for (_, uuid), members in users.items() if len(members) > 1 and uuid]
    if not shared:
        return Check("GPUs", Status.PASS, "one for each rank")
    uuid, members = shared[0]
    found = f"rank {_ranks([on_gpu[m].rank for m in members])} use {uuid}"
    if nccl >= _SHARING_NCCL and all(rank.nccl_env.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" for rank in on_gpu):
        return Check("GPUs", Status.WARN, found, "NCCL_MULTI_RANK_GPU_ENABLE=1 allows it, for tests: they take turns")
    return Check("GPUs", Status.FAIL, found, "give each rank its own: srun --gpus-per-task=1, or launch/bind_gpu.sh")


def _nccl(on_gpu: Sequence[Facts], nccl: tuple[int, ...]) -> Check:
    found = spread([f"{rank.nccl or 'none'} ({rank.nccl_path})" for rank in on_gpu])
    if nccl == ():
        return Check("NCCL", Status.FAIL, "no libnccl is loaded", "install a CUDA build of torch, which brings it")
    if nccl < _OLDEST_NCCL:
        wanted = ".".join(map(str, _OLDEST_NCCL))
        return Check("NCCL", Status.WARN, found, f"older than {wanted}, so subgroups cannot be split off: upgrade it")
    return Check("NCCL", Status.PASS, found)


def _cupy(on_gpu: Sequence[Facts]) -> Check:
    missing = [rank.rank for rank in on_gpu if not rank.cupy]
    if not missing:
        return Check("CuPy", Status.PASS, spread([rank.cupy for rank in on_gpu]))
    major = on_gpu[0].torch_cuda.split(".")[0] or "12"
    remedy = f"pip install 'hpc_inflight[cuda{major}]': NCCL is called through it"
    return Check("CuPy", Status.FAIL, f"not installed for rank {_ranks(missing)}", remedy)


def _all_reduce(of_ranks: Sequence[Timing]) -> Check:
    name = f"all_reduce, {'MPI' if of_ranks[0].kind == 'cpu' else 'NCCL'}"
    failed = {rank: timing.error for rank, timing in enumerate(of_ranks) if timing.error}
    if failed:
        rank, error = next(iter(failed.items()))
        only_new = all(timing.unsupported for timing in of_ranks)
        status = Status.WARN if only_new else Status.FAIL
        return Check(name, status, f"rank {rank}: {error}", "" if only_new else "see the other checks first")
    small, large = (max(getattr(t, size) for t in of_ranks) for size in ("small_us", "large_us"))
    return Check(name, Status.PASS, f"4 B: {small:.1f} us, 4 MiB: {large / 1e3:.2f} ms (the slowest rank's median)")


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdigit())


def _by(values: Sequence[Hashable]) -> Mapping[Any, list[int]]:
    """Return the positions of each value, in order of appearance."""
    found: dict[Hashable, list[int]] = {}
    for position, value in enumerate(values):
        found.setdefault(value, []).append(position)
    return found


def _ranks(ranks: Sequence[int]) -> str:
    text = numbers(ranks)
    parts = text.split(",")
    return text if len(parts) <= _LISTED else ",".join(parts[:_LISTED]) + ", ..."
