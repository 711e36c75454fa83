"""Barriers with a deadline: the one collective that is always non-blocking, on every rank, so that it can give up."""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, NoReturn, Protocol

from hpc_inflight import _mpi, _on_failure
from hpc_inflight._poll import poll
from hpc_inflight.errors import CollectiveTimeout, CommunicatorAborted, InflightError

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpc_inflight.communicators.base import Operation


class Group(Protocol):
    """What a barrier needs of its communicator."""

    comm: MPI.Intracomm
    name: str

    def give_up(self, reason: InflightError) -> None:
        """Refuse every later operation."""


def barrier(group: Group, timeout_s: float) -> Operation:
    """Return an operation that waits for all ranks; past its deadline the group refuses everything."""

    def run() -> None:
        comm = group.comm
        request = comm.Ibarrier()
        if not poll(request.Test, timeout_s):
            _mpi.abandon(request)
            _fail(
                group,
                f"barrier on group {group.name}: Timed out after {timeout_s:g} s on rank {comm.rank} of {comm.size}; a "
                "rank did not come, or is stuck; monitored_barrier() names it",
            )

    return run


def monitored(group: Group, tag: int, timeout_s: float, *, all_ranks: bool) -> Operation:
    """Return an operation in which rank 0 waits for the others one by one and names who did not come.

    Args:
        group: The communicator.
        tag: A tag that nothing else uses; ``tag + 1`` as well.
        timeout_s: Seconds in all; past them the group refuses everything.
        all_ranks: Name every rank that did not come, not only the first.
    """
    if group.comm.rank == 0:
        return functools.partial(_monitor, group, tag, timeout_s, all_ranks)
    return functools.partial(_report, group, tag, timeout_s)


def _fail(group: Group, message: str) -> NoReturn:
    text = f"group {group.name} is out of step since a deadline passed ({message}); destroy it and make a new one"
    group.give_up(CommunicatorAborted(text))
    _on_failure.tell()
    raise CollectiveTimeout(message)


def _monitor(group: Group, tag: int, timeout_s: float, all_ranks: bool) -> None:
    comm, where = group.comm, f"monitored_barrier on group {group.name}"
    if timeout_s <= 0:
        _fail(group, f"{where}: Rank 0 timed out in monitoredBarrier after {timeout_s:g} s; give it more")
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
        _fail(group, f"{where}: {ranks} failed to pass monitoredBarrier in {1e3 * timeout_s:g} ms")


def _report(group: Group, tag: int, timeout_s: float) -> None:
    comm = group.comm
    _send(comm, False, 0, tag)
    failed = _receive(comm, 0, tag + 1, timeout_s)
    if failed is None or failed:
        reason = "it did not answer" if failed is None else "another rank did not come"
        _fail(
            group,
            f"monitored_barrier on group {group.name}: Rank {comm.rank} successfully reached monitoredBarrier, but "
            f"received errors while waiting for send/recv from rank 0: {reason}",
        )


def _send(comm: MPI.Intracomm, flag: bool, rank: int, tag: int) -> None:
    _mpi.abandon(comm.Isend([bytearray([flag]), 1, _mpi.mpi().BYTE], rank, tag))


def _receive(comm: MPI.Intracomm, rank: int, tag: int, timeout_s: float) -> bool | None:
    flag = bytearray(1)
    request = comm.Irecv([flag, 1, _mpi.mpi().BYTE], rank, tag)
    if poll(request.Test, timeout_s):
        return bool(flag[0])
    request.Cancel()
    status = _mpi.mpi().Status()
    request.Wait(status)
    return None if status.Is_cancelled() else bool(flag[0])  # it may have arrived meanwhile
