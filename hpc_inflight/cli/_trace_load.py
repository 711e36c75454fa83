"""Read flight recorder dumps: this package's and PyTorch's own, which may come from anybody's job."""

from __future__ import annotations

import ast
import io
import pickle
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pathlib import Path

_NAME: Final = re.compile(r"(.*?)(\d+)")
_P2P: Final = re.compile(r"(send|recv) (\d+)(?:->|<-)(\d+)")
_STATES: Final = ("scheduled", "started", "completed")


class TraceError(Exception):
    """What was given is no directory of dumps; the message is a sentence."""


@dataclass(frozen=True)
class Entry:
    """One operation of one rank.

    Attributes:
        rank: Whose.
        group: Name of its group; of a message: of the group that it was sent in.
        desc: The group's description.
        seq: Its number among the group's collectives, or a message's in its channel.
        op: Its name.
        state: ``"scheduled"``, ``"started"`` or ``"completed"``, as far as the rank had found out.
        created: Unix time in ns; likewise ``started`` and ``completed``, which may be None.
        settled: Nobody would have found out more: it is in a CUDA graph, was launched and left alone, or failed.
        inputs: Sizes of the tensors that it reads; likewise ``outputs``.
        dtypes: All their dtypes.
        error: Why it failed.
        site: Where it was issued; empty if that was not recorded.
        channel: (source, destination, tag) in global ranks, of a message; the source is None when it may be any.
    """

    rank: int
    group: str
    desc: str
    seq: int
    op: str
    state: str
    created: int
    started: int | None
    completed: int | None
    settled: bool
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    error: str = ""
    site: str = ""
    channel: tuple[int | None, int | None, int] | None = None
    any_source: bool = False

    @property
    def pending(self) -> bool:
        """It had not ended when the dump was written."""
        return self.state != "completed" and not self.settled


@dataclass(frozen=True)
class Dump:
    """What one rank wrote.

    Attributes:
        rank: Its global rank.
        file: The file's name.
        host: Its node; empty if the dump does not say.
        written: Unix time in ns of the dump, or of its last event.
        whole: It goes back to the first operation of the process.
        entries: Its operations, in the order in which they were issued.
        groups: Global ranks of each group, in the order of group ranks.
        world_size: Number of ranks of the job, where the dump says.
    """

    rank: int
    file: str
    host: str
    written: int
    whole: bool
    entries: list[Entry] = field(repr=False)
    groups: dict[str, tuple[int, ...]]
    world_size: int | None


class _PlainData(pickle.Unpickler):
    """Unpickles dicts, lists, tuples, text and numbers; nothing that is looked up by name, so nothing runs."""

    def find_class(self, module: str, name: str) -> Any:
        raise TraceError(f"it refers to {module}.{name}, where a dump has plain data only")

    def persistent_load(self, _pid: Any) -> Any:
        raise TraceError("it refers to data outside of it")


def unpickle(data: bytes) -> Any:
    """Unpickle plain data.

    Raises:
        TraceError: It is not that.
    """
    try:
        return _PlainData(io.BytesIO(data)).load()
    except TraceError:
        raise
    except Exception as error:  # noqa: BLE001  # a damaged pickle raises whatever it comes to
        raise TraceError(f"it is damaged, cut short or no pickle ({str(error) or type(error).__name__})") from None


def load(directory: Path, prefix: str | None = None) -> list[Dump]:
    """Read the dumps of a directory, one file per rank, named by a prefix and the rank.

    Raises:
        TraceError: There is none, they have several prefixes, or one cannot be read.
    """
    return [_read(file, rank) for rank, file in sorted(_files(directory, prefix).items())]


def _files(directory: Path, prefix: str | None) -> dict[int, Path]:
    if not directory.is_dir():
        raise TraceError(f"{directory} is no directory; give the one that has the ranks' dumps")
    found: dict[str, dict[int, Path]] = {}
    for file in sorted(directory.iterdir()):
        match = _NAME.fullmatch(file.name)
        if match and file.is_file() and not file.name.startswith("."):
            found.setdefault(match[1], {})[int(match[2])] = file
    if prefix is not None:
        found = {name: files for name, files in found.items() if name == prefix}
    if not found:
        what = "ending in a rank" if prefix is None else f"named {prefix}<rank>"
        raise TraceError(f"{directory} has no dumps: no file {what}")
    if len(found) > 1:
        raise TraceError(f"{directory} has dumps of several names, {', '.join(sorted(found))}; choose with --prefix")
    ((_, files),) = found.items()
    return files


def _read(file: Path, rank: int) -> Dump:
    try:
        return _dump(unpickle(file.read_bytes()), rank, file.name)
    except OSError as error:
        raise TraceError(f"{file} cannot be read: {error.strerror}") from None
    except TraceError as error:
        raise TraceError(f"{file} is no flight recorder dump: {error}") from None
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, SyntaxError) as error:
        raise TraceError(f"{file} is no flight recorder dump: {type(error).__name__}: {error}") from None


def _dump(data: Any, rank: int, file: str) -> Dump:
    ours = data.get("hpc_inflight", {})
    rank = int(ours.get("rank", rank))
    config = {str(name): group for name, group in data["pg_config"].items()}
    groups = {name: _ranks(group["ranks"]) for name, group in config.items()}
    rows = data["entries"]
    entries = [_entry(row, rank, groups) for row in rows]
    times = [time for e in entries for time in (e.created, e.started, e.completed) if time is not None]
    return Dump(
        rank=rank,
        file=file,
        host=str(ours.get("host", "")),
        written=int(ours.get("time_ns", max(times, default=0))),
        whole=not rows or min(int(row["record_id"]) for row in rows) == 0,
        entries=entries,
        groups=groups,
        world_size=int(ours["world_size"]) if ours else None,
    )


def _ranks(text: Any) -> tuple[int, ...]:
    return tuple(int(rank) for rank in (ast.literal_eval(text) if isinstance(text, str) else text))


def _entry(row: dict[str, Any], rank: int, groups: dict[str, tuple[int, ...]]) -> Entry:
    name, desc = (str(part) for part in row["process_group"])
    own = row.get("hpc_inflight", {})
    op = str(row["profiling_name"]).partition(":")[2] or str(row["profiling_name"])
    channel = None
    if row["is_p2p"]:
        op, channel = _message(op, own, groups.get(name, ()))
        name = str(own.get("group", name))
    state = str(row["state"])
    if state not in _STATES:
        raise ValueError(f"state {state!r}")
    frames = row.get("frames") or []
    completed = row["time_discovered_completed_ns"]
    return Entry(
        rank=rank,
        group=name,
        desc=desc,
        # PyTorch does not number a channel's messages
        seq=0 if row["is_p2p"] and not own else int(row["collective_seq_id"]),
        op=str(own.get("op", op)),
        state=state,
        created=int(row["time_created_ns"]),
        started=_optional(row["time_discovered_started_ns"]),
        completed=_optional(completed),
        settled=completed is None and (bool(row["retired"]) or bool(own.get("captured"))),
        inputs=_sizes(own.get("input_sizes", row["input_sizes"])),
        outputs=_sizes(own.get("output_sizes", row["output_sizes"])),
        dtypes=tuple(sorted({str(dtype) for dtype in [*row["input_dtypes"], *row["output_dtypes"]]})),
        error=str(own.get("error", "")),
        site="{filename}:{line} in {name}".format(**frames[0]) if frames else "",
        channel=channel,
        any_source=bool(own.get("any_source")),
    )


def _optional(value: Any) -> int | None:
    return None if value is None else int(value)


def _sizes(value: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(int(length) for length in size) for size in value)


def _message(
    op: str, own: dict[str, Any], ranks: tuple[int, ...]
) -> tuple[str, tuple[int | None, int | None, int] | None]:
    if own:
        return op, (_optional(own["src"]), _optional(own["dst"]), int(own["tag"]))
    match = _P2P.fullmatch(op)
    if match is None or not ranks:
        return op, None
    here, there = (ranks[int(match[i])] for i in (2, 3))
    return match[1], (here, there, 0) if match[1] == "send" else (there, here, 0)
