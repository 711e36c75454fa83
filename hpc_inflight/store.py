"""A ``torch.distributed.Store`` that lives in MPI messages, and the ``mpi://`` rendezvous: no port, no MASTER_ADDR.

Rank 0 keeps the table and serves the others from one thread; requests and replies are MPI messages on a
communicator of the store's own. Everything polls with short sleeps rather than block inside MPI, where a wait
would spin on a core that the ranks need.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import deque
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import parse_qs, urlparse

from hpc_inflight import _mpi
from hpc_inflight._mpi_agree import agree, run_with_deadline
from hpc_inflight._poll import poll
from hpc_inflight._store_table import Table
from hpc_inflight._torch_compat import BaseStore, PrefixStore
from hpc_inflight._torch_compat import register_rendezvous as register_rendezvous_handler
from hpc_inflight.errors import InvalidArgumentError, StoreError, StoreTimeout

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mpi4py import MPI

_REQUEST_TAG = 1
_FIRST_REPLY_TAG = 2
_TAGS = 30000  # below every MPI library's limit
_GRACE_S = 10.0  # past a request's own deadline, before its server counts as gone
_LAST_CALL_S = 60.0  # for the server to see that it should stop: milliseconds, unless the machine stalls
_IDLE_SLEEP_S = 2e-3  # the server's longest sleep: the latency of the first request after a pause


class MPIStore(BaseStore):  # type: ignore[misc]  # torch's stubs leave it Any
    """A key-value store shared by the ranks of a communicator.

    Making one is collective; everything else is local. Values are bytes (a str is encoded as UTF-8). ``get`` and
    ``wait`` block the host until the keys exist, at most ``timeout``; the others return at once. Not allowed in a
    forked child, nor when MPI grants less than ``MPI_THREAD_MULTIPLE``.
    """

    def __init__(self, comm: MPI.Intracomm, timeout: timedelta = timedelta(seconds=300)) -> None:
        """Make the store.

        **Collective:** over ``comm``.

        Args:
            comm: A communicator that nothing else uses; the store frees it.
            timeout: Default deadline of ``get`` and ``wait``; also set by ``set_timeout``.
        """
        super().__init__()
        self.set_timeout(timeout)
        self._comm = comm
        self._tags = itertools.count()
        self._closed = False
        self._table = Table() if comm.rank == 0 else None
        self._stop = threading.Event()
        self._server: threading.Thread | None = None
        self._sending: deque[Any] = deque()  # sends that MPI is not done with; they hold their buffers
        # below MPI_THREAD_MULTIPLE there is a store all the same, for the groups of this package need none
        self._usable = comm.size == 1 or _mpi.thread_multiple()
        if self._table is not None and comm.size > 1 and self._usable:
            self._server = threading.Thread(target=self._serve, name="hpc_inflight-store", daemon=True)
            self._server.start()

    # the server, on rank 0 ----------------------------------------------------------------------------------

    def _serve(self) -> None:
        comm, module, pause = self._comm, _mpi.mpi(), 0.0
        while True:
            message = comm.improbe(module.ANY_SOURCE, _REQUEST_TAG)
            if message is None:
                if self._stop.is_set():
                    return
                self._reap()
                if self._table is not None:
                    self._table.expire()
                time.sleep(pause)
                pause = min(max(pause * 1.5, 20e-6), _IDLE_SLEEP_S)
                continue
            pause = 0.0
            status = module.Status()
            reply_tag, name, args = message.recv(status=status)
            self._handle(status.Get_source(), reply_tag, name, args)

    def _handle(self, source: int, reply_tag: int, name: str, args: tuple[Any, ...]) -> None:
        def reply(outcome: str, value: Any) -> None:
            self._sending.append(self._comm.isend((outcome, value), source, reply_tag))

        table = self._table
        assert table is not None  # noqa: S101  # for mypy: only rank 0 serves
        try:
            if name == "park":
                keys, produce, seconds = args
                table.park(keys, produce, seconds, reply)
            else:
                reply("ok", getattr(table, name)(*args))
        except Exception as error:  # noqa: BLE001  # a bad request fails its sender, not the server
            reply("error", f"{type(error).__name__}: {error}")

    def _reap(self) -> None:
        for _ in range(len(self._sending)):  # other threads may append meanwhile
            request = self._sending.popleft()
            if not request.Test():
                self._sending.append(request)

    # the client ---------------------------------------------------------------------------------------------

    def _call(self, name: str, *args: Any, timeout_s: float = 60.0) -> Any:
        self._check_open(name)
        if self._table is not None:
            return getattr(self._table, name)(*args)
        return self._ask(name, name, args, timeout_s)

    def _ask(self, call: str, name: str, args: tuple[Any, ...], timeout_s: float) -> Any:
        comm = self._comm
        reply_tag = _FIRST_REPLY_TAG + next(self._tags) % _TAGS
        request = comm.isend((reply_tag, name, args), 0, _REQUEST_TAG)
        found: list[Any] = []

        def arrived() -> bool:
            request.Test()
            message = comm.improbe(0, reply_tag)
            if message is not None:
                found.append(message.recv())
            return bool(found)

        if not poll(arrived, timeout_s + _GRACE_S):
            self._sending.append(request)
            msg = f"MPIStore.{call}: rank 0 did not answer within {timeout_s + _GRACE_S:g} s; it has ended or is stuck"
            raise StoreError(msg)
        request.Wait()  # the answer came, so the request was received: returns at once
        outcome, value = found[0]
        if outcome == "timeout":
            self._raise_timeout(call, value, timeout_s)
        if outcome == "error":
            msg = f"MPIStore.{call}: rank 0 could not serve the request: {value}"
            raise StoreError(msg)
        return value

    def _wait_for(self, call: str, keys: Sequence[str], produce: str, timeout: timedelta | None) -> Any:
        self._check_open(call)
        seconds = (self.timeout if timeout is None else timeout).total_seconds()
        if self._table is None:
            return self._ask(call, "park", (list(keys), produce, seconds), seconds)
        missing = self._table.wait(keys, seconds)
        if missing:
            self._raise_timeout(call, missing, seconds)
        return self._table.values(keys) if produce == "values" else None

    @staticmethod
    def _raise_timeout(call: str, missing: Sequence[str], seconds: float) -> NoReturn:
        msg = f"MPIStore.{call}: no rank set {', '.join(missing)} within {seconds:g} s; check that it is reached"
        raise StoreTimeout(msg)

    def _check_open(self, call: str) -> None:
        if self._closed:
            msg = f"MPIStore.{call}: the store was closed by finalize(); call init() again first"
            raise StoreError(msg)
        _mpi.mpi()  # raises in a forked child
        if not self._usable:
            msg = (
                f"MPIStore.{call}: MPI grants less than MPI_THREAD_MULTIPLE, and rank 0 would serve the store from a "
                'thread; set mpi4py.rc.thread_level = "multiple" before mpi4py.MPI is imported'
            )
            raise StoreError(msg)

    # the Store interface ------------------------------------------------------------------------------------

    def set(self, key: str, value: str | bytes) -> None:
        """Store a value under a key."""
        self._call("set", key, _as_bytes(value))

    def get(self, key: str) -> bytes:
        """Return a key's value, waiting until it exists."""
        value: bytes = self._wait_for("get", [key], "values", None)[0]
        return value

    def add(self, key: str, amount: int) -> int:
        """Add to a number that starts at 0 and return the sum; atomic over the ranks."""
        return int(self._call("add", key, amount))

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Store ``desired_value`` if the value is ``expected_value`` and return the value afterwards."""
        value: bytes = self._call("compare_set", key, _as_bytes(expected_value), _as_bytes(desired_value))
        return value

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Block until all keys exist."""
        self._wait_for("wait", keys, "nothing", timeout)

    def check(self, keys: Sequence[str]) -> bool:
        """Say whether all keys exist."""
        return bool(self._call("check", list(keys)))

    def delete_key(self, key: str) -> bool:
        """Remove a key and say whether it existed."""
        return bool(self._call("delete_key", key))

    def num_keys(self) -> int:
        """Count the keys."""
        return int(self._call("num_keys"))

    def list_keys(self) -> list[str]:
        """List the keys."""
        return list(self._call("list_keys"))

    def append(self, key: str, value: str | bytes) -> None:
        """Add to the end of a value, from empty."""
        self._call("append", key, _as_bytes(value))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the keys' values, waiting until all exist."""
        return list(self._wait_for("multi_get", keys, "values", None))

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Store several values as one step."""
        if len(keys) != len(values):
            msg = f"MPIStore.multi_set: {len(keys)} keys and {len(values)} values; expected as many of each"
            raise InvalidArgumentError(msg)
        self._call("multi_set", list(keys), [_as_bytes(value) for value in values])

    def has_extended_api(self) -> bool:
        """Say that append, multi_get and multi_set are there."""
        return True

    def clone(self) -> MPIStore:
        """Return the store itself: it may be used from any thread."""
        return self

    # the names under which torch's C++ looks for overrides
    deleteKey = delete_key  # noqa: N815
    getNumKeys = num_keys  # noqa: N815
    listKeys = list_keys  # noqa: N815
    hasExtendedApi = has_extended_api  # noqa: N815

    def close(self, timeout_s: float) -> bool:
        """Stop serving once every rank has come here.

        **Collective:** over the store's communicator; rank 0 serves until all have arrived.

        Args:
            timeout_s: Seconds; then this rank goes on without the others.

        Returns:
            Whether all came in time.
        """
        if self._closed or not _mpi.started():  # a forked child must not answer for its parent
            return True
        self._closed = True
        request = self._comm.Ibarrier()
        together = poll(request.Test, timeout_s)
        self._stop.set()
        if self._server is not None:
            self._server.join(_LAST_CALL_S)
        # what still runs must not meet a communicator that is gone
        if together and (self._server is None or not self._server.is_alive()):
            self._reap()
            self._comm.Free()
        return together


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


_lock = threading.Lock()
_current: MPIStore | None = None
_generation = itertools.count()


def default_store(timeout_s: float) -> MPIStore:
    """Return the store of the job, making it at the first call.

    **Collective:** the first call, and the first after `close_default_store`, over the world.

    Args:
        timeout_s: Seconds to wait for the other ranks.
    """
    global _current  # noqa: PLW0603  # kept here because C++ holds only half of a Python store
    with _lock:
        if _current is None:
            world = _mpi.control_comm(timeout_s)
            comm = run_with_deadline(world.Dup, timeout_s, "making the MPI store")
            _current = MPIStore(comm)
        return _current


def close_default_store(timeout_s: float) -> bool:
    """Close the job's store if there is one; see `MPIStore.close`."""
    global _current  # see default_store
    with _lock:
        store, _current = _current, None
    return store is None or store.close(timeout_s)


def _rendezvous(url: str, timeout: timedelta = timedelta(seconds=300), **_: Any) -> Iterator[tuple[Any, int, int]]:
    """Yield the store, the rank and the world size for ``init_method="mpi://"``."""
    seconds = timeout.total_seconds()
    query = parse_qs(urlparse(url).query)
    module = _mpi.mpi()
    rank, size = module.COMM_WORLD.rank, module.COMM_WORLD.size
    problem = None
    for name, actual in (("rank", rank), ("world_size", size)):
        given = query.get(name, [str(actual)])[0]
        if given != str(actual):
            problem = InvalidArgumentError(
                f"init_process_group: {name}={given} contradicts MPI, which says {actual} (rank {rank} of {size} on "
                f"pid {os.getpid()}); leave rank and world_size out with init_method='mpi://'"
            )
            break
    agree(problem, seconds, "init_process_group(init_method='mpi://')")
    store = default_store(seconds)
    # the keys of an earlier default group must not be taken for those of this one
    yield PrefixStore(f"init{next(_generation)}", store), rank, size


def register_rendezvous() -> None:
    """Make ``init_method="mpi://"`` known to torch.

    **Local:** once, at import; calls no MPI.
    """
    register_rendezvous_handler("mpi", _rendezvous)
