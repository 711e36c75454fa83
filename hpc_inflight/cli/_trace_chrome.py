"""A timeline of the ranks' operations for Perfetto or chrome://tracing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpc_inflight.cli._trace_load import Dump, Entry


def timeline(dumps: Sequence[Dump]) -> dict[str, Any]:
    """Return the events: one process per rank, one track per group, times by each rank's own clock.

    What runs one after the other on a track is a bar of it. Messages, and operations of which nobody can say when
    they began, may overlap, and are events of their own.
    """
    tracks: dict[str, int] = {}
    events: list[dict[str, Any]] = []
    origin = min((entry.created for dump in dumps for entry in dump.entries), default=0)
    for dump in dumps:
        seen = set()
        events.append(_name("process_name", dump.rank, 0, f"rank {dump.rank} {dump.host}".strip()))
        events.append({"ph": "M", "name": "process_sort_index", "pid": dump.rank, "args": {"sort_index": dump.rank}})
        for number, entry in enumerate(dump.entries):
            track = tracks.setdefault(entry.group, len(tracks) + 1)
            if track not in seen:
                seen.add(track)
                events.append(_name("thread_name", dump.rank, track, f"group {entry.group} ({entry.desc})"))
            events += _events(entry, dump, track, number, origin)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _name(kind: str, process: int, track: int, text: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": track, "args": {"name": text}}


def _events(entry: Entry, dump: Dump, track: int, number: int, origin: int) -> list[dict[str, Any]]:
    begin = entry.created if entry.started is None else entry.started
    end = entry.completed
    if end is None:
        end = dump.written if entry.pending else begin
    name = entry.op
    if entry.channel is not None:
        src, dst, tag = entry.channel
        name += f" {'any' if src is None else src}->{dst}" + (f" tag {tag}" if tag else "")
    if entry.error:
        name += " (failed)"
    elif entry.pending:
        name += " (not complete)"
    common = {"name": name, "cat": "message" if entry.channel else "collective", "pid": dump.rank, "tid": track}
    args = {
        "seq": entry.seq,
        "inputs": [list(size) for size in entry.inputs],
        "outputs": [list(size) for size in entry.outputs],
        "dtypes": list(entry.dtypes),
        "state": entry.state,
        "queued_us": (begin - entry.created) / 1000,
        "issued at": entry.site,
        "error": entry.error,
    }
    ts, dur = (begin - origin) / 1000, max(0, end - begin) / 1000
    if entry.channel is None and entry.started is not None:
        return [{"ph": "X", "ts": ts, "dur": dur, **common, "args": args}]
    own = {"id": f"{dump.rank}.{number}", **common}
    return [{"ph": "b", "ts": ts, **own, "args": args}, {"ph": "e", "ts": ts + dur, **own}]
