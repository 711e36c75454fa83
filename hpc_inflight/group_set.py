"""The process-wide set of live groups, and the drain that waits until none has work enqueued."""

from __future__ import annotations

import itertools
import os
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, Protocol

from hpc_inflight.errors import CommunicatorAborted, DrainTimeout

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hpc_inflight.work import Completion


class Group(Protocol):
    """What the set needs of a member."""

    def pending_works(self) -> Sequence[Completion]:
        """Return what is enqueued and not complete, oldest first."""

    def is_idle(self) -> bool:
        """Say whether nothing is enqueued, nobody is enqueuing and nothing has failed."""

    def quiesce(self, timeout_s: float) -> bool:
        """Wait for every thread that was enqueuing, and say whether all have; raise if the group was aborted."""

    def shape_of(self, work: Completion) -> str:
        """Return shape and dtype of an operation's tensors; empty if unknown."""

    def describe(self) -> str:
        """Return the group's name and this rank's place in it."""

    def forked(self) -> None:
        """Refuse everything from here on; called in a forked child."""


_lock = threading.RLock()  # a group dropped while it is held may come back here
_watching_forks = False
_ids = itertools.count()
_watchers: list[tuple[Callable[[], None], Callable[[], None]]] = []
# weakly: being listed must not keep a group that its user dropped alive. Insertion order is creation order,
# which all ranks share.
_groups: weakref.WeakValueDictionary[int, Group] = weakref.WeakValueDictionary()


def add(group: Group) -> int:
    """Add a group at its construction and return the ticket that removes it."""
    global _watching_forks  # noqa: PLW0603  # once per process
    with _lock:
        if not _watching_forks:
            _watching_forks = True
            os.register_at_fork(after_in_child=_forked)
        ticket = next(_ids)
        _groups[ticket] = group
        if len(_groups) == 1:
            for began, _ in _watchers:
                began()
        return ticket


def discard(ticket: int) -> None:
    """Remove a group at its destruction; nothing happens when it is gone already."""
    with _lock:
        if _groups.pop(ticket, None) is not None and not _groups:
            for _, ended in _watchers:
                ended()


def watch(began: Callable[[], None], ended: Callable[[], None]) -> None:
    """Have ``began`` called with the first group and ``ended`` after the last was destroyed.

    **Local:** at import. A group that is dropped without being destroyed counts until the next one is made.
    """
    _watchers.append((began, ended))


def _forked() -> None:
    global _lock  # noqa: PLW0603  # another thread may have held it at the fork, and does not exist here
    _lock = threading.RLock()
    for group in list(_groups.values()):
        group.forked()
    _groups.clear()
    _captures.clear()


def groups() -> list[Group]:
    """Return the live groups of this process in the order of their creation.

    **Local:** any thread, any time.
    """
    with _lock:
        return [group for _, group in sorted(_groups.items())]


class Gate:
    """Keeps new work from being enqueued between a drain and what the drain was for.

    A communicator asks `closed` while it holds the lock under which it enqueues, and waits without it. So once the
    gate is closed and every lock was seen free (`Group.is_idle`) or taken once (`Group.quiesce`), what is enqueued is
    what the drain sees.

    Attributes:
        closed: Whether work must wait, except for what a running work's own callback issues.
    """

    def __init__(self) -> None:
        self.closed = False
        self._closers: list[int] = []  # threads
        self._changed = threading.Condition()

    def is_mine(self) -> bool:
        """Say whether the calling thread has closed it; a callback that runs in its drain may issue."""
        return threading.get_ident() in self._closers

    def wait(self, timeout_s: float, what: str) -> None:
        """Block until the gate is open.

        Raises:
            DrainTimeout: It is still closed after ``timeout_s``.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: not self.closed, min(timeout_s, threading.TIMEOUT_MAX)):
                msg = f"{what}: not enqueued within {timeout_s:g} s, while another thread drained all groups"
                raise DrainTimeout(msg)

    def enter(
        self,
        lock: threading.Lock,
        timeout_s: float,
        op: str,
        group: str,
        exempt: Callable[[], bool] | None = None,
    ) -> None:
        """Take ``lock``, under which the caller enqueues, once no other thread drains.

        Args:
            lock: Free again when this raises.
            timeout_s: Seconds that the drain may take.
            op: What is to be enqueued, for the error.
            group: The name of its group.
            exempt: Says whether the caller is part of what a drain waits for.

        Raises:
            DrainTimeout: It did not end in time.
        """
        while True:
            lock.acquire()
            if not self.closed or self.is_mine() or (exempt is not None and exempt()):
                return
            lock.release()
            self.wait(timeout_s, f"{op} on group {group}")

    def close(self) -> None:
        """Close it until `open`; several threads may at once."""
        with self._changed:
            self._closers.append(threading.get_ident())
            self.closed = True

    def open(self) -> None:
        """Undo this thread's `close`."""
        with self._changed:
            self._closers.remove(threading.get_ident())
            self.closed = bool(self._closers)
            self._changed.notify_all()


gate = Gate()
# held by whoever asks CUDA about events, and while a capture begins: an event query kills a capture in global mode
polling = threading.RLock()
_captures: dict[int, weakref.ref[Any]] = {}
_captured: list[object] = []


def capturing() -> bool:
    """Say whether any CUDA graph capture is under way in this process; CUDA must not be asked about events then."""
    return bool(_captures)


def capture_began(capture: object) -> None:
    """Note that a capture begins; if the object goes, it has ended."""
    key = id(capture)
    _captures[key] = weakref.ref(capture, lambda _: _ended(key))


def capture_ended(capture: object) -> None:
    """Note that a capture has ended, well or not; nothing happens when it had not begun."""
    _ended(id(capture))


def _ended(key: int) -> None:
    _captures.pop(key, None)
    if not _captures:
        _captured.clear()


def keep_while_capturing(thing: object) -> None:
    """Keep what a graph has taken until no capture is under way: memory that is freed goes to what is captured next."""
    if _captures:
        _captured.append(thing)


def wait_for_all_pending_works(timeout_s: float) -> None:
    """Block until no live group has work enqueued.

    **Local:** but it returns only when the other ranks issue what this rank's works wait for. The works stay
    un-waited: this waits for completion and consumes nothing. Other threads' new works wait until it returns. Not
    allowed during a capture of the calling thread's own stream, which it could not wait for.

    Args:
        timeout_s: Seconds for all groups together.

    Raises:
        DrainTimeout: The deadline passed; names the group, operation, sequence number, shape and age.
        CommunicatorAborted: A group was aborted; names it.
    """
    close_and_drain(timeout_s, "wait_for_all_pending_works")
    gate.open()


def close_and_drain(timeout_s: float, what: str) -> None:
    """Wait as `wait_for_all_pending_works` does, with the gate closed, and leave it closed unless this raises.

    **Local:** the same thread opens the gate.
    """
    deadline = time.monotonic() + timeout_s
    gate.close()
    try:
        while not _all_idle():
            _drain(deadline, timeout_s, what)  # and look again: a callback may have issued
    except BaseException:
        gate.open()
        raise


def _all_idle() -> bool:
    for reference in _groups.valuerefs():  # in one step: other threads may add groups
        group = reference()
        if group is not None and not group.is_idle():
            return False
    return True


def settle(timeout_s: float, what: str) -> None:
    """Wait as `wait_for_all_pending_works` does, but pass over groups that have failed: whoever waited has been told.

    **Local:** where groups are about to be destroyed; nothing keeps other threads from enqueuing.
    """
    _drain(time.monotonic() + timeout_s, timeout_s, what, pass_over_failed=True)


def _drain(deadline: float, timeout_s: float, what: str, *, pass_over_failed: bool = False) -> None:
    for group in groups():
        try:
            quiet = group.quiesce(max(0.0, deadline - time.monotonic()))
        except CommunicatorAborted:
            if pass_over_failed:
                continue
            raise
        if not quiet:
            msg = (
                f"{what}: after {timeout_s:g} s a thread that issues on {group.describe()} has not returned; "
                "NCCL blocks a first use until all ranks come, and a rank has not issued it"
            )
            raise DrainTimeout(msg)
        while pending := group.pending_works():
            _wait(group, pending, deadline, timeout_s, what)


def _wait(group: Group, pending: Sequence[Completion], deadline: float, timeout_s: float, what: str) -> None:
    oldest = pending[0]
    try:
        oldest.block(max(0.0, deadline - time.monotonic()))
    except TimeoutError:
        age, shape = time.monotonic() - oldest.issued_at, group.shape_of(oldest)
        msg = (
            f"{what}: {len(pending)} pending after {timeout_s:g} s on {group.describe()}, the oldest {oldest.op} "
            f"(seq {oldest.seq}), {shape}{', ' if shape else ''}issued {age:.1f} s ago; a rank has not issued it"
        )
        raise DrainTimeout(msg) from None
