"""Find where the ranks of a job part: a collective that not all have issued, or not all alike."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from hpc_inflight.cli._trace_load import Dump, Entry

_IN_PLACE: Final = {"all_reduce", "allreduce_coalesced", "all_reduce_coalesced", "broadcast", "reduce"}
_SAME: Final = {  # as many elements on every rank
    "all_gather_into_tensor",
    "all_gather_into_tensor_coalesced",
    "_all_gather_base",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced",
    "_reduce_scatter_base",
}
_ORDER: Final = ("missing", "ops", "dtypes", "sizes", "message", "pending", "failed")


@dataclass(frozen=True)
class Finding:
    """One place where the ranks part, or stand.

    Attributes:
        kind: ``"missing"`` (a collective that not every rank issued), ``"ops"``, ``"dtypes"`` or ``"sizes"`` (they
            differ), ``"message"`` (one end alone, or sizes that do not fit), ``"pending"`` (all issued it, and it is
            not complete) or ``"failed"``.
        group: Name of the group; likewise ``desc``.
        seq: Number of the collective in the group.
        entries: What each rank issued there.
        absent: Members that have not issued it.
        detail: What does not fit, as text.
    """

    kind: str
    group: str
    desc: str
    seq: int
    entries: dict[int, Entry]
    absent: list[int] = field(default_factory=list)
    detail: str = ""

    @property
    def order(self) -> tuple[bool, int, int]:
        """Where the ranks part comes first, the earliest in front: what follows from it is later."""
        kind = _ORDER.index(self.kind)
        return kind >= _ORDER.index("pending"), min(e.created for e in self.entries.values()), kind


def compare(dumps: Sequence[Dump]) -> list[Finding]:
    """Return what was found, the likely cause first."""
    members: dict[str, tuple[int, ...]] = {}
    for dump in dumps:
        members.update(dump.groups)
    found = []
    names = {e.group: e.desc for dump in dumps for e in dump.entries if e.channel is None}
    for name, desc in names.items():
        finding = _first(name, desc, members.get(name, ()), dumps)
        if finding is not None:
            found.append(finding)
    found += _messages(dumps)
    for dump in dumps:
        failed = [entry for entry in dump.entries if entry.error]
        if failed:
            entry = failed[0]  # later ones follow from it
            found.append(Finding("failed", entry.group, entry.desc, entry.seq, {dump.rank: entry}, detail=entry.error))
    return sorted(found, key=lambda finding: finding.order)


def _first(name: str, desc: str, ranks: tuple[int, ...], dumps: Sequence[Dump]) -> Finding | None:
    """Return the first collective of a group at which the ranks part, else the first that all wait for."""
    issued, start = _by_number(name, ranks, dumps)
    waiting: Finding | None = None
    for seq in sorted({seq for by_seq in issued.values() for seq in by_seq if seq >= start}):
        here = {rank: by_seq[seq] for rank, by_seq in issued.items() if seq in by_seq}
        absent = [rank for rank in issued if rank not in here]
        first = {rank: entries[0] for rank, entries in here.items()}
        problem = _differ(here, ranks)
        if problem is not None:
            return Finding(problem[0], name, desc, seq, first, absent, problem[1])
        if absent:
            return Finding("missing", name, desc, seq, first, absent)
        if waiting is None and any(entry.pending for entries in here.values() for entry in entries):
            waiting = Finding("pending", name, desc, seq, first)
    return waiting


def _by_number(
    name: str, ranks: tuple[int, ...], dumps: Sequence[Dump]
) -> tuple[dict[int, dict[int, list[Entry]]], int]:
    """Return what each rank has issued under each number, and the first number that no rank has overwritten."""
    issued: dict[int, dict[int, list[Entry]]] = {}
    start = 1
    for dump in dumps:
        if ranks and dump.rank not in ranks:
            continue
        by_seq: dict[int, list[Entry]] = {}
        for entry in dump.entries:
            if entry.group == name and entry.channel is None:
                by_seq.setdefault(entry.seq, []).append(entry)
        if by_seq or (dump.whole and ranks):
            issued[dump.rank] = by_seq
        if by_seq and not dump.whole:
            start = max(start, min(by_seq))
    return issued, start


def _differ(here: Mapping[int, list[Entry]], ranks: tuple[int, ...]) -> tuple[str, str] | None:
    if len({tuple(entry.op for entry in entries) for entries in here.values()}) > 1:
        return "ops", ""
    if len({tuple(entry.dtypes for entry in entries) for entries in here.values()}) > 1:
        return "dtypes", ""
    for index in range(len(next(iter(here.values())))):
        detail = _sizes_differ({rank: entries[index] for rank, entries in here.items()}, ranks)
        if detail is not None:
            return "sizes", detail
    return None


def _numels(sizes: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(math.prod(size) for size in sizes)


def _sizes_differ(entries: Mapping[int, Entry], ranks: tuple[int, ...]) -> str | None:
    """Return what does not fit, or None; an empty text when the sizes alone say it."""
    op = next(iter(entries.values())).op
    inputs = {rank: _numels(entry.inputs) for rank, entry in entries.items()}
    outputs = {rank: _numels(entry.outputs) for rank, entry in entries.items()}
    if op in _IN_PLACE:
        return None if len(set(inputs.values())) <= 1 else ""
    if op in _SAME:
        return None if len(set(inputs.values())) <= 1 and len(set(outputs.values())) <= 1 else ""
    if not ranks or set(entries) != set(ranks):
        return None
    if op == "all_to_all_single" or (op == "all_to_all" and any(len(n) != len(ranks) for n in inputs.values())):
        sent, received = (sum(sum(numels) for numels in side.values()) for side in (inputs, outputs))
        return f"{sent} elements are sent and {received} received" if sent != received else None
    return _parts_differ(op, inputs, outputs, ranks)


def _parts_differ(
    op: str, inputs: dict[int, tuple[int, ...]], outputs: dict[int, tuple[int, ...]], ranks: tuple[int, ...]
) -> str | None:
    """Compare what each rank sends to each other with what that one receives, in the forms that have lists."""
    if op == "all_to_all":
        sent = dict(zip(ranks, zip(*(inputs[rank] for rank in ranks), strict=True), strict=True))  # to each rank
        wrong = next((rank for rank in ranks if outputs[rank] != sent[rank]), None)
        return None if wrong is None else _say(wrong, outputs[wrong], sent[wrong], ranks)
    if op in {"all_gather", "gather"}:
        single, lists = inputs, outputs
    elif op in {"reduce_scatter", "scatter"}:
        single, lists = outputs, inputs
    else:
        return None
    if any(len(numels) != 1 for numels in single.values()):
        return None
    parts = tuple(single[rank][0] for rank in ranks)
    # only the root of a gather or scatter has a list, and PyTorch's own dumps have one size instead
    wrong = next((rank for rank in ranks if len(lists[rank]) == len(ranks) and lists[rank] != parts), None)
    return None if wrong is None else _say(wrong, lists[wrong], parts, ranks)


def _say(rank: int, has: tuple[int, ...], parts: tuple[int, ...], ranks: tuple[int, ...]) -> str:
    other, found, there = next((r, a, b) for r, a, b in zip(ranks, has, parts, strict=True) if a != b)
    return f"rank {rank} has {found} elements in its list for rank {other}, which has {there}"


def _messages(dumps: Sequence[Dump]) -> list[Finding]:
    """Return messages of which one end waits alone, or is too short; PyTorch's dumps do not tell which ends belong."""
    channels: dict[tuple[object, ...], dict[str, Entry]] = {}
    open_receivers = set()
    dumped = {dump.rank for dump in dumps}
    for dump in dumps:
        for entry in dump.entries:
            if entry.any_source:
                open_receivers.add((dump.rank, entry.group))
            if entry.channel is not None and entry.seq > 0:
                channels.setdefault((entry.group, *entry.channel, entry.seq), {})[entry.op] = entry
    found = []
    for (group, src, dst, _tag, seq), ends in channels.items():
        (entry, *_) = ends.values()
        if len(ends) == 1:
            other = dst if entry.op == "send" else src
            alone = entry.pending and other in dumped and (dst, group) not in open_receivers
            detail = f"rank {other} has not issued the {'receive' if entry.op == 'send' else 'send'}" if alone else ""
        else:
            sent, room = sum(_numels(ends["send"].inputs)), sum(_numels(ends["recv"].outputs))
            detail = f"{sent} elements are sent, and {room} expected" if sent > room else ""
        if detail:
            both = {end.rank: end for end in ends.values()}
            found.append(Finding("message", str(group), entry.desc, int(str(seq)), both, detail=detail))
    return sorted(found, key=lambda finding: finding.order)[:1]  # later ones follow from it
