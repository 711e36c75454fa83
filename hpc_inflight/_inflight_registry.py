"""The list behind `work_registry`: storages with their records under one lock, and when torch's handles are popped.

Popping runs ``wait`` of whatever else torch has for that storage, so it never happens under the lock. Meanwhile
other threads that register on that storage wait for its end, for a moment at most: one that has registered a work
must find it in torch's registry when it waits for it.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, TypeVar

import torch

from hpc_inflight import _torch_compat as compat
from hpc_inflight._call_site import caller
from hpc_inflight._inflight_storage import Entry, Handle, Record, Storage, this_thread
from hpc_inflight._torch_compat import NO_TIMEOUT
from hpc_inflight._unwaited import Tally
from hpc_inflight.work import Work

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from datetime import timedelta

    from hpc_inflight._inflight_storage import Token

_T = TypeVar("_T")

_SWEEP_PER_REGISTRATION = 2  # more than one, so that the sweep gains on the issuer
_FRUITLESS_POPS = 4  # a pop takes one thread's list, which may be of other works only
_WAITS = 64  # for what other threads register during the wait; then they have to take what comes
_PURGE_S = 0.2  # usually some microseconds; only a work of another package makes it longer
_NOTHING = torch.empty(0, device="cpu")  # made here, where no mode of the user's sees it
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Registry:
    """Storages with their records, under one lock; see `work_registry` for what is counted."""

    def __init__(self) -> None:
        # re-entrant: dropping the last reference of a tensor or work can run Python that comes back here
        self._lock = threading.RLock()
        self._purged = threading.Condition(self._lock)
        self._storages: dict[int, Storage] = {}
        self._round: Iterator[int] = iter(())  # keys that the sweep has yet to look at in this round
        self.registered = self.by_tensor = self.by_work = self.missed = 0
        self.unwaited = Tally()  # complete, never waited, and nobody can any more
        self.wait_s = 0.0
        self.records_sites = False
        self.on_missed: Callable[[torch.Tensor], None] | None = None  # in strict mode: for a wait that found nothing
        self._held_up = 0  # threads that wait for the end of a purge

    def register(self, tensor: torch.Tensor, work: object) -> None:
        """Add a work, and look at a few storages for what has gone meanwhile."""
        me = this_thread.token
        key = compat.storage_key(tensor)
        gone = None
        with self._lock:
            storage = self._storages.get(key)
            if storage is not None and storage.purger is not None and storage.purger is not me:
                storage = self._purged_storage(storage)
            if storage is None:
                storage = self._storages[key] = Storage(self, tensor, key)
                slot, kind = storage.add_handle(me), None
            else:
                slot, kind = storage.stand_in(me), (tensor.shape, tensor.dtype)
            if type(work) is Work and work.registration is None:  # `_entry_of`, for nearly all
                self.registered += 1
                entry = work.registration = Entry(self, work.completion, None)
            else:
                entry = self._entry_of(work)
            record = Record(entry, storage, slot, kind)
            storage.live[record] = entry.records[record] = None
            if self.records_sites:
                entry.site = entry.site or caller()
            if len(self._storages) > 1:
                gone = self._sweep(_SWEEP_PER_REGISTRATION, me)
        if gone:
            self._purge(gone, quiet=True)

    def _purged_storage(self, storage: Storage) -> Storage | None:
        """Wait until another thread has popped the handles of a storage, and return what stands for it then."""
        self._held_up += 1
        self._purged.wait_for(lambda: storage.purger is None, _PURGE_S)
        self._held_up -= 1
        return self._storages.get(storage.key)

    def _entry_of(self, work: object) -> Entry:
        if type(work) is not Work and (not isinstance(work, Work) or type(work).wait is not Work.wait):
            self.registered += 1
            return Entry(self, None, work)
        registration = work.registration
        if not isinstance(registration, Entry) or not registration.records:
            self.registered += 1
            registration = work.registration = Entry(self, work.completion, None)
        return registration

    def close(self, entry: Entry) -> None:
        """Remove a work that was waited by its own ``wait``."""
        me = this_thread.token
        with self._lock:
            if not entry.records:
                return
            self.by_work += 1
            gone = self._remove(entry, me)
        if gone:
            self._purge(gone)

    def _remove(self, entry: Entry, me: Token) -> list[Storage]:
        """Remove a work's records and return the storages that this thread has to purge now."""
        records, entry.records = entry.records, {}
        gone = []
        for record in records:
            storage = record.storage
            live = storage.live
            live.pop(record, None)
            record.slot.idle += 1
            if not live and storage.purger is None:
                if storage.in_torch:
                    storage.purger = me
                    gone.append(storage)
                else:  # torch's wait_tensor has just taken the last handle
                    self._forget(storage)
        return gone

    def _take(self, storage: Storage, me: Token) -> tuple[list[Entry], list[Storage]]:
        """Remove the works of a storage if they all have succeeded, as most have when a wait comes.

        Returns:
            The works that have to be waited for first, and the storages that this thread has to purge now.
        """
        entries = list({record.entry: None for record in storage.live})
        gone: list[Storage] = []
        for entry in entries:
            if not entry.succeeded():
                return entries, gone
        for entry in entries:
            self.by_tensor += bool(entry.records)
            gone += self._remove(entry, me)
        return [], gone

    def wait(self, storage: Storage, timeout: timedelta, handle: Handle) -> None:
        """Wait for every live work of a storage, for a handle that torch's ``wait_tensor`` has taken.

        Raises:
            Exception: See `_block`.
        """
        me = this_thread.token
        with self._lock:
            storage.popped(handle)
            if not storage.live:
                self._forget(storage)
                return
            if storage.purger is me:
                storage.swallowed = True  # registered while this thread purges, which puts a handle back at the end
                return
            entries, gone = self._take(storage, me)
            if entries:
                storage.put_back(me)  # before blocking: other threads must not find nothing meanwhile
        if entries:
            gone = self._block(storage, entries, timeout, put_back=True)
        if gone:
            self._purge(gone)

    def _block(self, storage: Storage, entries: list[Entry], timeout: timedelta, *, put_back: bool) -> list[Storage]:
        """Wait for works of a storage, remove them, and return the storages that this thread has to purge now.

        Raises:
            Exception: The first failure, after the others were waited; or one is not complete at its deadline: it
                and those after it stay, and the next wait finds them.
        """
        me = this_thread.token
        ended: list[Entry] = []
        failure: BaseException | None = None
        started = time.perf_counter()
        try:
            for entry in entries:
                failed = entry.block(timeout)
                ended.append(entry)
                failure = failure or failed
        except Exception as error:  # noqa: BLE001  # a work of another package raises what it likes; raised below
            failure = failure or error
        except BaseException as error:  # noqa: BLE001  # an interrupt; raised below
            failure = error
        gone: list[Storage] = []
        with self._lock:
            self.wait_s += time.perf_counter() - started
            for entry in ended:
                self.by_tensor += bool(entry.records)
                gone += self._remove(entry, me)
            if put_back and storage.live:
                storage.put_back(me)
        if failure is not None:
            self._purge(gone)
            raise failure
        return gone

    def wait_by_tensor(self, tensor: torch.Tensor, operator: Callable[[torch.Tensor], _T]) -> _T:
        """Wait for what is registered for a tensor and run ``wait_tensor``, as a purge of the handles.

        That is also when nothing is registered: the operator must not take what another thread registers meanwhile.
        """
        if type(tensor) not in _PLAIN or not compat.has_storage(tensor):
            return operator(tensor)
        me = this_thread.token
        key = compat.storage_key(tensor)
        found = False
        for _ in range(_WAITS):
            storage, works, gone = self._settle(tensor, key, me)
            found = found or works
            if storage in gone:
                gone.remove(storage)
                if gone:
                    self._purge(gone)
                return self._purge_by(operator, tensor, storage, found=found)
            if gone:
                self._purge(gone)
            if storage.purger is me:
                break
        return operator(tensor)

    def _settle(self, tensor: torch.Tensor, key: int, me: Token) -> tuple[Storage, bool, list[Storage]]:
        """Wait for the works of a tensor's storage, remove them, and make this thread its purger if none is left.

        Returns:
            The storage, whether it had works, and the storages that this thread has to purge now.
        """
        gone: list[Storage] = []
        with self._lock:
            storage = self._storages.get(key)
            if storage is not None and storage.purger is not None and storage.purger is not me:
                storage = self._purged_storage(storage)
            if storage is None:
                storage = self._storages[key] = Storage(self, tensor, key)
            if not storage.live:
                if storage.purger is None:
                    storage.purger = me
                    gone.append(storage)
                return storage, False, gone
            entries, gone = self._take(storage, me)
        if entries:
            gone = self._block(storage, entries, NO_TIMEOUT, put_back=False)
        return storage, True, gone

    def _purge_by(
        self, operator: Callable[[torch.Tensor], _T], tensor: torch.Tensor, storage: Storage, *, found: bool
    ) -> _T:
        """Purge a storage by running ``wait_tensor`` on a tensor of it; in strict mode, tell of a wait in vain."""
        before = compat.registry_size() if self.on_missed is not None else 0
        try:
            return operator(tensor)
        finally:
            self._purge([storage])
            if self.on_missed is not None and not found and compat.registry_size() >= before:
                self.on_missed(tensor)

    def _purge(self, storages: list[Storage], *, quiet: bool = False) -> None:
        """Pop the handles of storages of which this thread is the purger; never under the lock.

        Raises:
            Exception: Another package's work on that storage failed; not when ``quiet``, since nobody holds the data.
        """
        failure = None
        try:
            for storage in storages:
                # handles in no slot are mostly those that a wait_tensor below us in this thread has taken and waits for
                fruitless = _FRUITLESS_POPS if storage.slots else 1
                storage.slots = {}  # whoever registers meanwhile brings a new handle
                in_torch = storage.in_torch
                while in_torch and fruitless:
                    before = len(in_torch)
                    try:
                        compat.pop_from_torch(storage.alias)
                    except Exception as error:  # noqa: BLE001  # another package's; raised below
                        failure = failure or error
                    fruitless -= len(in_torch) >= before
        finally:
            with self._lock:
                for storage in storages:
                    storage.purger = None
                    if storage.swallowed:
                        storage.swallowed = False
                        if storage.live:
                            storage.put_back(this_thread.token)
                    if not (storage.live or storage.in_torch):
                        del self._storages[storage.key]
                if self._held_up:
                    self._purged.notify_all()
        if failure is not None and not quiet:
            raise failure

    def _forget(self, storage: Storage) -> None:
        # one with handles left stays: new records must come to them, or a wait would not see all; see the sweep
        if not (storage.live or storage.in_torch or storage.purger) and self._storages.get(storage.key) is storage:
            del self._storages[storage.key]

    def lost(self, handle: Handle) -> None:
        """Note that torch dropped a handle without waiting for it, because a wait before it raised."""
        storage = handle.storage
        with self._lock:
            storage.popped(handle)
            if storage.live:
                storage.put_back(this_thread.token)
            self._forget(storage)

    def _next_to_look_at(self) -> Storage | None:
        """Return the next storage of this round of the sweep; None if it has gone since the round began."""
        key = next(self._round, None)
        if key is None:
            self._round = iter(list(self._storages))  # one copy for as many looks: a look stays cheap
            key = next(self._round, None)
        return None if key is None else self._storages.get(key)

    def _give_up_if_out_of_reach(self, storage: Storage) -> None:
        """Let go of a storage whose handles are all of threads that have ended: torch keeps them, and pops none."""
        if all(thread.ended for thread in storage.in_torch.values()):
            del self._storages[storage.key]
            storage.alias = _NOTHING

    def _sweep(self, limit: int, me: Token) -> list[Storage]:
        """Look at some storages, remove what nobody can wait for, and return what this thread has to purge now."""
        gone = []
        for _ in range(min(limit, len(self._storages))):
            storage = self._next_to_look_at()
            if storage is None or storage.purger is not None:
                continue
            if not storage.live:  # handles are left, for which torch may want the thread that made them
                if compat.WAIT_TENSOR_FINDS_EVERY_THREAD or me in storage.in_torch.values():
                    storage.purger = me
                    gone.append(storage)
                else:
                    self._give_up_if_out_of_reach(storage)
                continue
            if compat.storage_is_shared(storage.alias):
                continue
            # the newest first: it is likely the last to complete, and one look is all that waiting for it may cost
            if not all(record.entry.completed() for record in reversed(storage.live)):
                continue
            for record in storage.live:
                # another output of the same work may still be alive and waited for: only this storage's records go
                records = record.entry.records
                records.pop(record, None)
                if not records:
                    record.count_in(self.unwaited)
                    if record.entry.scope is not None:
                        record.count_in(record.entry.scope)
            storage.live = {}
            storage.purger = me
            gone.append(storage)
        return gone

    def sweep(self, limit: int | None = None) -> None:
        """Remove what nobody can wait for: of all storages, or of at most ``limit``, if there are several."""
        if len(self._storages) > (limit is not None):
            with self._lock:
                if limit is None:
                    limit, self._round = len(self._storages), iter(())
                gone = self._sweep(limit, this_thread.token)
            if gone:
                self._purge(gone, quiet=True)

    def forget(self) -> None:
        """Remove every work without waiting, at the end of the process: torch would report them once more."""
        me = this_thread.token
        with self._lock:
            gone = [storage for storage in self._storages.values() if storage.purger is None]
            for storage in gone:
                storage.live = {}
                storage.purger = me
        self._purge(gone, quiet=True)

    def knows(self, tensor: torch.Tensor) -> bool:
        """Say whether a wait for this tensor finds a work here, or is itself a part of this registry's work."""
        if not compat.has_storage(tensor):
            return False
        storage = self._storages.get(compat.storage_key(tensor))
        return storage is not None and (bool(storage.live) or storage.purger is this_thread.token)

    def records(self) -> list[Record]:
        """Return every live record."""
        with self._lock:
            return [record for storage in self._storages.values() for record in storage.live]
