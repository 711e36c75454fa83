"""What ranks tell each other about where they are, outside of every group: answered by each rank's watchdog.

Small MPI messages on the control communicator, under a tag that nothing else uses there. A rank whose main thread is
stuck, in Python or in MPI, still answers; one that is gone, or that holds the GIL, does not.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpc_inflight import _mpi
from hpc_inflight._call_site import site_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_TAG = 101
_PAUSE_S = 2e-3


# how many collectives a rank that ends has issued, by a number for group and type of device
Last = dict[int, int]


@dataclass(frozen=True)
class Question:
    """Where a rank is with one operation of one group.

    Attributes:
        key: The group, as every member knows it: its world ranks, and how many groups with those came before it.
        seq: The operation's number in the group.
        device_type: Of its tensors; each type of device has numbers of its own.
        point_to_point: It is none of the collectives, which have numbers of their own.
    """

    key: tuple[tuple[int, ...], int]
    seq: int
    device_type: str = "cpu"
    point_to_point: bool = False


@dataclass(frozen=True)
class Answer:
    """Where a rank is.

    Attributes:
        issued: How many collectives it has issued on that group; -1 when it does not know the group.
        op: The name of the operation that it issued under the number asked for; empty when unknown.
        main_thread: Where its main thread is in the program.
    """

    issued: int
    op: str
    main_thread: str


class Reports:
    """This rank's end of the conversation.

    Attributes:
        left: World ranks that said they end, with the time of that (``time.monotonic()``).
        last: How far those have come.
    """

    def __init__(self, answer: Callable[[Question], Answer]) -> None:
        self.left: dict[int, float] = {}
        self.last: dict[int, Last] = {}
        self._answer = answer
        self._numbers = itertools.count()
        self._answers: dict[int, dict[int, Answer]] = {}
        self._lock = threading.Lock()  # only one thread takes messages: an answer taken by another would wait there

    def serve(self) -> None:
        """Take what has arrived: answer questions, note answers and farewells.

        **Local:** sparsely, by one thread of each rank; never blocks.
        """
        comm, module = _mpi.control_comm(), _mpi.mpi()
        with self._lock:
            while (message := comm.improbe(module.ANY_SOURCE, _TAG)) is not None:
                status = module.Status()
                kind, number, content = message.recv(status=status)
                source = status.Get_source()
                if kind == "ask":
                    _mpi.abandon(comm.isend(("answer", number, self._answer(content)), source, _TAG))
                elif kind == "answer":
                    if number in self._answers:
                        self._answers[number][source] = content
                else:
                    self.last[source] = content
                    self.left[source] = time.monotonic()

    def ask(self, ranks: Iterable[int], question: Question, timeout_s: float) -> dict[int, Answer]:
        """Ask ranks where they are and return the answers that came in time, by world rank.

        **Local:** answers questions of others meanwhile, who may be asking, too.
        """
        comm, number = _mpi.control_comm(), next(self._numbers)
        wanted = set(ranks) - {comm.rank}
        answers = self._answers[number] = {}
        for rank in wanted:
            _mpi.abandon(comm.isend(("ask", number, question), rank, _TAG))
        deadline = time.monotonic() + timeout_s
        while len(answers) < len(wanted) and time.monotonic() < deadline:
            self.serve()
            time.sleep(_PAUSE_S)
        return self._answers.pop(number)

    def say_farewell(self, last: Last) -> None:
        """Tell every other rank that this one ends, and how far it came."""
        comm = _mpi.control_comm()
        for rank in range(comm.size):
            if rank != comm.rank:
                _mpi.abandon(comm.isend(("left", 0, last), rank, _TAG))


def main_thread_site() -> str:
    """Return where this process's main thread is in the program, outside of torch and this package.

    **Local:** any thread.
    """
    ident = threading.main_thread().ident
    frame: Any = sys._current_frames().get(-1 if ident is None else ident)  # noqa: SLF001  # faulthandler prints, this returns
    return "" if frame is None else site_of(frame)
