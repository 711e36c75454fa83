"""A group from its construction to its end: what the drain, the watchdog and the end of the process ask of it."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import TYPE_CHECKING, Any

from hpc_inflight import _mpi, flight_recorder, group_set
from hpc_inflight._c10d_issue import Issuer
from hpc_inflight.errors import NCCLError
from hpc_inflight.watchdog import watchdog

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpc_inflight.communicators.mpi import MPICommunicator
    from hpc_inflight.errors import InflightError
    from hpc_inflight.work import Completion

_DESTROYED = "was destroyed; make a new group, or issue before destroying it"


class LiveGroup(Issuer):
    """A member of the process's set of live groups (`hpc_inflight.group_set`), until it is destroyed."""

    def __init__(self, store: Any, rank: int, size: int, communicator: MPICommunicator, timeout_s: float) -> None:
        super().__init__(store, rank, size, communicator, timeout_s)
        self._ticket = group_set.add(self)

    def forked(self) -> None:
        """Refuse everything from here on; called in a forked child."""
        self._closed = (
            f"belongs to process {os.getppid()}, not to its forked child {os.getpid()}; issue collectives from the "
            "rank itself"
        )

    def pending_works(self) -> Sequence[Completion]:
        """Return what is enqueued and not complete, oldest first."""
        if self._closed:
            return ()
        works = self._comm.pending_works()
        if self._nccl is None:
            return works
        return sorted([*works, *self._nccl.pending_works()], key=lambda work: work.issued_at)

    def shutdown(self) -> None:
        """Wait for pending works, at most the group's timeout, and free the communicator; again does nothing.

        What synchronous calls have left on a GPU is waited for, too. NCCL's communicator stays until the process ends
        where a CUDA graph that captured on it is not gone, or one is being captured and does not end.

        **Collective:** over the group, in any order relative to other groups.
        """
        if self._closed:
            return
        self._closed = _DESTROYED
        try:
            watchdog.remember(self)
            group_set.unlist(self._ticket)
            with self._nccl_lock:  # another thread that connects sees that the group is closed, and leaves MPI
                nccl = self._nccl
            if nccl is not None:
                nccl.shutdown(self._timeout_s)
        finally:
            group_set.discard(self._ticket)  # not before NCCL's end: without groups, nothing is known of captures
            if _mpi.started():
                self._comm.shutdown(self._timeout_s)

    def key(self) -> tuple[tuple[int, ...], int]:
        """Return the group's world ranks, and how many groups with those came before it on each of them."""
        return self._comm.key

    def issued(self, device_type: str) -> int:
        """Return how many collectives on tensors of a type of device this rank has issued."""
        return self._comm.seq if device_type == "cpu" else 0 if self._nccl is None else self._nccl.seq

    def op_of(self, seq: int, device_type: str) -> str:
        """Return the name of a recent collective by its number; empty when it is unknown."""
        lane = self._lane if device_type == "cpu" else self._nccl_lane
        return lane.called if seq == self.issued(device_type) else ""

    def failed(self) -> tuple[Completion, float] | None:
        """Return the first enqueued operation on CPU tensors that has failed, if any has, and when."""
        return self._comm.failed

    def check(self) -> None:
        """Raise what NCCL has found wrong since, without waiting for anything."""
        if self._nccl is not None and not self._closed:
            self._nccl.check()

    def running(self) -> tuple[str, int, float, float, str] | None:
        """Return op, number, begin, timeout in seconds and type of device of what runs in its caller, if anything does.

        NCCL enqueues and returns, but where it connects ranks that have not met before: it blocks until they come.
        """
        began = self._comm.called_at
        if began:
            row = self._lane.issuing()  # not the last that was begun: another thread may have
            op = self._lane.called if row is None else row[2]
            return op, self._comm.called_seq, began, self._timeout_s, "cpu"
        if self._nccl is None:
            return None
        block = self._nccl.launching
        if block is not None:
            return block.op, block.seq, block.issued_at, block.timeout_s, "cuda"
        row = self._nccl_lane.issuing()
        return None if row is None else (row[2], self._nccl.seq, row[6], self._timeout_s, "cuda")

    def shape_of(self, work: Completion) -> str:
        """Return shape and dtype of an operation's tensors, as far as the flight recorder knows."""
        return flight_recorder.shape_of(work.progress)

    def watched_works(self) -> Sequence[Completion]:
        """Return what is enqueued and not complete, oldest first, and what synchronous calls have left on a GPU."""
        works = self.pending_works()
        if self._nccl is None or self._closed:
            return works
        left = self._nccl.synchronous(self._nccl_lane.called, self._timeout_s)
        return works if left is None else sorted([*works, left], key=lambda work: work.issued_at)

    def block_synchronous(self, deadline: float) -> None:
        """Block the host until what synchronous calls have left on a GPU is complete.

        **Local:** where the group is about to be destroyed, or the process to end.

        Args:
            deadline: A ``time.monotonic()``.

        Raises:
            CollectiveTimeout: It was not complete by then.
        """
        if self._nccl is not None and not self._closed:
            with contextlib.suppress(NCCLError):  # whoever uses the device next is told
                self._nccl.block_synchronous(deadline)

    def is_idle(self) -> bool:
        """Say whether nothing is enqueued, nobody is enqueuing and nothing has failed."""
        nccl = self._nccl  # where there is none, a thread may be connecting it
        if self._comm.is_idle() and (not self._nccl_lock.locked() if nccl is None else nccl.is_idle()):
            return True
        return bool(self._closed)

    def quiesce(self, timeout_s: float) -> bool:
        """Wait for every thread that was enqueuing; False if one still is. Raise `CommunicatorAborted` after abort."""
        if self._closed:
            return True
        deadline = time.monotonic() + timeout_s
        if not self._nccl_lock.acquire(timeout=min(timeout_s, threading.TIMEOUT_MAX)):  # it connects
            return False
        self._nccl_lock.release()
        timeout_s = max(0.0, deadline - time.monotonic())
        return self._comm.quiesce(timeout_s) and (
            self._nccl is None or bool(self._nccl.quiesce(max(0.0, deadline - time.monotonic())))
        )

    def abort(self, error: InflightError | None = None) -> None:
        """Fail everything that is pending and refuse what comes.

        **Local:** whoever waits raises at once. An MPI call that runs cannot be cancelled; it is left to the end of the
        process, and so are its tensors.

        Args:
            error: Why the group failed, which everyone raises; it stays listed until it is destroyed, and no capture
                begins meanwhile. Without one, the program itself gave the group up.
        """
        if not self._closed:
            if self._nccl is not None:
                self._nccl.abort(error)
            self._comm.abort(error)
            if error is None:
                group_set.discard(self._ticket)
