"""What the registry of collectives in flight keeps for one storage, and what stands for it in torch's registry.

torch keeps a list of works per thread and storage, and ``wait_tensor`` takes away one thread's whole list before it
waits for the first of them; one that raises takes the others with it. So a handle does not stand for one work: its
``wait`` waits for every live work of its storage, and any handle that torch still has is as good as any other.
A thread's handles of a storage are counted in a `Slot`. Once ``wait_tensor`` has reached one of them, the whole
slot is dropped, because from then on nobody can say which of the others torch still has.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Protocol

from hpc_inflight import _torch_compat as compat
from hpc_inflight._torch_compat import NO_TIMEOUT, BaseWork
from hpc_inflight._unwaited import Kind

if TYPE_CHECKING:
    from datetime import timedelta

    import torch

    from hpc_inflight._unwaited import Tally
    from hpc_inflight.work import Completion


class Token:
    """A thread's name here, never used again by another, as the system's own numbers are.

    Attributes:
        ended: The thread has.
    """

    ended = False


class _Life:
    """Goes with its thread."""

    def __init__(self, token: Token) -> None:
        self._token = token

    def __del__(self) -> None:
        self._token.ended = True


class _Thread(threading.local):
    """What the running thread is known by here.

    Attributes:
        token: Its name.
        scope: Counts what is registered by this thread and lost, for a context that wants to know.
    """

    def __init__(self) -> None:
        self.token = Token()
        self._life = _Life(self.token)
        self.scope: Tally | None = None


this_thread = _Thread()


class Owner(Protocol):
    """What a storage and its handles ask of their registry."""

    def wait(self, storage: Storage, timeout: timedelta, handle: Handle) -> None:
        """Wait for every live work of the storage."""

    def lost(self, handle: Handle) -> None:
        """Note that torch dropped a handle without waiting for it."""

    def close(self, entry: Entry) -> None:
        """Remove a work that was waited."""


class Slot:
    """One thread's handles of one storage that torch is known to have.

    Attributes:
        idle: How many of them stand for no live record, so that the next registration needs no new one.
        thread: Its token.
    """

    __slots__ = ("idle", "thread")

    def __init__(self, thread: Token) -> None:
        self.idle = 0
        self.thread = thread


class Storage:
    """The registrations of one live storage.

    Attributes:
        registry: The registry that it belongs to.
        alias: A tensor of our own: it keeps the storage, and so its key, from being reused.
        key: `_torch_compat.storage_key` of it.
        live: The records that nobody has waited for, oldest first.
        slots: By thread.
        in_torch: By the ``id`` of each handle that torch has not waited for or dropped, the thread it is of.
        purger: The thread that is popping the handles at the moment.
        swallowed: That thread popped a handle while there were live records.
    """

    __slots__ = ("alias", "in_torch", "key", "live", "purger", "registry", "slots", "swallowed")

    def __init__(self, registry: Owner, tensor: torch.Tensor, key: int) -> None:
        self.registry = registry
        self.alias = compat.alias_of(tensor)
        self.key = key
        self.live: dict[Record, None] = {}
        self.slots: dict[Token, Slot] = {}
        self.in_torch: dict[int, Token] = {}
        self.purger: object = None
        self.swallowed = False

    def stand_in(self, thread: Token) -> Slot:
        """Return the slot of one handle of this thread that stands for nothing else, from now on for a record."""
        slot = self.slots.get(thread)
        if slot is not None and slot.idle and not compat.registers_elsewhere():
            slot.idle -= 1
            return slot
        return self.add_handle(thread)

    def add_handle(self, thread: Token) -> Slot:
        """Give torch one more handle, from this thread, and return its slot."""
        slot = self.slots.get(thread)
        if slot is None:
            slot = self.slots[thread] = Slot(thread)
        handle = Handle()
        handle.storage = self
        handle.slot = slot
        handle.waited = False
        compat.register_in_torch(self.alias, handle)
        self.in_torch[id(handle)] = thread
        return slot

    def put_back(self, thread: Token) -> None:
        """Make sure that a ``wait_tensor`` finds a handle, after one was taken while there are live records."""
        if not (self.slots if compat.WAIT_TENSOR_FINDS_EVERY_THREAD else thread in self.slots):
            self.add_handle(thread).idle += 1

    def popped(self, handle: Handle) -> None:
        """Note that torch no longer has this handle."""
        self.in_torch.pop(id(handle), None)
        thread = handle.slot.thread
        if self.slots.get(thread) is handle.slot:
            del self.slots[thread]


class Record:
    """One work registered for one tensor.

    Attributes:
        kind: The tensor's shape and dtype; None where they are those of the storage's alias.
    """

    __slots__ = ("entry", "kind", "slot", "storage")

    def __init__(self, entry: Entry, storage: Storage, slot: Slot, kind: tuple[torch.Size, torch.dtype] | None) -> None:
        self.entry = entry
        self.storage = storage
        self.slot = slot
        self.kind = kind

    def shape_and_dtype(self) -> tuple[tuple[int, ...], torch.dtype]:
        """Return those of the tensor that was registered."""
        shape, dtype = self.kind or (self.storage.alias.shape, self.storage.alias.dtype)
        return tuple(shape), dtype

    def count_in(self, tally: Tally) -> None:
        """Count this record's work among those that nobody waited for."""
        entry = self.entry
        tally.add(Kind(entry.op(), entry.group(), *self.shape_and_dtype(), entry.site), entry.seq())


class Entry:
    """One registered work with all its records; what `hpc_inflight.work.Work.registration` holds.

    Attributes:
        registry: The registry that it is in.
        completion: Of a work of this package. Not the work itself: it holds the output tensors, and the entry must
            see when nobody else does.
        work: A work of another package.
        registered_at: ``time.monotonic()`` when a work of another package was registered.
        scope: The registering thread's scope.
        site: Where it was registered, if that is recorded.
        records: Empty once it was waited, or lost.
    """

    __slots__ = ("completion", "records", "registered_at", "registry", "scope", "site", "work")

    def __init__(self, registry: Owner, completion: Completion | None, work: Any) -> None:
        self.registry = registry
        self.completion = completion
        self.work = work
        self.registered_at = 0.0 if completion is not None else time.monotonic()
        self.scope = this_thread.scope
        self.site = ""
        self.records: dict[Record, None] = {}

    def issued_at(self) -> float:
        """Return ``time.monotonic()`` when it was issued, or registered."""
        return self.registered_at if self.completion is None else self.completion.issued_at

    def op(self) -> str:
        """Return the name of the operation, or of another package's class of works."""
        return type(self.work).__name__ if self.completion is None else self.completion.op

    def group(self) -> str:
        """Return the name of the group; empty where only another package knows."""
        return "" if self.completion is None else self.completion.group

    def seq(self) -> int:
        """Return its number in the group; 0 where only another package knows."""
        return 0 if self.completion is None else self.completion.seq

    def completed(self) -> bool:
        """Say whether the operation has ended, well or not."""
        if self.completion is not None:
            return self.completion.poll()
        return bool(self.work.is_completed())

    def succeeded(self) -> bool:
        """Say whether the operation has ended well; not of another package's, whose own ``wait`` has to run."""
        completion = self.completion
        return completion is not None and completion.poll() and completion.exception is None

    def block(self, timeout: timedelta) -> Exception | None:
        """Order the caller after the operation, as ``Work.wait`` does, and return why it failed.

        Raises:
            Exception: It has not ended: the deadline passed.
        """
        if self.completion is not None:
            if not self.completion.completed:
                self.completion.wait(timeout)
            failure: Any = self.completion.exception
            return failure  # type: ignore[no-any-return]  # an Exception, or what ends the interpreter anyway
        try:
            self.work.wait()
        except Exception as error:
            if not self.work.is_completed():
                raise
            return error
        return None

    def waited(self) -> None:
        """Remove this work's records; called by ``Work.wait``."""
        self.registry.close(self)


class Handle(BaseWork):  # type: ignore[misc]  # torch's stubs leave it Any
    """What torch's registry holds, and nobody else: so torch dropping it without a wait is seen, too."""

    __slots__ = ("slot", "storage", "waited")

    # no __init__: torch's own takes no arguments, and calling it from ours would be half of the cost
    storage: Storage
    slot: Slot
    waited: bool

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Block the host until every live work of the storage is complete."""
        self.waited = True
        storage = self.storage
        if storage.purger is this_thread.token and not storage.live:
            storage.in_torch.pop(id(self), None)  # the frequent case, and no lock for it
        else:
            storage.registry.wait(storage, timeout, self)
        return True

    def __del__(self) -> None:
        if not (self.waited or sys.is_finalizing()):
            self.storage.registry.lost(self)
