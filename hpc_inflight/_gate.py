"""What keeps captures of CUDA graphs apart from what other threads do: enqueue, ask CUDA, end NCCL's communicators.

An event query by another thread kills a capture in global mode, and so may what NCCL does as it ends a communicator, in
threads of its own.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

from hpc_inflight._poll import poll
from hpc_inflight.errors import DrainTimeout

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_LINGERS_S = 10.0  # for NCCL to return from an abort once the graphs are gone; it may never


class Gate:
    """Keeps new work from being enqueued between a drain and what the drain was for.

    A communicator asks `closed` while it holds the lock under which it enqueues, and waits without it. So once the
    gate is closed and every lock was seen free (`Group.is_idle`) or taken once (`Group.quiesce`), what is enqueued is
    what the drain sees.

    Attributes:
        closed: Whether work must wait, except for what `may_pass` lets through.
        passed: Changes with each that it let through.
    """

    def __init__(self) -> None:
        self.closed = False
        self.passed = 0
        self._closers: list[int] = []  # threads
        self._runners: set[int] = set()
        self._lock = threading.RLock()  # taken by itself where nobody waits: a Condition costs a microsecond more
        self._opened = threading.Condition(self._lock)
        self._waiting = 0  # threads

    def may_pass(self) -> bool:
        """Say whether it is closed for others only: callbacks, which a drain runs or waits for, may issue.

        **Local:** under the lock under which the caller enqueues.
        """
        thread = threading.get_ident()
        if thread in self._runners:
            self.passed += 1
            return True
        return thread in self._closers

    @contextlib.contextmanager
    def runs_callbacks(self) -> Iterator[None]:
        """Let the calling thread pass inside: all that it issues is issued by callbacks of works."""
        thread = threading.get_ident()
        self._runners.add(thread)
        try:
            yield
        finally:
            self._runners.discard(thread)

    def wait(self, timeout_s: float, what: str) -> None:
        """Block until the gate is open.

        Raises:
            DrainTimeout: It is still closed after ``timeout_s``.
        """
        with self._lock:
            self._waiting += 1
            try:
                opened = self._opened.wait_for(lambda: not self.closed, min(timeout_s, threading.TIMEOUT_MAX))
            finally:
                self._waiting -= 1
        if not opened:
            msg = f"{what}: not enqueued within {timeout_s:g} s, while another thread drained all groups"
            raise DrainTimeout(msg)

    def enter(self, lock: threading.Lock, timeout_s: float, op: str, group: str) -> None:
        """Take ``lock``, under which the caller enqueues, once no other thread drains.

        Args:
            lock: Free again when this raises.
            timeout_s: Seconds that the drain may take.
            op: What is to be enqueued, for the error.
            group: The name of its group.

        Raises:
            DrainTimeout: It did not end in time.
        """
        while True:
            lock.acquire()
            if not self.closed or self.may_pass():
                return
            lock.release()
            self.wait(timeout_s, f"{op} on group {group}")

    def close(self) -> None:
        """Close it until `open`; several threads may at once."""
        with self._lock:
            self._closers.append(threading.get_ident())
            self.closed = True

    def open(self) -> None:
        """Undo this thread's `close`."""
        with self._lock:
            self._closers.remove(threading.get_ident())
            self.closed = bool(self._closers)
            if self._waiting:
                self._opened.notify_all()


gate = Gate()
# held by whoever asks CUDA about events, and while a capture begins: an event query kills a capture in global mode
polling = threading.RLock()
# between a capture's beginning and NCCL's end of a communicator, for a look and a mark; what the garbage collector runs
# meanwhile may destroy a group
_turn = threading.RLock()


class Graph:
    """What a capture makes, as communicators know it: gone with the object that captured, or when `graph_gone` says."""


# by the id of the object that captures, which takes its entries with it
captures: dict[int, weakref.ref[Any]] = {}  # those under way; for callers in a hurry, who only look whether it is empty
_graphs: dict[int, tuple[weakref.ref[Any], Graph]] = {}
_captured: list[object] = []
_unseen = Graph()  # what was captured without `capture_began`, of which nobody says when it goes
_numbers = itertools.count()
_outwaited: set[int] = set()  # captures that did not end while an end of communicators waited
_endings: dict[int, str] = {}  # the groups whose communicators NCCL is ending


def capturing() -> bool:
    """Say whether any CUDA graph capture is under way in this process; CUDA must not be asked about events then."""
    return bool(captures)


def capture_began(capture: object) -> bool:
    """Note that a capture begins; if the object goes, it has ended. False if communicators are being ended."""
    with _turn:
        if being_ended():
            return False
        key = id(capture)
        known = _graphs.get(key)  # where it has captured before; torch wants a reset first
        if known is None:
            known = _graphs[key] = weakref.ref(capture, functools.partial(_gone, key)), Graph()
        captures[key] = known[0]
        if _lingering:  # an abort that a graph keeps from returning should not return in the middle
            held = [item.graphs for item in _lingering]
            _captured.extend(ref() for ref, graph in list(_graphs.values()) if any(graph in of for of in held))
        return True


def capture_ended(capture: object) -> None:
    """Note that a capture has ended, well or not; nothing happens when it had not begun."""
    _ended(id(capture))


def _ended(key: int) -> None:
    captures.pop(key, None)
    if _outwaited:  # both are rare, and each capture comes here
        _outwaited.discard(key)
    if _captured and not captures:
        _captured.clear()


def _gone(key: int, _: object) -> None:  # the garbage collector may run this: it takes no lock
    _ended(key)
    _graphs.pop(key, None)


def keep_while_capturing(thing: object) -> None:
    """Keep what a graph has taken until no capture is under way: memory that is freed goes to what is captured next."""
    if captures:
        _captured.append(thing)


def graphs() -> list[Graph]:
    """Return what the captures under way will make; of several, nothing says which is whose."""
    return [found[1] for key in list(captures) if (found := _graphs.get(key)) is not None] or [_unseen]


def graph_gone(capture: object) -> None:
    """Note that a graph was reset; nothing happens when nothing was captured."""
    _graphs.pop(id(capture), None)


def forked() -> None:
    """Forget what other threads were at; called in a forked child, where they do not exist."""
    global _turn  # noqa: PLW0603  # another thread may have held it at the fork
    _turn = threading.RLock()
    gate.__init__()  # type: ignore[misc]  # others hold this object
    captures.clear()
    _endings.clear()
    _lingering.clear()


@contextlib.contextmanager
def ending(whose: str, timeout_s: float) -> Iterator[bool]:
    """Let no capture begin while NCCL ends communicators.

    Args:
        whose: The group, for errors.
        timeout_s: Seconds to wait for captures that are under way, once for each of them.

    Yields:
        Whether none is; else NCCL should not be called, unless those captures do not matter any more.
    """
    number = next(_numbers)

    def enter() -> bool:
        with _turn:
            if not captures:
                _endings[number] = whose
        return number in _endings

    try:
        apart = poll(enter, 0.0 if _outwaited.issuperset(captures) else timeout_s)
        if not apart:
            if timeout_s > 0:
                _outwaited.update(captures)
            _endings[number] = whose
        yield apart
    finally:
        _endings.pop(number, None)


class _Lingering:
    """Threads inside an abort that NCCL finishes when graphs are gone, which takes a moment, or never comes."""

    def __init__(self, whose: str, graphs: weakref.WeakSet[Graph], threads: Sequence[threading.Thread]) -> None:
        self.whose = whose
        self.graphs = graphs
        self._threads = threads
        self._until: float | None = None

    def is_over(self) -> bool:
        if self.graphs:
            return False
        self._until = self._until or time.monotonic() + _LINGERS_S
        return time.monotonic() >= self._until or not any(thread.is_alive() for thread in self._threads)

    def is_going_on(self) -> bool:
        return not self.graphs and not self.is_over()


_lingering: list[_Lingering] = []


def linger(whose: str, graphs: weakref.WeakSet[Graph], threads: Sequence[threading.Thread]) -> None:
    """Let captures wait for these threads, some seconds at most, once the graphs are gone."""
    _lingering.append(_Lingering(whose, graphs, threads))


def lingers() -> bool:
    """Say whether an abort may still return: the objects that captured have to be watched."""
    _lingering[:] = [item for item in _lingering if not item.is_over()]
    return bool(_lingering)


def being_ended() -> str:
    """Return a group whose communicators NCCL is ending; empty if there is none."""
    if not _endings and not _lingering:  # each capture asks, twice
        return ""
    lingering = (item.whose for item in list(_lingering) if item.is_going_on())
    return next(itertools.chain(list(_endings.values()), lingering), "")
