"""What real operations leave in the flight recorder, judged by PyTorch's own analyser."""

from __future__ import annotations

import argparse
import copy
import gc
import pickle
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

import hpc_inflight as hi
from hpc_inflight import _flight_format, _flight_records
from hpc_inflight import _torch_compat as compat
from hpc_inflight.cli._trace_compare import compare
from hpc_inflight.cli._trace_load import load
from hpc_inflight.testing import assert_on_all_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

DTYPES = [torch.float32, torch.bfloat16, torch.int64]


@pytest.fixture
def group() -> Iterator[Any]:
    """Return a group of all ranks, for which only the test's operations are recorded."""
    made = dist.new_group(group_desc="recorded")
    yield made
    dist.destroy_process_group(made)


def gathered(group: Any) -> list[dict[str, Any]]:
    """Return every rank's dump of one group's operations, on every rank."""
    mine, name = _flight_format.snapshot(), group.group_name
    mine["entries"] = [
        entry
        for entry in mine["entries"]
        if entry["process_group"][0] == name or entry["hpc_inflight"].get("group") == name
    ]
    for number, entry in enumerate(mine["entries"]):
        entry["record_id"] = number
    dumps: list[Any] = [None] * group.size()
    dist.all_gather_object(dumps, mine)
    return dumps


def analyse(dumps: list[dict[str, Any]]) -> Any:
    """Return the database that PyTorch's analyser makes of dumps."""
    builder = pytest.importorskip(
        "torch.distributed.flight_recorder.components.builder", reason="this torch has no analyser"
    )
    if compat.TORCH < (2, 13):
        pytest.skip("this torch's analyser does not know collectives of uneven sizes")
    flags = ("verbose", "just_print_entries", "allow_incomplete_ranks")
    args = argparse.Namespace(**dict.fromkeys(flags, False), mismatch_cap=10)
    details = {str(rank): copy.deepcopy(dump) | {"rank": rank} for rank, dump in enumerate(dumps)}
    return builder.build_db(details, args, dumps[0]["version"])


def full(numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.ones(numel, dtype=dtype)


def calls(rank: int, size: int, group: Any, dtype: torch.dtype) -> dict[str, Callable[[bool], Any]]:
    """Return every collective, in its even and uneven forms, as functions of ``async_op``."""
    root, ranks = size - 1, range(size)

    def t(numel: int) -> torch.Tensor:
        return full(numel, dtype)

    out, inp = [rank + r + 1 for r in ranks], [rank + r + 1 for r in ranks]
    return {
        "all_reduce": lambda a: dist.all_reduce(t(6), group=group, async_op=a),
        "all_reduce of a scalar": lambda a: dist.all_reduce(torch.ones((), dtype=dtype), group=group, async_op=a),
        "broadcast": lambda a: dist.broadcast(t(6), root, group=group, async_op=a),
        "reduce": lambda a: dist.reduce(t(6), root, group=group, async_op=a),
        "all_gather": lambda a: dist.all_gather([t(6) for _ in ranks], t(6), group=group, async_op=a),
        "all_gather uneven": lambda a: dist.all_gather([t(r + 1) for r in ranks], t(rank + 1), group=group, async_op=a),
        "all_gather_into_tensor": lambda a: dist.all_gather_into_tensor(t(2 * size), t(2), group=group, async_op=a),
        "gather": lambda a: dist.gather(
            t(6), [t(6) for _ in ranks] if rank == root else None, root, group=group, async_op=a
        ),
        "scatter": lambda a: dist.scatter(
            t(6), [t(6) for _ in ranks] if rank == root else None, root, group=group, async_op=a
        ),
        "reduce_scatter": lambda a: dist.reduce_scatter(t(2), [t(2) for _ in ranks], group=group, async_op=a),
        "reduce_scatter uneven": lambda a: dist.reduce_scatter(
            t(rank + 1), [t(r + 1) for r in ranks], group=group, async_op=a
        ),
        "reduce_scatter_tensor": lambda a: dist.reduce_scatter_tensor(t(2), t(2 * size), group=group, async_op=a),
        "all_to_all_single": lambda a: dist.all_to_all_single(t(size), t(size), group=group, async_op=a),
        "all_to_all_single uneven": lambda a: dist.all_to_all_single(
            t(sum(out)), t(sum(inp)), out, inp, group=group, async_op=a
        ),
        "all_to_all": lambda a: dist.all_to_all([t(n) for n in out], [t(n) for n in inp], group=group, async_op=a),
        "barrier": lambda a: dist.barrier(group=group, async_op=a),
        "empty": lambda a: dist.all_reduce(t(0), group=group, async_op=a),
        "all_reduce_coalesced": lambda a: dist.all_reduce_coalesced([t(3), t(2)], group=group, async_op=a),
    }


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_collective_matches(rank: int, size: int, group: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    made = calls(rank, size, group, dtype)
    for number, call in enumerate(made.values()):
        for mode in (False, True, bool((rank + number) % 2)):  # in the end, not all ranks alike
            work = call(mode)
            if work is not None:
                work.wait()
    dumps = gathered(group)
    found = analyse(dumps)
    assert_on_all_ranks(
        len(found.collectives) == 3 * len(made) and all(collective.pass_check for collective in found.collectives),
        str([c for c in found.collectives if not c.pass_check]),
    )
    assert [entry["collective_seq_id"] for entry in dumps[rank]["entries"]] == list(range(1, 3 * len(made) + 1))
    assert {entry["state"] for dump in dumps for entry in dump["entries"]} == {"completed"}
    assert group._comm.seq == 3 * len(made)  # the numbers that errors name
    assert ours(dumps, tmp_path) == []


def ours(dumps: list[dict[str, Any]], tmp_path: Path) -> list[Any]:
    """Return what this package's own analysis finds."""
    for rank, dump in enumerate(dumps):
        (tmp_path / f"dump_{rank}").write_bytes(pickle.dumps(dump, 2))
    return compare(load(tmp_path))


def test_coalesced_calls_match(size: int, group: Any, tmp_path: Path) -> None:
    for is_async in (False, True):
        with _coalescing_manager(group, async_ops=is_async) as block:
            for numel in (3, 4):
                dist.all_reduce(torch.ones(numel), group=group)
        if is_async:
            block.wait()
    dumps = gathered(group)
    assert all(collective.pass_check for collective in analyse(dumps).collectives)
    assert ours(dumps, tmp_path) == []


@pytest.mark.parametrize("tags", [(0, 0, 0), (0, 7, 0)], ids=["untagged", "tagged"])
def test_messages_match(rank: int, size: int, group: Any, tags: tuple[int, ...], tmp_path: Path) -> None:
    dist.barrier(group=group)
    to, back = (rank + 1) % size, (rank - 1) % size
    for number, tag in enumerate(tags):
        works = [
            dist.isend(torch.ones(number + 1), to, group=group, tag=tag),
            dist.irecv(torch.ones(number + 1), back if number else None, group=group, tag=tag),
        ]
        for work in works:
            assert work is not None
            work.wait()
        dist.all_reduce(torch.ones(2), group=group)
    dumps = gathered(group)
    found = analyse(dumps)
    assert len(found.collectives) == 4 + (3 * size if size > 1 else 6)  # what a rank sends itself has both ends there
    assert all(collective.pass_check for collective in found.collectives)
    assert ours(dumps, tmp_path) == []


def test_subgroups_have_global_ranks(rank: int, size: int) -> None:
    members = [0, size - 1] if size > 1 else [0]
    made = dist.new_group(members, group_desc="edges")
    try:
        if rank in members:
            dist.all_reduce(torch.ones(2), group=made)
            config = _flight_format.snapshot()["pg_config"][made.group_name]
            assert config == {"name": made.group_name, "desc": "edges", "ranks": str(members)}
            split = made.split_group(list(range(len(members)))[-1:])
            if rank == size - 1:
                split.allreduce([torch.ones(2)])
                assert _flight_format.snapshot()["pg_config"][split.group_name]["ranks"] == str([size - 1])
    finally:
        if rank in members:
            dist.destroy_process_group(made)


def test_what_failed_says_so(group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise ValueError("broken on every rank")

    comm = group._comm
    monkeypatch.setattr(comm, "all_reduce", lambda *_: broken)
    for is_async in (False, True):
        with pytest.raises(ValueError, match="broken on every rank"):  # noqa: PT012  # either of the two raises
            work = dist.all_reduce(torch.ones(2), group=group, async_op=is_async)
            work.wait()
    mine = [record for record in _flight_records.records() if record.lane.name == group.group_name]
    assert [record.error for record in mine] == ["ValueError: broken on every rank"] * 2
    assert all(record.ended is not None for record in mine)


def test_an_operation_in_flight(rank: int, size: int, group: Any) -> None:
    if size == 1:
        pytest.skip("one rank waits for nobody")
    dist.barrier(group=group)
    ready = torch.ones(1)
    if rank == 0:
        work = dist.all_reduce(torch.ones(2), group=group, async_op=True)
        (record,) = [r for r in _flight_records.records() if r.lane.name == group.group_name][1:]
        assert record.returned
        assert record.ended is None
        dist.all_reduce(ready)
        work.wait()
        (record,) = [r for r in _flight_records.records() if r.lane.name == group.group_name][1:]
        assert record.started is not None
        assert record.ended is not None
        assert record.created <= record.started <= record.ended
    else:
        dist.all_reduce(ready)
        dist.all_reduce(torch.ones(2), group=group)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_tensors_go_with_their_user(size: int, group: Any, is_async: bool) -> None:
    output, tensor = torch.ones(2 * size), torch.ones(2)
    work = dist.all_gather_into_tensor(output, tensor, group=group, async_op=is_async)
    if work is not None:
        work.wait()
    alive = [weakref.ref(output), weakref.ref(tensor)]
    del output, tensor, work
    gc.collect()
    assert [reference() for reference in alive] == [None, None]
    assert _flight_records.records()[-1].op == "all_gather_into_tensor"


def test_the_monitored_barrier_counts(group: Any) -> None:
    group.monitored_barrier()
    dist.barrier(group=group)
    mine = [record for record in _flight_records.records() if record.lane.name == group.group_name]
    assert [(record.op, record.number) for record in mine] == [("monitored_barrier", 1), ("barrier", 2)]
    assert group._comm.seq == 2


def test_the_file_of_each_rank(rank: int, size: int, tmp_path: Path) -> None:
    dist.barrier()
    assert hi.dump_flight_recorder(tmp_path).endswith(f"flight_recorder_rank_{rank}")
    (dump,) = load(tmp_path)
    assert (dump.rank, dump.world_size) == (rank, size)
