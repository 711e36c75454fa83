"""Making an NCCL communicator: the ranks tell their first one who they are, over MPI, and all learn what came of it.

Nothing here is a collective call of MPI: messages go point to point on tags of their own, so that it may happen beside
whatever else the group's MPI communicator is doing, and every step has a deadline.
"""

from __future__ import annotations

import atexit
import itertools
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hpc_inflight import _mpi, _on_failure
from hpc_inflight._poll import poll
from hpc_inflight.errors import CollectiveTimeout, GroupDestroyedError, InflightError, NCCLError, NCCLUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from mpi4py import MPI

    from hpc_inflight._cupy import Runtime

TAGS = 2  # to the first rank, and from it
_GRACE_S = 5.0  # the first rank's deadline comes first, as its error says who did not come

_exiting = threading.Event()
atexit.register(_exiting.set)  # threads that connect must be out of MPI before it ends


@dataclass(frozen=True)
class Card:
    """Who a rank is.

    Attributes:
        problem: Why it cannot take part; empty if it can.
        host: Name of its node.
        index: Its device.
        uuid: The device's identity.
        version: Of its NCCL library.
        shares: Several ranks may use one device.
    """

    problem: str = ""
    host: str = ""
    index: int = -1
    uuid: str = ""
    version: int = 0
    shares: bool = False


@dataclass
class Meeting:
    """Which ranks make a communicator, and how they reach each other.

    Attributes:
        comm: The group's MPI communicator.
        members: Its ranks that take part, in the order that they have in the new one; the first one leads.
        tag: The first of `TAGS` tags that nothing else uses between these ranks.
        what: For messages, such as ``"NCCL for group 0"``.
        deadline: ``time.monotonic()`` by which it must be done.
        stopped: Says whether nobody wants it any more.
        life: How many groups of these ranks came before, alike on all: a later group may have the same name.
    """

    comm: MPI.Intracomm
    members: Sequence[int]
    tag: int
    what: str
    deadline: float
    stopped: Callable[[], bool] = field(default=lambda: False)
    life: int = 0

    @property
    def leads(self) -> bool:
        """Whether this rank is the first one."""
        return bool(self.comm.rank == self.members[0])

    def wait(self, done: Callable[[], bool], extra_s: float = 0.0) -> bool:
        """Poll until ``done``, and return False at the deadline."""

        def over() -> bool:
            return done() or _exiting.is_set() or self.stopped()

        there = poll(over, max(0.0, self.deadline + extra_s - time.monotonic()))
        if there and (_exiting.is_set() or self.stopped()):
            raise GroupDestroyedError(
                f"{self.what}: the group was destroyed, or the program ends, before all ranks came"
            )
        return there

    def tell(self, rank: int, value: Any) -> None:
        """Send to a rank and go on."""
        tag = self.tag if rank == self.members[0] else self.tag + 1
        _mpi.abandon(self.comm.isend(((self.what, self.life), value), rank, tag))

    def hear(self, rank: int) -> Any:
        """Return what a rank has sent, or None if nothing has come.

        A meeting that failed leaves messages that nobody has received, and MPI may give a later group's communicator
        the inner number of one that was freed: what is of another meeting is dropped.
        """
        message = self.comm.improbe(rank, self.tag if self.leads else self.tag + 1)
        if message is None:
            return None
        what, value = message.recv()
        return value if what == (self.what, self.life) else None

    def gather(self, own: Any, *, until: Callable[[Any], bool] = lambda _: False) -> dict[int, Any]:
        """Return what the members sent, by rank, as far as it came before the deadline; only on the first one.

        Args:
            own: This rank's own; a callable is asked until it returns something else than None.
            until: Stop at a value of which this is true.
        """
        found: dict[int, Any] = {}
        waiting = list(self.members)

        def collect() -> bool:
            for rank in list(waiting):
                value = (own() if callable(own) else own) if rank == self.comm.rank else self.hear(rank)
                if value is not None:
                    waiting.remove(rank)
                    found[rank] = value
                    if until(value):
                        return True
            return not waiting

        self.wait(collect)
        return found

    def missing(self, found: Iterable[int]) -> str:
        """Return the text for the members that are not in ``found``."""
        late = sorted(set(self.members) - set(found))
        return (
            f"rank {', '.join(map(str, late))} did not come in time; all its ranks must issue the group's first "
            "operation on CUDA tensors"
        )


def card(runtime: Runtime, index: int) -> Card:
    """Return who this rank is."""
    return Card("", socket.gethostname(), index, runtime.uuid(index), runtime.nccl_version, runtime.shares_devices())


def problem(cards: dict[int, Card]) -> str:
    """Return what keeps these ranks from making a communicator; empty if nothing does."""
    broken = [f"rank {rank} on {c.host}: {c.problem}" for rank, c in sorted(cards.items()) if c.problem]
    if broken:
        return "; ".join(broken)
    by_device: dict[str, list[int]] = {}
    for rank, c in sorted(cards.items()):
        by_device.setdefault(c.uuid, []).append(rank)
    shared = [
        f"ranks {' and '.join(map(str, ranks))} on {cards[ranks[0]].host} both use {uuid}"
        if len(ranks) == 2  # noqa: PLR2004  # "both"
        else f"ranks {', '.join(map(str, ranks))} on {cards[ranks[0]].host} all use {uuid}"
        for uuid, ranks in by_device.items()
        if len(ranks) > 1
    ]
    if shared and not all(c.shares for c in cards.values()):
        return (
            f"{'; '.join(shared)}; give every rank a GPU of its own (hi.init().device is its local rank's), or use "
            "NCCL 2.30 or newer with NCCL_MULTI_RANK_GPU_ENABLE=1"
        )
    versions = sorted({c.version for c in cards.values()})
    if len(versions) > 1:
        return f"the ranks loaded different NCCL libraries, versions {versions}; give all of them the same environment"
    return ""


def connect(meeting: Meeting, runtime: Runtime | InflightError, index: int) -> Any:
    """Make a communicator of the meeting's ranks on this rank's device ``index``.

    **Collective:** over the members. Whatever fails on one of them raises on all. The caller's current device stays:
    NCCL is entered in a thread of its own, also because it has no deadline.

    Args:
        meeting: Who and how.
        runtime: This rank's, or why it has none: the others must learn of that.
        index: The device.

    Returns:
        CuPy's communicator.

    Raises:
        NCCLUnavailableError: A rank has no usable GPU, CuPy or NCCL, or two ranks have the same GPU.
        NCCLError: NCCL failed on a rank.
        CollectiveTimeout: A rank did not come, or NCCL did not come to an end.
    """
    own = _own_card(runtime, index)
    unique_id = _lead(meeting, own, runtime) if meeting.leads else _follow(meeting, own)
    if isinstance(runtime, InflightError):  # cannot be: its card has a problem, which was raised
        raise runtime
    attempt = _Attempt(runtime, index, len(meeting.members), unique_id, meeting.members.index(meeting.comm.rank))
    _agree(meeting, attempt)
    return attempt.communicator


def _own_card(runtime: Runtime | InflightError, index: int) -> Card:
    try:
        return (
            Card(str(runtime), socket.gethostname(), index)
            if isinstance(runtime, InflightError)
            else card(runtime, index)
        )
    except Exception as error:  # noqa: BLE001  # no driver, no such device: CuPy raises what it likes
        text = str(error) or type(error).__name__
    return Card(text, socket.gethostname(), index)


def _lead(meeting: Meeting, own: Card, runtime: Runtime | InflightError) -> bytes:
    cards = meeting.gather(own)
    late = len(cards) < len(meeting.members)
    text, unique_id = meeting.missing(cards) if late else problem(cards), b""
    if not text and not isinstance(runtime, InflightError):
        try:
            unique_id = runtime.unique_id()
        except Exception as error:  # noqa: BLE001  # as above
            text = f"rank {meeting.comm.rank}: no unique id: {str(error) or type(error).__name__}"
    for rank in meeting.members[1:]:
        meeting.tell(rank, (not text, text or unique_id, late))
    if text:
        raise _failure(meeting, text, late=late)
    return unique_id


def _follow(meeting: Meeting, own: Card) -> bytes:
    meeting.tell(meeting.members[0], own)
    ok, value, late = _verdict(meeting)
    if not ok:
        raise _failure(meeting, value, late=late)
    unique_id: bytes = value
    return unique_id


def _verdict(meeting: Meeting) -> tuple[bool, Any, bool]:
    heard: list[tuple[bool, Any, bool]] = []

    def listen() -> bool:
        message = meeting.hear(meeting.members[0])
        if message is not None:
            heard.append(message)
        return bool(heard)

    if not meeting.wait(listen, _GRACE_S):
        raise _failure(meeting, f"rank {meeting.members[0]} did not come in time, or waits for another", late=True)
    return heard[0]


def _failure(
    meeting: Meeting, text: str, *, late: bool, kind: type[InflightError] = NCCLUnavailableError
) -> InflightError:
    if late or kind is NCCLError:  # not of a missing GPU: a program may go on with the CPU
        _on_failure.tell()
    return (CollectiveTimeout if late else kind)(f"{meeting.what}: {text}; CPU tensors of the group are not affected")


class _Attempt:
    """NCCL's own part, in a thread: it blocks until all ranks are there, and cannot be called off."""

    _numbers = itertools.count(1)

    def __init__(self, runtime: Runtime, index: int, size: int, unique_id: bytes, rank: int) -> None:
        self.communicator: Any = None
        self.outcome: str | None = None  # empty: it worked
        arguments = runtime, index, size, unique_id, rank
        name = f"hpc_inflight-nccl-{next(self._numbers)}"
        threading.Thread(target=self._run, args=arguments, name=name, daemon=True).start()

    def _run(self, runtime: Runtime, index: int, size: int, unique_id: bytes, rank: int) -> None:
        try:
            runtime.settle_device(index)
            self.communicator = runtime.communicator(size, unique_id, rank)
            self.outcome = ""
        except BaseException as error:  # noqa: BLE001  # told to all ranks
            self.outcome = str(error) or type(error).__name__


def _agree(meeting: Meeting, attempt: _Attempt) -> None:
    """Let every rank learn whether NCCL worked on all, as soon as it failed on one."""
    if meeting.leads:
        outcomes = meeting.gather(lambda: attempt.outcome, until=bool)
        failed = {rank: text for rank, text in outcomes.items() if text}
        late = not failed and len(outcomes) < len(meeting.members)
        text = "; ".join(f"rank {rank}: {text}" for rank, text in failed.items())
        if late:
            text = f"NCCL did not come to an end on rank {sorted(set(meeting.members) - set(outcomes))} in time"
        for rank in meeting.members[1:]:
            meeting.tell(rank, (not text, text, late))
    else:
        told, heard = False, None

        def listen() -> bool:
            nonlocal told, heard
            if not told and attempt.outcome is not None:
                told = True
                meeting.tell(meeting.members[0], attempt.outcome)
            heard = meeting.hear(meeting.members[0])
            return heard is not None

        if not meeting.wait(listen, _GRACE_S):
            raise _failure(meeting, f"NCCL did not come to an end in time: {attempt.outcome or 'no answer'}", late=True)
        _, text, late = heard or (False, "", False)
    if text:
        raise _failure(meeting, text, late=late, kind=NCCLError)
