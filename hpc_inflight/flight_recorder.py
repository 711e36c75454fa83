"""The last operations of this process: for each what it was, on which group, and how far it came.

A ring of plain values. It holds neither a tensor nor anything that does: what completes an operation tells its
`Progress` (`hpc_inflight.work.Completion.track`), never the other way round. An entry is a bare list, which every
operation can afford; `hpc_inflight._flight_records` makes objects of them, for a dump.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import weakref
from collections import deque
from operator import attrgetter
from time import monotonic
from typing import TYPE_CHECKING, Any

from hpc_inflight import _call_site
from hpc_inflight.config import config

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import TracebackType

    import torch
    from typing_extensions import Self

    from hpc_inflight.work import Completion

# id, lane, op, number, outputs, inputs (None: they are the outputs), created, fate, and with call sites: call site.
# The fate is None until issuing has returned, then when it did (a float), or the progress of what it returned.
Row = list[Any]
FATE = 7
_NOWHERE: Row = [None] * (FATE + 1)  # where the recorder is off
_MAX_CHANNELS = 4096
_RECENT = 256  # more than threads that issue at the same time

_next_id = itertools.count().__next__
_lanes = itertools.count()
_lives: dict[str, int] = {}  # how many groups had a name: `init` after `finalize` uses the same ones again
_groups: weakref.WeakValueDictionary[int, Group] = weakref.WeakValueDictionary()
_ring: deque[Row] | None = None


class Process:
    """Who this process is, for its dump; `backend` says so with the first group."""

    rank = 0
    world_size = 1
    pid = 0


def configure(rank: int, world_size: int) -> None:
    """Note which rank this process is.

    **Local:** before the first group.
    """
    Process.rank, Process.world_size, Process.pid = rank, world_size, os.getpid()


def ring() -> deque[Row]:
    """Return the entries, oldest first; made at the first use, as long as the environment says."""
    global _ring  # noqa: PLW0603  # once per process
    if _ring is None:
        _ring = deque(maxlen=config().flight_recorder)
    return _ring


class Progress:
    """How far an operation came that its caller does not wait for while issuing it.

    As a context manager it notes an exception that leaves the block.

    Attributes:
        started: ``time.monotonic()`` when its thread began with it; None before, or where nobody can say.
        ended: When it was found to have ended, well or not.
        error: Why it failed, as text.
        captured: It went into a CUDA graph: it is not in flight, and nobody asks whether it is complete.
        timeout_s: Seconds it may take; None for the group's.
        also: Progress of another operation with the same completion, in a block of coalesced calls.
    """

    # on the class: one is made for every operation, and most of them stay so
    started: float | None = None
    ended: float | None = None
    error = ""
    captured = False
    timeout_s: float | None = None
    also: Progress | None = None

    def end(self, error: BaseException | None = None) -> None:
        """Note that it has ended; the first call counts."""
        progress: Progress | None = self
        while progress is not None:
            if progress.ended is None:
                progress.ended = monotonic()
                if error is not None:
                    progress.error = f"{type(error).__name__}: {error}"
            progress = progress.also

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.end(error)


class Message(Progress):
    """Progress of a point-to-point operation.

    Attributes:
        lane: Where it is issued.
        op: ``"send"`` or ``"recv"``.
        peer: The group rank at the other end; None for a receive from any rank, until it has received.
        tag: Its tag.
        any_source: It was a receive from any rank.
        serial: Its number among the lane's point-to-point operations.
        number: Its number in its channel, once it was issued or, from any rank, has received; 0 before.
        returned: Issuing it has returned.
    """

    def __init__(self, lane: Lane, op: str, peer: int | None, tag: int) -> None:
        self.lane = lane
        self.op = op
        self.peer = peer
        self.tag = tag
        self.any_source = peer is None
        self.serial = next(lane.p2p_numbers)
        self.number = 0
        self.returned = False

    def issued(self, work: Any) -> Any:
        """Follow the work that issuing returned, and return it."""
        if self.peer is not None:
            self.number = self._next()
        self.returned = True
        work.completion.track(self)
        return work

    def received_from(self, source: int) -> None:
        """Note the rank that a receive from any rank received from."""
        if self.peer is None:
            self.peer = source
            self.number = self._next()

    def _next(self) -> int:
        assert self.peer is not None  # noqa: S101  # for mypy: both callers have looked
        channels, key = self.lane.channels, (self.op, self.peer, self.tag)
        number = channels[key] = channels.get(key, 0) + 1
        if len(channels) > _MAX_CHANNELS:  # a program may use a new tag for every message
            del channels[next(iter(channels))]
        return number


class Group:
    """What is kept of a process group for as long as entries refer to it.

    Attributes:
        name: As c10d named it; with ``#2`` behind it when it is the second one of that name.
        desc: As the user described it.
        ranks: The global rank of each group rank.
        rank: This process's group rank.
        timeout_s: Seconds that an operation without a timeout of its own may take.
        number: Order of creation in this process.
    """

    def __init__(self, rank: int, size: int, timeout_s: float) -> None:
        self.name = self.desc = self._given = "undefined"
        self.ranks: Sequence[int] = range(size)
        self.rank = rank
        self.timeout_s = timeout_s
        self.number = next(_lanes)
        _groups[self.number] = self

    def rename(self, name: str) -> None:
        """Set the name; one that an earlier group had gets a number, on all ranks alike."""
        if name != self._given:
            self._given = name
            life = _lives[name] = _lives.get(name, 0) + 1
            self.name = name if life == 1 else f"{name}#{life}"


class Lane:
    """The operations of one group over one transport, numbered in the order in which they are issued.

    Attributes:
        group: The group.
        transport: ``"mpi"`` or ``"nccl"``.
        blocks: A synchronous operation is complete when its call returns; on a GPU it is only launched then.
        enabled: Entries are kept.
        called: The collective that was begun last, for the watchdog; kept in any case.
        channels: Messages so far per (op, peer, tag), so that the n-th send of a channel meets its n-th receive.
    """

    __slots__ = (
        "_append",
        "_next",
        "_sites",
        "blocks",
        "called",
        "channels",
        "enabled",
        "group",
        "id",
        "p2p_numbers",
        "transport",
    )

    def __init__(self, group: Group, transport: str) -> None:
        self.group = group
        self.transport = transport
        self.blocks = transport == "mpi"
        self.id = next(_lanes)
        self.p2p_numbers = itertools.count(1)
        self.channels: dict[tuple[str, int, int], int] = {}
        self.enabled = ring().maxlen != 0
        self.called = ""
        self._append = ring().append
        self._next = itertools.count(1).__next__
        self._sites = config().call_sites

    @property
    def name(self) -> str:
        """The group's name; CUDA tensors of a group are numbered apart, and so have a name apart."""
        return self.group.name if self.transport == "mpi" else f"{self.group.name}:{self.transport}"

    def begin(self, op: str, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor] | None = None) -> Row:
        """Enter a collective before it is issued, so that one which never returns is there, too.

        Args:
            op: Its name, such as ``"all_reduce"``.
            outputs: The tensors that it writes.
            inputs: Those that it reads; None where they are the outputs.

        Returns:
            The entry; its caller sets its fate: the time, or what `follow` or `failed` returns.
        """
        self.called = op
        if not self.enabled:
            return _NOWHERE
        # most have one tensor
        sizes: Any = _size(outputs[0]) if len(outputs) == 1 else _sizes(outputs)
        row = [_next_id(), self, op, self._next(), sizes, None if inputs is None else _sizes(inputs), monotonic(), None]
        if self._sites:
            row.append(_call_site.caller())
        self._append(row)
        return row

    def issuing(self) -> Row | None:
        """Return the oldest collective of late whose issuing has not returned.

        **Local:** any thread. None if all have, or the recorder is off.
        """
        recent = list(ring())[-_RECENT:]  # in one step, whatever other threads do meanwhile
        return next((row for row in recent if row[1] is self and row[FATE] is None), None)

    @contextlib.contextmanager
    def during(self, op: str) -> Iterator[None]:
        """Enter a collective that runs inside the block and returns no work."""
        row = self.begin(op, ())
        try:
            yield
        except BaseException as error:
            row[FATE] = failed(error)
            raise
        row[FATE] = monotonic()

    def begin_message(self, op: str, tensor: torch.Tensor, peer: int | None, tag: int) -> Message:
        """Enter a point-to-point operation with a group rank, or from any with None, before it is issued."""
        message, sizes = Message(self, op, peer, tag), _size(tensor)
        outputs, inputs = ([], sizes) if op == "send" else (sizes, [])
        row = [_next_id(), self, op, 0, outputs, inputs, monotonic(), message]
        if self._sites:
            row.append(_call_site.caller())
        self._append(row)
        return message


def follow(completion: Completion) -> Progress:
    """Return the fate of an operation that ``completion`` completes."""
    progress = Progress()
    completion.track(progress)
    return progress


def failed(error: BaseException) -> Progress:
    """Return the fate of an operation whose issuing raised ``error``."""
    progress = Progress()
    progress.end(error)
    return progress


def shape_of(progress: Progress | None) -> str:
    """Return shape and dtype of what an operation writes, or sends; empty if the ring does not have it any more."""
    row = None if progress is None else next((row for row in reversed(list(ring())) if row[FATE] is progress), None)
    sizes = [] if row is None else row[4] or row[5]
    first, more = (sizes, 0) if isinstance(sizes, tuple) else (sizes[0], len(sizes) - 1) if sizes else (None, 0)
    return "" if first is None else f"shape {tuple(first[0])}, {first[1]}{f' and {more} more' if more else ''}"


Size = tuple["torch.Size", "torch.dtype"]
_size = attrgetter("shape", "dtype")  # one call


def _sizes(tensors: Sequence[torch.Tensor]) -> Size | list[Size]:
    """Return size and dtype: of each tensor, or bare where there is one."""
    return _size(tensors[0]) if len(tensors) == 1 else list(map(_size, tensors))


def groups() -> list[Group]:
    """Return the live groups, and those that entries refer to."""
    # valuerefs() and list() of a deque are one step each, whatever other threads do meanwhile
    known = {group.number: group for reference in _groups.valuerefs() if (group := reference()) is not None}
    known.update((row[1].group.number, row[1].group) for row in list(ring()))
    return [group for _, group in sorted(known.items())]
