"""What ranks do together over MPI before any of them goes on; every step has a deadline."""

from __future__ import annotations

import itertools
import pickle
import threading
import time
import zlib
from array import array
from typing import TYPE_CHECKING, Any, TypeVar

from hpc_inflight import _mpi, _on_failure
from hpc_inflight._poll import poll
from hpc_inflight.errors import CollectiveTimeout, InflightError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpi4py import MPI

T = TypeVar("T")


def run_with_deadline(call: Callable[[], T], timeout_s: float, what: str) -> T:
    """Run a blocking MPI call that has no non-blocking form, and raise when it does not return in time.

    **Local:** the collectiveness is that of ``call``. Past the deadline the call is left behind in a daemon
    thread, since MPI cannot cancel it.

    Args:
        call: The call.
        timeout_s: Seconds.
        what: What the ranks are waiting for, for the error.

    Raises:
        CollectiveTimeout: The deadline passed.
    """
    if not _mpi.thread_multiple():
        return call()
    result: list[T] = []
    failure: list[BaseException] = []

    def target() -> None:
        try:
            result.append(call())
        except BaseException as error:  # noqa: BLE001  # re-raised in the caller
            failure.append(error)

    thread = threading.Thread(target=target, name="hpc_inflight-deadline", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if failure:
        raise failure[0]
    if not result:
        msg = f"{what}: not every rank arrived within {timeout_s:g} s; check that all its ranks make this call"
        _on_failure.tell()
        raise CollectiveTimeout(msg)
    return result[0]


def allgather(value: Any, timeout_s: float, what: str) -> list[Any]:
    """Return every rank's value, in rank order.

    **Collective:** over the world, on the package's own communicator.

    Args:
        value: Anything that pickles.
        timeout_s: Seconds to wait for the other ranks.
        what: The call, for the error.

    Raises:
        CollectiveTimeout: A rank did not come.
    """
    comm, deadline = _mpi.control_comm(timeout_s), time.monotonic() + timeout_s
    payload = pickle.dumps(value)
    sizes = array("q", bytes(8 * comm.size))
    _complete(
        lambda: comm.Iallgather(_int64(array("q", [len(payload)]), 1), _int64(sizes, 1)),
        deadline - time.monotonic(),
        what,
    )
    gathered = bytearray(sum(sizes))
    counts = list(sizes)
    byte = _mpi.mpi().BYTE
    _complete(
        lambda: comm.Iallgatherv([payload, len(payload), byte], [gathered, counts, byte]),
        deadline - time.monotonic(),
        what,
    )
    ends = list(itertools.accumulate(counts))
    return [pickle.loads(gathered[end - n : end]) for end, n in zip(ends, counts, strict=True)]  # noqa: S301  # our own


def _int64(buffer: array[int], count: int) -> list[Any]:
    return [buffer, count, _mpi.mpi().INT64_T]


def _complete(start: Callable[[], Any], timeout_s: float, what: str) -> None:
    """Start a non-blocking collective on the control communicator and wait for it."""
    request = start()
    if not poll(request.Test, timeout_s):
        _mpi.abandon(request)
        size = _mpi.control_comm().size
        msg = f"{what}: not every rank arrived within {max(timeout_s, 0.0):.3g} s; all {size} ranks must call it"
        _on_failure.tell()
        raise CollectiveTimeout(msg)


def subset(comm: MPI.Intracomm, ranks: Sequence[int], timeout_s: float, what: str) -> MPI.Intracomm:
    """Make a communicator of some ranks of another one.

    **Collective:** over ``ranks`` only.

    Args:
        comm: The communicator whose ranks they are.
        ranks: Its ranks, in the order that the new one has; this rank is among them.
        timeout_s: Seconds to wait for the others.
        what: The call, for the error.

    Raises:
        CollectiveTimeout: A rank did not come.
    """
    members = comm.group.Incl(list(ranks))
    # Threads may make overlapping groups at the same time: the tag keeps those apart. From the ranks, not from a
    # name: torch numbers groups per process, and a group made with use_local_synchronization counts only on its
    # members.
    tag = zlib.crc32(str(list(ranks)).encode()) % 32767
    made = run_with_deadline(lambda: comm.Create_group(members, tag), timeout_s, what)
    members.Free()
    return made


def agree(error: InflightError | None, timeout_s: float, what: str) -> None:
    """Let every rank learn of a problem that only some can see, before any of them goes on.

    **Collective:** over the world.

    Args:
        error: This rank's problem, or None.
        timeout_s: Seconds to wait for the others; a rank with a problem waits 5 s at most, since the others
            may never come.
        what: The call, for the errors.

    Raises:
        InflightError: This rank's own problem, or another's, named with its rank.
        CollectiveTimeout: A rank did not come.
    """
    patience = timeout_s if error is None else min(timeout_s, 5.0)
    try:
        told = allgather(error is not None, patience, what)
    except CollectiveTimeout:
        if error is not None:
            raise error from None
        raise
    if error is not None:
        raise error
    bad = [rank for rank, failed in enumerate(told) if failed]
    if bad:
        msg = f"{what}: failed on rank {', '.join(map(str, bad))}; see the error there"
        raise InflightError(msg)
