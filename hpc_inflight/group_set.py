"""The process-wide set of live groups, and the drain that waits until none has work enqueued."""

from __future__ import annotations

import itertools
import os
import threading
import time
import weakref
from typing import TYPE_CHECKING, Protocol

from hpc_inflight.errors import DrainTimeout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpc_inflight.work import Completion


class Group(Protocol):
    """What the set needs of a member."""

    def pending_works(self) -> Sequence[Completion]:
        """Return what is enqueued and not complete, oldest first."""

    def describe(self) -> str:
        """Return the group's name and this rank's place in it."""

    def forked(self) -> None:
        """Refuse everything from here on; called in a forked child."""


_lock = threading.RLock()  # a group dropped while it is held may come back here
_watching_forks = False
_ids = itertools.count()
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
        return ticket


def discard(ticket: int) -> None:
    """Remove a group at its destruction; nothing happens when it is gone already."""
    with _lock:
        _groups.pop(ticket, None)


def _forked() -> None:
    global _lock  # noqa: PLW0603  # another thread may have held it at the fork, and does not exist here
    _lock = threading.RLock()
    for group in list(_groups.values()):
        group.forked()
    _groups.clear()


def groups() -> list[Group]:
    """Return the live groups of this process in the order of their creation.

    **Local:** any thread, any time.
    """
    with _lock:
        return [group for _, group in sorted(_groups.items())]


def wait_for_all_pending_works(timeout_s: float) -> None:
    """Block until no live group has work enqueued.

    **Local:** but it returns only when the other ranks issue what this rank's works wait for. The works stay
    un-waited: this waits for completion and consumes nothing.

    Args:
        timeout_s: Seconds for all groups together.

    Raises:
        DrainTimeout: The deadline passed; names the group, operation, sequence number and age.
    """
    deadline = time.monotonic() + timeout_s
    for group in groups():
        while pending := group.pending_works():
            oldest = pending[0]
            try:
                oldest.block(max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                age = time.monotonic() - oldest.issued_at
                msg = (
                    f"wait_for_all_pending_works: {len(pending)} pending after {timeout_s:g} s on {group.describe()}, "
                    f"the oldest {oldest.op} (seq {oldest.seq}), issued {age:.1f} s ago; a rank has not issued it"
                )
                raise DrainTimeout(msg) from None
