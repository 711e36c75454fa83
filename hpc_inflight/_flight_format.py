"""The flight recorder in the format of PyTorch's own, for its analyser and for ``hpc-inflight trace``.

The analyser (``torch.distributed.flight_recorder.fr_trace``) knows NCCL's operations by name and compares the ranks'
entries by number and size, so some of ours are written in a form that it can compare:

- Sizes that differ between ranks by right (uneven all_gather and reduce_scatter) are those of all ranks, which every
  rank knows, and lists that it expects as one tensor are one size.
- It compares an entry with every member of its group. So a message has a group of its own, of its two ranks: its
  channel, in which messages are numbered from 1 at either end.

What that hides stands unchanged under the key ``"hpc_inflight"`` of an entry.
"""

from __future__ import annotations

import os
import socket
import time
from typing import TYPE_CHECKING, Any, Final

import torch

from hpc_inflight import flight_recorder
from hpc_inflight._flight_records import Record
from hpc_inflight._flight_records import records as all_records
from hpc_inflight.flight_recorder import Lane, Message, Process

if TYPE_CHECKING:
    from collections.abc import Iterable

VERSION: Final = "2.10"  # of the format, as torch 2.13 writes it

_NAMES: Final = {
    "all_reduce_coalesced": "allreduce_coalesced",
    "all_gather_into_tensor": "_all_gather_base",
    "all_gather_coalesced": "ALLGATHER_coalesced",
    "reduce_scatter_tensor": "_reduce_scatter_base",
    "all_to_all_single": "all_to_all",
    "barrier": "all_reduce_barrier",
    "monitored_barrier": "all_reduce_barrier",
}
_DTYPES: Final = {
    torch.float64: "Double",
    torch.float32: "Float",
    torch.float16: "Half",
    torch.bfloat16: "BFloat16",
    torch.int64: "Long",
    torch.int32: "Int",
    torch.int16: "Short",
    torch.int8: "Char",
    torch.uint8: "Byte",
    torch.bool: "Bool",
    torch.complex32: "ComplexHalf",
    torch.complex64: "ComplexFloat",
    torch.complex128: "ComplexDouble",
}
_SITE: Final = " in "
_MAX_MS: Final = 2**62


def snapshot() -> dict[str, Any]:
    """Return the dump: dicts, lists, tuples, text and numbers alone."""
    clock = time.time_ns() - time.monotonic_ns()
    records = all_records()
    config_: dict[str, Any] = {}
    for group in flight_recorder.groups():
        _describe(config_, group.name, group.desc, group.ranks)
    entries = []
    for record in records:
        entry = _entry(record, clock)
        if record.message is not None:
            _message(entry, record, record.message, config_)
        else:
            _collective(entry, record)
            _describe(config_, record.lane.name, record.lane.group.desc, record.lane.group.ranks)
        entries.append(entry)
    return {
        "version": VERSION,
        "comm_lib_version": "",
        "pg_config": config_,
        "pg_status": _status(records),
        "entries": entries,
        "hpc_inflight": {
            "rank": Process.rank,
            "world_size": Process.world_size,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "time_ns": time.time_ns(),
        },
    }


def _describe(config_: dict[str, Any], name: str, desc: str, ranks: Iterable[int]) -> None:
    config_[name] = {"name": name, "desc": desc, "ranks": str(list(ranks))}


def _status(records: list[Record]) -> dict[str, Any]:
    found: dict[str, dict[str, int]] = {}
    for record in records:
        if record.message is not None:
            continue
        status = found.setdefault(str(record.lane.id), {f"last_{s}_collective": -1 for s in _STATES.values()})
        for state, word in _STATES.items():
            if _reached(record, state):
                status[f"last_{word}_collective"] = record.number
    return found


_STATES: Final = {"scheduled": "enqueued", "started": "started", "completed": "completed"}


def _reached(record: Record, state: str) -> bool:
    if state == "completed":
        return record.ended is not None and not record.error
    return state == "scheduled" or record.started is not None


def _entry(record: Record, clock: int) -> dict[str, Any]:
    def unix_ns(seconds: float | None) -> int | None:
        return None if seconds is None else int(seconds * 1e9) + clock

    done = _reached(record, "completed")
    return {
        "record_id": record.id,
        "pg_id": record.lane.id,
        "process_group": (record.lane.name, record.lane.group.desc),
        "op_id": record.id + 1,
        "time_created_ns": unix_ns(record.created),
        "time_discovered_started_ns": unix_ns(record.started),
        "time_discovered_completed_ns": unix_ns(record.ended) if done else None,
        "state": "completed" if done else "started" if _reached(record, "started") else "scheduled",
        "timeout_ms": int(min(record.timeout_s * 1000, _MAX_MS)),
        "is_p2p": record.message is not None,
        "retired": record.ended is not None or (record.returned and not record.lane.blocks),
        "frames": _frames(record.site),
        "hpc_inflight": {
            "op": record.op,
            "transport": record.lane.transport,
            "error": record.error,
            "captured": record.captured,
            "input_sizes": [list(size) for size, _ in record.inputs],
            "output_sizes": [list(size) for size, _ in record.outputs],
        },
    }


def _frames(site: str) -> list[dict[str, Any]]:
    if not site:
        return []
    place, _, name = site.rpartition(_SITE)
    file, _, line = place.rpartition(":")
    return [{"name": name, "filename": file, "line": int(line)}]


def _dtypes(tensors: Any) -> list[str]:
    return [_DTYPES.get(dtype) or str(dtype).removeprefix("torch.") for _, dtype in tensors]


def _collective(entry: dict[str, Any], record: Record) -> None:
    name = _NAMES.get(record.op, record.op)
    own: dict[str, list[list[int]]] = entry["hpc_inflight"]
    inputs, outputs = own["input_sizes"], own["output_sizes"]
    input_dtypes, output_dtypes = _dtypes(record.inputs), _dtypes(record.outputs)
    if record.op == "reduce":  # in place, though nothing comes out of it but on the root
        outputs, output_dtypes = inputs, input_dtypes
    elif record.op in {"all_gather", "reduce_scatter"}:
        parts = outputs if record.op == "all_gather" else inputs
        total = [[sum(_numel(size) for size in parts)]]
        if len({_numel(size) for size in parts}) > 1:
            name, inputs, outputs = f"{name}_v", parts, total
        elif record.op == "all_gather":
            outputs = total
        else:
            inputs = total
    elif record.op == "all_to_all":
        inputs, outputs = ([[sum(_numel(size) for size in sizes)]] for sizes in (inputs, outputs))
    entry |= {
        "collective_seq_id": record.number,
        "p2p_seq_id": 0,
        "profiling_name": f"nccl:{name}",
        "input_sizes": inputs,
        "input_dtypes": input_dtypes,
        "output_sizes": outputs,
        "output_dtypes": output_dtypes,
    }


def _numel(size: list[int]) -> int:
    numel = 1
    for length in size:
        numel *= length
    return numel


def _message(entry: dict[str, Any], record: Record, message: Message, config_: dict[str, Any]) -> None:
    lane, own = record.lane, entry["hpc_inflight"]
    mine, theirs = _global(lane, lane.group.rank), _global(lane, message.peer)
    src, dst = (mine, theirs) if record.op == "send" else (theirs, mine)
    ranks = sorted({rank for rank in (src, dst) if rank is not None})
    # where the peer is not known, or is no rank at all, nobody has the other end
    places = [0 if rank is None else ranks.index(rank) for rank in (src, dst)]
    channel = f"{lane.name}:{'any' if src is None else src}->{'none' if dst is None else dst}"
    if message.tag:
        channel += f" tag {message.tag}"
    _describe(config_, channel, lane.group.desc, ranks)
    number = message.number
    if not number and message.peer is not None and not record.error:  # it is being issued
        number = lane.channels.get((record.op, message.peer, message.tag), 0) + 1
    name = f"send {places[0]}->{places[1]}" if record.op == "send" else f"recv {places[1]}<-{places[0]}"
    entry |= {
        "process_group": (channel, lane.group.desc),
        "collective_seq_id": number,
        "p2p_seq_id": message.serial,
        "profiling_name": f"nccl:{name}",
        "input_sizes": own["input_sizes"],
        "input_dtypes": _dtypes(record.inputs),
        "output_sizes": own["output_sizes"],
        "output_dtypes": _dtypes(record.outputs),
    }
    own |= {"group": lane.name, "src": src, "dst": dst, "tag": message.tag, "any_source": message.any_source}


def _global(lane: Lane, rank: int | None) -> int | None:
    return None if rank is None or not 0 <= rank < len(lane.group.ranks) else lane.group.ranks[rank]
