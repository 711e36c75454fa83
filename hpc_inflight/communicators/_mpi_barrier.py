"""Barriers with a deadline: the one collective that is always non-blocking, on every rank, so that it can give up."""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING

from hpc_inflight import _mpi
from hpc_inflight.errors import CollectiveTimeout

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpc_inflight.communicators.base import Operation


def barrier(comm: MPI.Intracomm, group: str, timeout_s: float) -> Operation:
    """Return an operation that waits for all ranks; after its deadline the group can no longer be used."""

    def run() -> None:
        request = comm.Ibarrier()
        if not _mpi.poll(request.Test, timeout_s):
            _mpi.abandon(request)
            msg = (
                f"barrier on group {group}: Timed out after {timeout_s:g} s on rank {comm.rank} of {comm.size}; a rank "
                "did not come, or is stuck; monitored_barrier() names it"
            )
            raise CollectiveTimeout(msg)

    return run


def monitored(comm: MPI.Intracomm, group: str, tag: int, timeout_s: float, *, all_ranks: bool) -> Operation:
    """Return an operation in which rank 0 waits for the others one by one and names who did not come.

    Args:
        comm: The group's communicator.
        group: Its name.
        tag: A tag that nothing else uses; ``tag + 1`` as well.
        timeout_s: Seconds in all.
        all_ranks: Name every rank that did not come, not only the first.
    """
    if comm.rank == 0:
        return functools.partial(_monitor, comm, group, tag, timeout_s, all_ranks)
    return functools.partial(_report, comm, group, tag, timeout_s)


def _monitor(comm: MPI.Intracomm, group: str, tag: int, timeout_s: float, all_ranks: bool) -> None:
    where = f"monitored_barrier on group {group}"
    if timeout_s <= 0:
        msg = f"{where}: Rank 0 timed out in monitoredBarrier after {timeout_s:g} s; give it more"
        raise CollectiveTimeout(msg)
    deadline = time.monotonic() + timeout_s
    came, missing = [], []
    for rank in range(1, comm.size):
        if _receive(comm, rank, tag, max(0.0, deadline - time.monotonic())) is not None:
            came.append(rank)
            continue
        missing.append(rank)
        if not all_ranks:
            break
    for rank in came:  # told at once, so that nobody is left to its own deadline
        _send(comm, bool(missing), rank, tag + 1)
    if missing:
        ranks = f"{'Ranks' if all_ranks else 'Rank'} {', '.join(map(str, missing))}"
        msg = f"{where}: {ranks} failed to pass monitoredBarrier in {1e3 * timeout_s:g} ms"
        raise CollectiveTimeout(msg)


def _report(comm: MPI.Intracomm, group: str, tag: int, timeout_s: float) -> None:
    _send(comm, False, 0, tag)
    failed = _receive(comm, 0, tag + 1, timeout_s)
    if failed is None or failed:
        reason = "it did not answer" if failed is None else "another rank did not come"
        msg = (
            f"monitored_barrier on group {group}: Rank {comm.rank} successfully reached monitoredBarrier, but received "
            f"errors while waiting for send/recv from rank 0: {reason}"
        )
        raise CollectiveTimeout(msg)


def _send(comm: MPI.Intracomm, flag: bool, rank: int, tag: int) -> None:
    _mpi.abandon(comm.Isend([bytearray([flag]), 1, _mpi.mpi().BYTE], rank, tag))


def _receive(comm: MPI.Intracomm, rank: int, tag: int, timeout_s: float) -> bool | None:
    flag = bytearray(1)
    request = comm.Irecv([flag, 1, _mpi.mpi().BYTE], rank, tag)
    if _mpi.poll(request.Test, timeout_s):
        return bool(flag[0])
    request.Cancel()
    request.Wait()
    return None
