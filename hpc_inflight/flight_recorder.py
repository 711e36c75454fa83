"""The last operations of this process: for each what it was, on which group, and how far it came.

A ring of plain values. A record holds neither a tensor nor anything that does: what completes an operation tells its
record (`hpc_inflight.work.Completion.track`), never the other way round.
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections import deque
from time import monotonic
from typing import TYPE_CHECKING, Any

from hpc_inflight import _call_site
from hpc_inflight.config import config

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    import torch
    from typing_extensions import Self

_MAX_CHANNELS = 4096

_ids = itertools.count()
_lanes = itertools.count()
_lives: dict[str, int] = {}  # how many groups had a name: `init` after `finalize` uses the same ones again
_groups: weakref.WeakValueDictionary[int, Group] = weakref.WeakValueDictionary()
_ring: deque[Record] | None = None


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


def ring() -> deque[Record]:
    """Return the records, oldest first; made at the first use, as long as the environment says."""
    global _ring  # noqa: PLW0603  # once per process
    if _ring is None:
        _ring = deque(maxlen=config().flight_recorder)
    return _ring


def records() -> list[Record]:
    """Return the records in the order in which they were made."""
    # list() of a deque is one step, whatever other threads issue meanwhile
    return sorted(list(ring()), key=lambda record: record.id)  # noqa: C414


def groups() -> list[Group]:
    """Return the live groups, and those that records refer to."""
    # valuerefs() is one step, too
    known = {group.number: group for reference in _groups.valuerefs() if (group := reference()) is not None}
    known.update((record.lane.group.number, record.lane.group) for record in records())
    return [group for _, group in sorted(known.items())]


class Group:
    """What is kept of a process group for as long as records refer to it.

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
        enabled: Records are kept.
        channels: Messages so far per (op, peer, tag), so that the n-th send of a channel meets its n-th receive.
    """

    __slots__ = (
        "blocks",
        "channels",
        "enabled",
        "group",
        "id",
        "numbers",
        "p2p_numbers",
        "records",
        "sites",
        "transport",
    )

    def __init__(self, group: Group, transport: str) -> None:
        self.group = group
        self.transport = transport
        self.blocks = transport == "mpi"
        self.id = next(_lanes)
        self.numbers = itertools.count(1)
        self.p2p_numbers = itertools.count(1)
        self.channels: dict[tuple[str, int, int], int] = {}
        self.records = ring()
        self.enabled = self.records.maxlen != 0
        self.sites = config().call_sites

    @property
    def name(self) -> str:
        """The group's name; CUDA tensors of a group are numbered apart, and so have a name apart."""
        return self.group.name if self.transport == "mpi" else f"{self.group.name}:{self.transport}"


_Sizes = tuple["tuple[torch.Size, torch.dtype]", ...]


def _sizes(tensors: Sequence[torch.Tensor]) -> _Sizes:
    if len(tensors) == 1:  # most have one tensor, and a comprehension costs half as much again
        tensor = tensors[0]
        return ((tensor.shape, tensor.dtype),)
    return tuple([(tensor.shape, tensor.dtype) for tensor in tensors])


class Record:
    """One operation; made before it is issued, so that one which never returns is there, too.

    As a context manager it notes an exception that leaves the block.

    Args:
        lane: Where it is issued.
        op: Its name, such as ``"all_reduce"``.
        outputs: The tensors that it writes.
        inputs: Those that it reads; None where they are the outputs.

    Attributes:
        number: Its number in the lane, from 1; the same on all ranks of a program that is right.
        inputs: Size and dtype of each input; likewise ``outputs``.
        created: ``time.monotonic()`` before it was issued.
        returned: Whether issuing it has returned.
        started: When its thread began with it; None before, or where nobody can say.
        ended: When it was found to have ended, well or not.
        error: Why it failed, as text.
        captured: It went into a CUDA graph: it is not in flight, and nobody asks whether it is complete.
        timeout_s: Seconds it may take; None for the group's.
        also: Another record with the same completion, in a block of coalesced calls.
    """

    is_p2p = False
    returned = False
    started: float | None = None
    ended: float | None = None
    error = ""
    captured = False
    timeout_s: float | None = None
    site = ""
    also: Record | None = None

    def __init__(
        self, lane: Lane, op: str, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor] | None = None
    ) -> None:
        self.id = next(_ids)
        self.lane = lane
        self.op = op
        self.number: int | None = next(lane.numbers)
        self.outputs = _sizes(outputs)
        self.inputs = self.outputs if inputs is None else _sizes(inputs)
        if lane.sites:
            self.site = _call_site.caller()
        self.created = monotonic()
        lane.records.append(self)

    def issued(self, work: Any) -> Any:
        """Follow the work that issuing returned, and return it."""
        completion = work.completion
        if completion is not None:
            completion.track(self)
        elif self.lane.blocks:
            self.ended = monotonic()
        self.returned = True
        return work

    def end(self, error: BaseException | None = None) -> None:
        """Note that it has ended; the first call counts."""
        record: Record | None = self
        while record is not None:
            if record.ended is None:
                record.ended = monotonic()
                if error is not None:
                    record.error = f"{type(error).__name__}: {error}"
            record = record.also

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.end(error)


class Message(Record):
    """One point-to-point operation.

    Attributes:
        peer: The group rank at the other end; None for a receive from any rank, until it has received.
        tag: Its tag.
        any_source: It was a receive from any rank.
        serial: Its number among the lane's point-to-point operations.
        number: Its number in its channel, once it was issued or, from any rank, has received.
    """

    is_p2p = True

    def __init__(self, lane: Lane, op: str, tensor: torch.Tensor, peer: int | None, tag: int) -> None:
        # not the base's: it would take a number of the collectives
        self.id = next(_ids)
        self.lane = lane
        self.op = op
        self.number = None
        self.serial = next(lane.p2p_numbers)
        self.peer = peer
        self.tag = tag
        self.any_source = peer is None
        sizes = _sizes((tensor,))
        self.inputs, self.outputs = (sizes, ()) if op == "send" else ((), sizes)
        if lane.sites:
            self.site = _call_site.caller()
        self.created = monotonic()
        lane.records.append(self)

    def issued(self, work: Any) -> Any:
        """Follow the work that issuing returned, and return it."""
        if self.peer is not None:
            self.number = self._next()
        return super().issued(work)

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
