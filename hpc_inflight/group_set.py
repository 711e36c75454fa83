"""The process-wide set of live groups, and the drain that waits until none has work enqueued."""

from __future__ import annotations

import itertools
import os
import threading
import time
import weakref
from typing import TYPE_CHECKING, Protocol

from hpc_inflight import _gate
from hpc_inflight._gate import gate
from hpc_inflight.errors import CollectiveTimeout, CommunicatorAborted, DrainTimeout

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

    def block_synchronous(self, deadline: float) -> None:
        """Block until what synchronous calls have left on a GPU is complete; `CollectiveTimeout` at the deadline."""

    def shape_of(self, work: Completion) -> str:
        """Return shape and dtype of an operation's tensors; empty if unknown."""

    def describe(self) -> str:
        """Return the group's name and this rank's place in it."""

    def forked(self) -> None:
        """Refuse everything from here on; called in a forked child."""


_LOOK_S = 1e-4  # between two looks at a callback that runs
_lock = threading.RLock()  # a group dropped while it is held may come back here
_changing = threading.RLock()  # held while watchers are told; the watchdog, which they end, never takes it
_watching_forks = _watching = False
_ids = itertools.count()
_watchers: list[tuple[Callable[[], None], Callable[[], None]]] = []
# weakly: being listed must not keep a group that its user dropped alive. Insertion order is creation order,
# which all ranks share.
_groups: weakref.WeakValueDictionary[int, Group] = weakref.WeakValueDictionary()
_closing: set[int] = set()  # tickets of groups that are not listed any more, but not through with NCCL


def add(group: Group) -> int:
    """Add a group at its construction and return the ticket that removes it."""
    global _watching_forks, _watching  # noqa: PLW0603  # once per process, and with the first of some groups
    with _changing:
        with _lock:
            if not _watching_forks:
                _watching_forks = True
                os.register_at_fork(after_in_child=_forked)
            ticket = next(_ids)
            _groups[ticket] = group
            first, _watching = not _watching, True
        if first:
            for began, _ in _watchers:
                began()
        return ticket


def unlist(ticket: int) -> None:
    """Begin to remove a group: it is not one of `groups` any more, but counts until `discard`."""
    with _lock:
        if _groups.pop(ticket, None) is not None:
            _closing.add(ticket)


def discard(ticket: int) -> None:
    """Remove a group at its destruction; nothing happens when it is gone already."""
    global _watching  # noqa: PLW0603  # until the next group
    with _changing:
        with _lock:
            gone = _groups.pop(ticket, None) is None and ticket not in _closing
            _closing.discard(ticket)
            last = not gone and not _groups and not _closing
        if last:
            _watching = False
            for _, ended in _watchers:
                ended()


def watch(began: Callable[[], None], ended: Callable[[], None]) -> None:
    """Have ``began`` called with the first group and ``ended`` after the last was destroyed.

    **Local:** at import. A group that is dropped without being destroyed counts until another one is destroyed.
    """
    _watchers.append((began, ended))


def _forked() -> None:
    global _lock, _changing  # another thread may have held them at the fork, and does not exist here
    _lock, _changing = threading.RLock(), threading.RLock()
    for group in list(_groups.values()):
        group.forked()
    _groups.clear()
    _closing.clear()
    _gate.forked()


def groups() -> list[Group]:
    """Return the live groups of this process in the order of their creation.

    **Local:** any thread, any time.
    """
    with _lock:
        return [group for _, group in sorted(_groups.items())]


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


def close_and_drain(timeout_s: float, what: str, deadline: float | None = None) -> None:
    """Wait as `wait_for_all_pending_works` does, with the gate closed, and leave it closed unless this raises.

    **Local:** the same thread opens the gate. ``deadline`` is a `time.monotonic` where a part of ``timeout_s`` is over.
    """
    deadline = time.monotonic() + timeout_s if deadline is None else deadline
    gate.close()
    try:
        while not _all_idle():
            _drain(deadline, timeout_s, what)  # and look again: a callback may have issued
            if not _all_idle():
                _wait_for_callback(deadline, timeout_s, what)
    except BaseException:
        gate.open()
        raise


def _wait_for_callback(deadline: float, timeout_s: float, what: str) -> None:
    """Give a callback some time: its work is complete, and so is not pending, but it may issue more."""
    time.sleep(_LOOK_S)
    if time.monotonic() >= deadline and not _all_idle():
        busy = next((group.describe() for group in groups() if not group.is_idle()), "a group")
        raise DrainTimeout(f"{what}: after {timeout_s:g} s a callback of a work on {busy} has not returned")


def _all_idle() -> bool:
    passed = gate.passed
    for reference in _groups.valuerefs():  # in one step: other threads may add groups
        group = reference()
        if group is not None and not group.is_idle():
            return False
    # a callback of a group looked at last may have issued on one looked at first
    return passed == gate.passed


def settle(timeout_s: float, what: str) -> None:
    """Wait as `wait_for_all_pending_works` does, but pass over groups that have failed: whoever waited has been told.

    It waits for what synchronous calls have left on a GPU, too.

    **Local:** where groups are about to be destroyed; nothing keeps other threads from enqueuing.

    Raises:
        DrainTimeout: Something was not complete after ``timeout_s``.
    """
    deadline = time.monotonic() + timeout_s
    _drain(deadline, timeout_s, what, pass_over_failed=True)
    try:
        for group in groups():  # NCCL must not be ended beside these, nor a process whose peers they serve
            group.block_synchronous(deadline)
    except CollectiveTimeout as error:
        raise DrainTimeout(f"{what}: {error}") from None


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
