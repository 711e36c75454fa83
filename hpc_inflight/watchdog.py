"""One daemon thread per process that sees what nobody waits for: deadlines that pass, and ranks that have left.

It looks twice a second, and on a healthy rank that is a look at a few lists. Once an operation is past its deadline, or
waits for a rank that has ended, it asks the group's ranks where they are, writes the flight recorder, says in one
message who is missing, and aborts the group, so that everyone who waits raises. Then, unless the program has asked to
handle that itself (``on_timeout="raise"``), the job ends.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from hpc_inflight import _cupy, _gate, _mpi, _on_failure, group_set
from hpc_inflight._rank_reports import Answer, Last, Question, Reports, main_thread_site
from hpc_inflight.config import config
from hpc_inflight.errors import CollectiveTimeout, CommunicatorAborted, InflightError
from hpc_inflight.work import patience

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpc_inflight.work import Completion

_ANSWERS_S = 2.0  # for the other ranks to say where they are
_LEFT_S = 2.0  # what is in flight with a rank that has left may still arrive for so long
_UNSEEN_S = 5.0  # for somebody to wait for an operation that has failed
_REMEMBERED = 200  # groups of which a rank that ends says how far it came: MPI sends that at once, as it is small
_P2P = frozenset({"send", "recv"})
_BACKSTOP_S = 5.0  # for an abort, which runs the program's callbacks, until the job ends beside it
_UNWIND_S = 1.0  # for the waiters' exceptions to end the job first, with their tracebacks


class Group(group_set.Group, Protocol):
    """What the watchdog needs of a group, beyond what the drain needs."""

    def key(self) -> tuple[tuple[int, ...], int]:
        """Return the group's world ranks, and how many groups with those came before it."""

    def issued(self, device_type: str) -> int:
        """Return how many collectives on tensors of a type of device this rank has issued."""

    def op_of(self, seq: int, device_type: str) -> str:
        """Return the name of a recent collective by its number; empty when it is unknown."""

    def failed(self) -> tuple[Completion, float] | None:
        """Return the first operation that has failed after it was issued, if any has, and when."""

    def check(self) -> None:
        """Raise what the transport has found wrong since, without waiting for anything."""

    def watched_works(self) -> Sequence[Completion]:
        """Return what is enqueued and not complete, oldest first, and what synchronous calls have left on a GPU."""

    def running(self) -> tuple[str, int, float, float, str] | None:
        """Return op, number, begin, timeout in seconds and type of device of what runs in its caller, if any does."""

    def abort(self, error: InflightError | None = None) -> None:
        """Fail what is pending and refuse what comes."""


def _place(group: Group, device_type: str) -> int:
    """Return a number for a group and type of device, the same on all ranks: of numbers alone, Python's hash is."""
    return hash((group.key(), device_type == "cuda"))


@dataclass(frozen=True)
class _Late:
    """An operation that ought to be complete."""

    op: str
    seq: int
    device_type: str
    point_to_point: bool
    age_s: float
    timeout_s: float
    left: tuple[int, ...]  # world ranks that it waits for though they have ended


class Watchdog:
    """The thread and what it knows; see the module."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._reports = Reports(self._answer)
        self._done_with: set[int] = set()  # groups, by id, that have failed, or whose watching has
        self._deaf = False  # hearing the other ranks has failed
        self._last: Last = {}  # of groups that were destroyed, the latest ones

    def start(self) -> None:
        """Start watching, unless this process is alone or MPI allows no second thread."""
        if self._thread is None and _mpi.started() and _mpi.mpi().COMM_WORLD.size > 1 and _mpi.thread_multiple():
            self._stop = threading.Event()  # an earlier thread may not have seen its own yet
            patience.seconds = 3 * config().watchdog_s + _ANSWERS_S + _UNWIND_S
            self._thread = threading.Thread(target=self._loop, name="hpc_inflight-watchdog", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the thread and wait until it has left MPI."""
        thread, self._thread = self._thread, None
        patience.seconds = 0.0
        if thread is not None and thread is not threading.current_thread() and thread.is_alive():
            self._stop.set()
            thread.join(_ANSWERS_S + 1.0)

    def say_farewell(self) -> None:
        """Tell the other ranks that this one ends, so that none of them waits for it until a deadline."""
        if _mpi.started() and _mpi.thread_multiple():
            for group in group_set.groups():
                self.remember(group, ends=True)  # type: ignore[arg-type]  # every group of ours is one
            self._reports.say_farewell(self._last)

    def remember(self, group: Group, *, ends: bool = False) -> None:
        """Note how far this rank came on a group: nobody waits for it there.

        Args:
            group: It is about to be destroyed.
            ends: The process ends instead, and with it what is not complete.
        """
        for device_type in ("cpu", "cuda"):
            reached = group.issued(device_type)
            if ends:
                works = [work for work in group.watched_works() if work.device_type == device_type]
                reached = min([reached, *(work.seq - 1 for work in works if work.op not in _P2P)])
            if reached > 0:
                self._last[_place(group, device_type)] = reached
        while len(self._last) > _REMEMBERED:
            del self._last[next(iter(self._last))]

    def _loop(self) -> None:
        relaxed, stop = False, self._stop
        while not stop.wait(config().watchdog_s):
            relaxed = relaxed or _cupy.relax_captures()
            self.look()

    @property
    def period_s(self) -> float:
        """Seconds between two looks."""
        return config().watchdog_s

    def look(self) -> None:
        """Hear the other ranks, and look after every group.

        **Local:** by one thread, the watchdog's own where it runs.
        """
        self._serve()
        for group in group_set.groups():
            if id(group) not in self._done_with:
                self._look_after(group)  # type: ignore[arg-type]  # every group of ours is one

    def _serve(self) -> None:
        try:
            self._reports.serve()
        except Exception:  # noqa: BLE001  # whatever it is, the groups are still to be watched
            if not self._deaf:
                self._deaf = True
                _say(f"rank {_rank()}: the watchdog failed to hear other ranks, and goes on:\n{traceback.format_exc()}")

    def _look_after(self, group: Group) -> None:
        """Look at one group; what fails here is said once, and ends the watching of this group alone.

        Left to itself it would end the thread, and so the job, for what may be a mistake of ours and no failure of the
        program: nobody may be waiting for anything.
        """
        try:
            late = self._late(group)
            if late is not None and not self._stop.is_set():
                self._fail(group, late)
            self._look_for_unseen_failure(group)
        except Exception:  # noqa: BLE001  # as above
            self._be_done_with(group)
            _say(
                f"rank {_rank()}: the watchdog has failed at {group.describe()} and does not watch it any more; waits "
                f"for it still end at their own deadlines:\n{traceback.format_exc()}"
            )

    def _be_done_with(self, group: Group) -> None:
        self._done_with.add(id(group))
        weakref.finalize(group, self._done_with.discard, id(group))

    def _late(self, group: Group) -> _Late | None:
        now = time.monotonic()
        found: list[tuple[str, int, float, float, str]] = []
        if not _gate.capturing():  # looking at work on a GPU asks CUDA about events
            found = [(w.op, w.seq, w.issued_at, w.timeout_s, w.device_type) for w in group.watched_works()]
            if found:
                self._check(group)
        running = group.running()
        # on a GPU what is being issued may wait for what is pending, which may have a longer timeout of its own
        if running is not None and (not found or running[4] == "cpu"):
            found = sorted([running, *found], key=lambda each: each[2])
        for op, seq, began, timeout_s, device_type in found:  # a later one may have the earlier deadline
            p2p = op in _P2P
            left = () if p2p else self._left(group, seq, device_type, now, began)
            # a look later than the deadline: whoever waits with one of its own raises first, and the job lives on
            if left or now - began > timeout_s + config().watchdog_s:
                return _Late(op, seq, device_type, p2p, now - began, timeout_s, left)
        return None

    def _left(self, group: Group, seq: int, device_type: str, now: float, began: float) -> tuple[int, ...]:
        """Return the ranks that have ended without having issued it; one that did may leave before the others."""
        reports = self._reports
        if not reports.left:
            return ()
        place = _place(group, device_type)
        return tuple(
            rank
            for rank in group.key()[0]
            if rank in reports.left
            and now - max(reports.left[rank], began) > _LEFT_S
            and reports.last[rank].get(place, 0) < seq
        )

    @staticmethod
    def _check(group: Group) -> None:
        """Abort a group whose transport reports an error, so that whoever waits raises it."""
        try:
            group.check()
        except InflightError as error:
            _say(f"rank {_rank()}: {group.describe()} failed: {error}")
            group.abort(error)

    def _look_for_unseen_failure(self, group: Group) -> None:
        """End a group with an operation that has failed without anybody being told: the ranks are out of step."""
        found = group.failed()
        if found is None:
            return
        failed, failed_at = found
        if failed.raised or time.monotonic() - failed_at < _UNSEEN_S:
            return
        failed.raised = True  # now
        text = f"{failed.op} (seq {failed.seq}) on {group.describe()} has failed, and nobody waits for it"
        self._end(group, CommunicatorAborted(f"{text}: {failed.exception}"))

    def _end(self, group: Group, error: InflightError) -> None:
        """Say what is wrong, abort the group, and end the job unless the program handles that itself."""
        _on_failure.tell()
        _say(f"rank {_rank()}: {error}; this rank's main thread is at {main_thread_site()}")
        aborts = config().on_timeout == "abort"
        backstop = threading.Timer(_BACKSTOP_S, _mpi.abort, (1,))
        if aborts:  # an abort runs callbacks of the program, in this thread
            backstop.daemon = True
            backstop.start()
        group.abort(error)
        backstop.cancel()
        self._be_done_with(group)
        if aborts:
            self._stop.wait(_UNWIND_S)
            _mpi.abort(1)

    def _answer(self, question: Question) -> Answer:
        """Say where this rank is; the one who asks has failed, so what is recorded here is written, too."""
        _on_failure.tell()
        for group in group_set.groups():
            if group.key() == question.key:  # type: ignore[attr-defined]
                known: Group = group  # type: ignore[assignment]
                return Answer(
                    known.issued(question.device_type),
                    known.op_of(question.seq, question.device_type),
                    main_thread_site(),
                )
        return Answer(-1, "", main_thread_site())

    def _fail(self, group: Group, late: _Late) -> None:
        ranks = group.key()[0]
        question = Question(group.key(), late.seq, late.device_type, late.point_to_point)
        answers = self._reports.ask(ranks, question, _ANSWERS_S)
        me = _rank()
        where = [_where(rank, answers.get(rank), late) for rank in ranks if rank != me]
        why = f"not complete after {late.age_s:.1f} s (timeout {late.timeout_s:g} s)"
        if late.left:
            why = f"waits for rank {', '.join(map(str, late.left))}, which ended"
        text = f"{late.op} (seq {late.seq}) on {group.describe()}: {why}; " + "; ".join(filter(None, where))
        self._end(group, (CommunicatorAborted if late.left else CollectiveTimeout)(text))


def _where(rank: int, answer: Answer | None, late: _Late) -> str:
    if answer is None:
        return f"rank {rank} does not answer: it has ended, or is stuck outside of Python"
    at = f", its main thread is at {answer.main_thread}" if answer.main_thread else ""
    if answer.issued < 0:
        return f"rank {rank} does not have this group (any more){at}"
    if late.point_to_point:
        return f"rank {rank} has issued {answer.issued} collectives there{at}"
    if answer.issued < late.seq:
        return f"rank {rank} has not issued it (it is at seq {answer.issued}){at}"
    if answer.op and answer.op != late.op:
        return f"rank {rank} issued {answer.op} as seq {late.seq}{at}"
    return f"rank {rank} has issued it{at}"


def _rank() -> int:
    rank: int = _mpi.mpi().COMM_WORLD.rank
    return rank


def _say(text: str) -> None:
    sys.stderr.write(f"hpc_inflight: {text.rstrip()}\n")  # in one write: other ranks write, too
    sys.stderr.flush()


watchdog = Watchdog()


def register() -> None:
    """Watch from the first group to the last.

    **Local:** once, at import; starts nothing.
    """
    group_set.watch(watchdog.start, watchdog.stop)
