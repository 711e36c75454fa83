"""The registry of collectives in flight: from a tensor's storage to the works that a compiled region may wait for.

torch's own registry finds a work by storage when ``wait_tensor`` runs, compiled or not, but offers Python no way
to remove one. So it gets a small `_Handle` for every (tensor, work) pair, and the real list is here. A work that
was waited leaves handles whose wait does nothing; when the last live handle of a storage goes, all of them are
popped through ``wait_tensor``.

An entry also goes when nobody could wait for it any more: its operation is complete and only this registry still
holds the storage. Entries are looked at for that, a few each time another is added, so memory stays bounded when a
program forgets to wait.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpc_inflight import _torch_compat as compat
from hpc_inflight._torch_compat import NO_TIMEOUT, BaseWork
from hpc_inflight.errors import InvalidArgumentError
from hpc_inflight.work import Completion, Work

if TYPE_CHECKING:
    from datetime import timedelta

    import torch

_SWEEP_PER_REGISTRATION = 2  # more than one, so that the sweep gains on the issuer


@dataclass(frozen=True)
class InflightWork:
    """One collective in flight, as `inflight` lists it.

    Attributes:
        op: Name of the operation.
        group: Name of the group; empty for a work registered by hand that is not of this package.
        seq: Its number in the group; 0 for one that is not of this package.
        shape: Shape of the registered tensor.
        dtype: Dtype of the registered tensor.
        age_s: Seconds since it was issued.
        completed: Its data has arrived, but nobody has waited for it.
    """

    op: str
    group: str
    seq: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    age_s: float
    completed: bool


@dataclass(frozen=True)
class Counts:
    """What has happened to the works registered in this process so far.

    Attributes:
        registered: Works that were registered.
        waited_by_tensor: Those that ``wait_tensor`` found, in a compiled region or eagerly.
        waited_by_work: Those whose own ``wait`` came first.
        unwaited: Those that completed and were let go because nobody could wait for them any more.
        wait_s: Seconds the host was blocked in ``wait_tensor``.
    """

    registered: int = 0
    waited_by_tensor: int = 0
    waited_by_work: int = 0
    unwaited: int = 0
    wait_s: float = 0.0


class _Storage:
    """The registrations of one live storage."""

    __slots__ = ("alias", "live")

    def __init__(self, alias: torch.Tensor) -> None:
        self.alias = alias  # a tensor of our own: keeps the storage, and so its key, from being reused
        self.live: dict[_Handle, None] = {}


class _Entry:
    """One registered work: all its handles; what `hpc_inflight.work.Work.registration` holds."""

    __slots__ = ("completion", "handles", "issued_at", "via_tensor", "work")

    def __init__(self, completion: Completion | None, work: Any) -> None:
        # Not the Work itself for ours: it holds the output tensors, and the entry must see when nobody else does.
        self.completion = completion
        self.work: Any = None if completion is not None else work
        self.issued_at = time.monotonic() if completion is None else completion.issued_at
        self.handles: list[_Handle] = []
        self.via_tensor = False

    def completed(self) -> bool:
        if self.completion is not None:
            return self.completion.poll()
        return bool(self.work.is_completed())

    def block(self, timeout: timedelta) -> None:
        if self.completion is None:
            self.work.wait()
            return
        if not self.completion.completed:
            self.completion.block(compat.timeout_s(timeout, self.completion.timeout_s))
        if self.completion.exception is not None:
            raise self.completion.exception

    def waited(self) -> None:
        """Remove this work's handles; called by ``Work.wait`` and after a wait through a tensor."""
        _registry.close(self)


class _Handle(BaseWork):  # type: ignore[misc]  # torch's stubs leave it Any
    """What torch's registry holds: its ``wait`` asks the entry, once."""

    __slots__ = ("dtype", "entry", "shape", "storage")

    def __init__(self, entry: _Entry, storage: _Storage, tensor: torch.Tensor) -> None:
        super().__init__()
        self.entry: _Entry | None = entry
        self.storage = storage
        self.shape = tuple(tensor.shape)
        self.dtype = tensor.dtype

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Block the host until the work is complete, or return at once when it was waited before."""
        entry = self.entry
        if entry is None:
            return True
        entry.via_tensor = True
        started = time.perf_counter()
        try:
            entry.block(timeout)
        finally:
            _registry.blocked(time.perf_counter() - started)
            _registry.close(entry)
        return True


class _Registry:
    """Entries by storage, under one lock."""

    def __init__(self) -> None:
        # re-entrant: dropping the last reference of a tensor or work can run Python that comes back here
        self._lock = threading.RLock()
        self._storages: dict[int, _Storage] = {}
        self._ring: deque[int] = deque()  # storage keys in the order in which the sweep looks at them
        self._registered = self._by_tensor = self._by_work = self._unwaited = 0
        self._wait_s = 0.0

    def register(self, tensor: torch.Tensor, work: object) -> None:
        with self._lock:
            entry = self._entry_of(work)
            key = compat.storage_key(tensor)
            storage = self._storages.get(key)
            if storage is None:
                storage = self._storages[key] = _Storage(tensor.detach())
                self._ring.append(key)
            handle = _Handle(entry, storage, tensor)
            entry.handles.append(handle)
            storage.live[handle] = None
            # under the lock: a purge of this storage must see the handle in both registries or in neither
            compat.register_in_torch(storage.alias, handle)
            self._sweep(_SWEEP_PER_REGISTRATION)

    def _entry_of(self, work: object) -> _Entry:
        if not isinstance(work, Work):
            self._registered += 1
            return _Entry(None, work)
        registration = work.registration
        if not isinstance(registration, _Entry):
            self._registered += 1
            registration = work.registration = _Entry(work.completion, work)
        return registration

    def close(self, entry: _Entry, *, unwaited: bool = False) -> None:
        """Remove an entry's handles, and pop those storages from torch's registry that have none left."""
        with self._lock:
            handles, entry.handles = entry.handles, []
            if not handles:
                return
            if unwaited:
                self._unwaited += 1
            elif entry.via_tensor:
                self._by_tensor += 1
            else:
                self._by_work += 1
            for handle in handles:
                handle.entry = None
                storage = handle.storage
                storage.live.pop(handle, None)
                if not storage.live:
                    # the key stays in the ring until the sweep comes by; a new storage may have taken it by then
                    self._storages.pop(compat.storage_key(storage.alias), None)
                    compat.pop_from_torch(storage.alias)

    def blocked(self, seconds: float) -> None:
        with self._lock:
            self._wait_s += seconds

    def _sweep(self, limit: int) -> None:
        for _ in range(min(limit, len(self._ring))):
            key = self._ring.popleft()
            storage = self._storages.get(key)
            if storage is None:
                continue
            entries = {handle.entry for handle in storage.live}
            if not compat.storage_is_shared(storage.alias) and all(e.completed() for e in entries if e):
                for entry in entries:
                    if entry is not None:
                        self._close_unwaited(entry)
            else:
                self._ring.append(key)

    def _close_unwaited(self, entry: _Entry) -> None:
        # another output of the same work may still be alive and waited for: then only this storage's handles go
        others = [h for h in entry.handles if compat.storage_is_shared(h.storage.alias)]
        if not others:
            self.close(entry, unwaited=True)
            return
        for handle in [h for h in entry.handles if h not in others]:
            entry.handles.remove(handle)
            handle.entry = None
            handle.storage.live.pop(handle, None)
            if not handle.storage.live:
                self._storages.pop(compat.storage_key(handle.storage.alias), None)
                compat.pop_from_torch(handle.storage.alias)

    def sweep_all(self) -> None:
        with self._lock:
            self._sweep(len(self._ring))

    def inflight(self) -> list[InflightWork]:
        now = time.monotonic()
        with self._lock:
            handles = [h for storage in self._storages.values() for h in storage.live]
        listed = []
        for handle in handles:
            entry = handle.entry
            if entry is None:
                continue
            completion = entry.completion
            listed.append(
                InflightWork(
                    op=type(entry.work).__name__ if completion is None else completion.op,
                    group="" if completion is None else completion.group,
                    seq=0 if completion is None else completion.seq,
                    shape=handle.shape,
                    dtype=handle.dtype,
                    age_s=now - entry.issued_at,
                    completed=entry.completed(),
                )
            )
        return sorted(listed, key=lambda w: -w.age_s)

    def counts(self) -> Counts:
        with self._lock:
            return Counts(self._registered, self._by_tensor, self._by_work, self._unwaited, self._wait_s)


_registry = _Registry()


def register_work(tensor: torch.Tensor, work: object) -> None:
    """Let a later ``wait_tensor`` on ``tensor``, or on a tensor that shares its storage, wait for ``work``.

    **Local:** any thread, inside or outside of `allow_inflight_collective_as_graph_input`. Registering a work for
    several tensors is one registration with several handles; two works on one tensor are both waited.

    Args:
        tensor: A tensor with a storage; any dtype, shape and device. Its storage is kept alive until the work is
            waited, or complete with no other holder of the storage.
        work: A c10d Work.

    Raises:
        InvalidArgumentError: The tensor has no storage (sparse), so that nothing could find the work again.
    """
    if not compat.has_storage(tensor):
        msg = (
            f"register_work: a tensor of type {type(tensor).__name__} with layout {tensor.layout} has no storage to "
            "find the work by; register its dense parts"
        )
        raise InvalidArgumentError(msg)
    _registry.register(tensor, work)


def inflight() -> list[InflightWork]:
    """List the registered works that nobody has waited for, oldest first.

    **Local:** any thread, any time; a snapshot. Empty unless works were registered under
    `allow_inflight_collective_as_graph_input` or by `register_work`.
    """
    return _registry.inflight()


def counts() -> Counts:
    """Count what has happened to registered works in this process so far.

    **Local:** any thread, any time.
    """
    return _registry.counts()


def sweep() -> None:
    """Let go of every complete work whose storage nobody else holds.

    **Local:** any thread, any time; happens by itself, a few entries per registration.
    """
    _registry.sweep_all()
