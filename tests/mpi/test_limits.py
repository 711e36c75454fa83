"""Deadlines, debug checks, large counts forced small, sparse tensors, the profiler, and the GIL."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

import hpc_inflight as hi
from hpc_inflight import config as config_module
from hpc_inflight._mpi import mpi
from hpc_inflight.communicators import _mpi_buffers
from hpc_inflight.store import MPIStore
from hpc_inflight.testing import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextlib.contextmanager
def new_group(size: int, **settings: Any) -> Iterator[Any]:
    group = dist.new_group(list(range(size)), **settings)
    yield group
    dist.destroy_process_group(group)


@pytest.fixture
def _counts_of_7(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if MPI could count no further than 7."""

    def reset() -> None:
        config_module.config.cache_clear()
        _mpi_buffers._large_type.cache_clear()

    monkeypatch.setenv("HPC_INFLIGHT_MAX_COUNT", "7")
    reset()
    yield
    monkeypatch.delenv("HPC_INFLIGHT_MAX_COUNT")
    reset()


@pytest.mark.usefixtures("_counts_of_7")
def test_every_collective_in_parts(rank: int, size: int) -> None:
    n = 37  # neither a multiple of 7 nor below it
    place = torch.arange(n, dtype=torch.float32)
    total, ranks = size * (size - 1) / 2, range(size)

    tensor = place + 100 * rank
    dist.all_reduce(tensor)
    assert tensor.tolist() == (size * place + 100 * total).tolist()
    tensor = place + 100 * rank
    dist.reduce(tensor, size - 1)
    assert tensor.tolist() == (size * place + 100 * total if rank == size - 1 else place + 100 * rank).tolist()
    tensor = place + 100 * rank
    dist.broadcast(tensor, size - 1)
    assert tensor.tolist() == (place + 100 * (size - 1)).tolist()

    output = torch.empty(n * size)
    dist.all_gather_into_tensor(output, place + 100 * rank)
    assert output.tolist() == torch.cat([place + 100 * r for r in ranks]).tolist()
    outputs = [torch.empty(n) for _ in ranks]
    dist.all_gather(outputs, place + 100 * rank)
    assert [o.tolist() for o in outputs] == [(place + 100 * r).tolist() for r in ranks]
    gathered = [torch.empty(n) for _ in ranks] if rank == 0 else None
    dist.gather(place + 100 * rank, gathered, dst=0)
    for sender, out in enumerate(gathered or []):
        assert out.tolist() == (place + 100 * sender).tolist()
    received = torch.empty(n)
    dist.scatter(received, [place + 100 * r for r in ranks] if rank == 0 else None, src=0)
    assert received.tolist() == (place + 100 * rank).tolist()

    part = torch.empty(n)
    dist.reduce_scatter_tensor(part, torch.cat([place + 100 * r for r in ranks]))
    assert part.tolist() == (size * (place + 100 * rank)).tolist()
    # rank r keeps n + r elements
    uneven = torch.empty(n + rank)
    dist.reduce_scatter(uneven, [torch.arange(n + r, dtype=torch.float32) + rank for r in ranks])
    assert uneven.tolist() == (size * torch.arange(n + rank, dtype=torch.float32) + total).tolist()

    exchanged = torch.empty(size, n)
    dist.all_to_all_single(exchanged, torch.stack([place + 100 * rank + 1000 * to for to in ranks]))
    assert exchanged.tolist() == [(place + 100 * r + 1000 * rank).tolist() for r in ranks]
    # uneven splits in whole rows: a row is the unit that MPI counts
    rows = [(rank + to) % 3 for to in ranks]
    expected = [(r + rank) % 3 for r in ranks]
    output = torch.empty(sum(expected), n)
    dist.all_to_all_single(output, torch.cat([(place + rank).expand(k, n) for k in rows]), expected, rows)
    assert output.tolist() == [(place + r).tolist() for r, k in enumerate(expected) for _ in range(k)]

    half = torch.full((5000,), 1.0 + rank, dtype=torch.bfloat16)
    dist.all_reduce(half)
    assert half.unique().tolist() == [size * (size + 1) / 2]


@pytest.mark.usefixtures("_counts_of_7")
@pytest.mark.mpi(min_size=2)
def test_point_to_point_in_parts(rank: int, size: int) -> None:
    received = torch.empty(37)
    work = dist.isend(torch.arange(37.0) + rank, (rank + 1) % size)
    dist.recv(received, (rank - 1) % size)
    assert work is not None
    work.wait()
    assert received.tolist() == (torch.arange(37.0) + (rank - 1) % size).tolist()


@pytest.mark.usefixtures("_counts_of_7")
def test_what_cannot_be_counted_is_refused(size: int) -> None:
    # parts of 8 and 9 have no common unit, and 17 or more are past the limit
    splits = [8 + i % 2 for i in range(size)]
    if size > 1:
        with pytest.raises(
            hi.UnsupportedError, match=r"all_to_all_single: \d+ elements in parts of \[8, 9.*whole rows"
        ):
            dist.all_to_all_single(torch.empty(sum(splits)), torch.empty(sum(splits)), splits, splits)


@pytest.mark.slow
@pytest.mark.mpi(min_size=2)
@pytest.mark.timeout(1800)
def test_more_than_2_to_the_31_elements(rank: int, size: int) -> None:
    if size > 2:
        pytest.skip("16 GiB of memory are enough for two ranks")
    n = 2**31 + 11
    tensor = torch.zeros(n, dtype=torch.int8)
    tensor[::1_000_003] = 1 + rank
    dist.all_reduce(tensor)
    assert tensor[::1_000_003].unique().tolist() == [3]
    assert tensor[-1] == 0
    assert int(tensor[: 2**20].sum(dtype=torch.int64)) == 3 * 2
    tensor[:] = 0
    tensor[-1] = rank + 1
    dist.broadcast(tensor, 1)
    assert tensor[-1] == 2
    del tensor
    part = torch.full((2**30 + 7,), rank + 1, dtype=torch.int8)
    output = torch.zeros(2 * part.numel(), dtype=torch.int8)
    dist.all_gather_into_tensor(output, part)
    assert output[[0, part.numel() - 1, part.numel(), -1]].tolist() == [1, 1, 2, 2]


def test_barrier_gives_up(rank: int, size: int) -> None:
    if size == 1:
        pytest.skip("one rank waits for nobody")
    with new_group(size) as group:
        group.set_timeout(timedelta(seconds=0.5))  # not earlier: it holds for making the group, too
        if rank == 0:
            start = time.monotonic()
            with pytest.raises(hi.CollectiveTimeout, match=r"barrier on group \w+: Timed out after 0.5 s on rank 0"):
                dist.barrier(group)
            assert time.monotonic() - start >= 0.5
        dist.barrier()


def test_monitored_barrier(rank: int, size: int) -> None:
    with new_group(size) as group:
        group.monitored_barrier(timedelta(seconds=60))
        group.monitored_barrier(timedelta(seconds=60), wait_all_ranks=True)
    if size == 1:
        return
    late, punctual = range(1, size, 2), range(2, size, 2)
    # rank 0 stops at the first that is late and leaves those after it to their deadlines; or it tells all the others
    for all_ranks, seconds, reason in ((False, 0.5, "it did not answer"), (True, 60, "another rank did not come")):
        with new_group(size) as group:
            if rank == 0:
                for other in punctual:
                    wait_until(functools.partial(group._comm.comm.Iprobe, other, group._comm.own_tag + 1))
                names = ", ".join(map(str, late)) if all_ranks else "1"
                with pytest.raises(hi.CollectiveTimeout, match=rf"Ranks? {names} failed to pass"):
                    group.monitored_barrier(timedelta(seconds=0.5), wait_all_ranks=all_ranks)
            elif rank not in late:
                with pytest.raises(
                    hi.CollectiveTimeout, match=rf"Rank {rank} successfully reached .* from rank 0: {reason}"
                ):
                    group.monitored_barrier(timedelta(seconds=seconds), wait_all_ranks=all_ranks)
            dist.barrier()


@pytest.fixture
def debug(monkeypatch: pytest.MonkeyPatch, size: int) -> Iterator[Any]:
    monkeypatch.setenv("HPC_INFLIGHT_DEBUG", "1")
    config_module.config.cache_clear()
    with new_group(size) as group:
        yield group
    monkeypatch.delenv("HPC_INFLIGHT_DEBUG")
    config_module.config.cache_clear()


def test_debug_lets_what_matches_pass(debug: Any, rank: int, size: int) -> None:
    tensor = torch.full((3,), 1.0)
    dist.all_reduce(tensor, group=debug)
    dist.all_reduce(tensor, group=debug, async_op=True).wait()
    dist.barrier(debug)
    splits = [(rank + to) % 2 for to in range(size)]
    dist.all_to_all_single(torch.empty(sum(splits)), torch.empty(sum(splits)), splits, splits, group=debug)
    outputs = [torch.empty(r) for r in range(size)]
    dist.all_gather(outputs, torch.empty(rank), group=debug)
    assert tensor.tolist() == [float(size**2)] * 3


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("is_async", [False, True])
def test_debug_shows_who_differs_and_how(debug: Any, rank: int, size: int, is_async: bool) -> None:
    last = rank == size - 1
    others = ", ".join(map(str, range(size - 1)))

    def attempt(call: Any) -> str:
        with pytest.raises(hi.CollectiveMismatch) as caught:  # noqa: PT012  # raised by the call or by its wait
            work = call()
            if work is not None:
                work.wait()
        return str(caught.value)

    def on_last(one: Any, other: Any) -> Any:
        return one if last else other

    told = attempt(lambda: dist.all_reduce(torch.ones(on_last(4, 3)), group=debug, async_op=is_async))
    assert f"shape is (3,) on rank {others}, (4,) on rank {size - 1}" in told
    told = attempt(
        lambda: dist.all_reduce(torch.ones(3), op=on_last(dist.ReduceOp.MAX, dist.ReduceOp.SUM), group=debug)
    )
    assert f"op is SUM on rank {others}, MAX on rank {size - 1}" in told
    told = attempt(lambda: dist.broadcast(torch.ones(2), on_last(1, 0), group=debug, async_op=is_async))
    assert f"root is 0 on rank {others}, 1 on rank {size - 1}" in told
    dtype = on_last(torch.int32, torch.float32)
    told = attempt(lambda: dist.broadcast(torch.ones(2, dtype=dtype), 0, group=debug, async_op=is_async))
    assert f"dtype is torch.float32 on rank {others}, torch.int32 on rank {size - 1}" in told
    told = attempt(
        on_last(
            lambda: dist.barrier(debug, async_op=is_async),
            lambda: dist.all_reduce(torch.ones(3), group=debug, async_op=is_async),
        )
    )
    assert f"call is all_reduce on rank {others}, barrier on rank {size - 1}" in told
    # the last rank sends one element more to rank 0 than that expects
    sent = [2 if last and to == 0 else 1 for to in range(size)]
    told = attempt(
        lambda: dist.all_to_all_single(
            torch.empty(size), torch.empty(sum(sent)), [1] * size, sent, group=debug, async_op=is_async
        )
    )
    assert f"rank {size - 1} sends 2 elements to rank 0, which expects 1" in told
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=debug)
    assert tensor.item() == size


def test_sparse_all_reduce(rank: int, size: int) -> None:
    # rank r holds r + 1 entries: (0, 0) .. (r, r), each r + 1, so place i gets the sum of i + 1 .. size
    places = torch.arange(rank + 1)
    tensor = torch.sparse_coo_tensor(
        torch.stack([places, places]), torch.full((rank + 1,), rank + 1.0), (5, 5), check_invariants=True
    )
    dist.all_reduce(tensor)
    expected = [sum(range(i + 1, size + 1)) for i in range(5)]
    assert tensor.to_dense().diag().tolist() == expected
    assert tensor.to_dense().sum() == sum(expected)
    hybrid = torch.sparse_coo_tensor(
        torch.tensor([[2 * rank]]), torch.full((1, 3), 1.0 + rank), (8, 3), check_invariants=True
    )
    dist.all_reduce(hybrid)
    assert hybrid.to_dense()[:, 0].tolist() == [i / 2 + 1.0 if i % 2 == 0 and i / 2 < size else 0.0 for i in range(8)]
    with pytest.raises(hi.UnsupportedError, match=r"ReduceOp.MAX of a sparse tensor; expected SUM"):
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)


def test_profiler_shows_every_call(rank: int, size: int) -> None:
    with torch.profiler.profile(record_shapes=True) as profile:
        dist.all_reduce(torch.ones(3, 4))
        work = dist.all_reduce(torch.ones(5), async_op=True)
        work.wait()
        dist.barrier()
        if size > 1:
            sent = dist.isend(torch.ones(7), (rank + 1) % size)
            dist.recv(torch.ones(7), (rank - 1) % size)
            assert sent is not None
            sent.wait()
    events = [e for e in profile.events() or [] if e.name.startswith("hpc_inflight:")]
    shapes = {e.name: e.input_shapes for e in events}
    assert [e.input_shapes for e in events if e.name == "hpc_inflight:all_reduce"] == [[[3, 4]], [[5]]]
    assert "hpc_inflight:all_reduce (in flight)" in shapes
    assert "hpc_inflight:barrier" in shapes
    if size > 1:
        assert shapes["hpc_inflight:send"] == shapes["hpc_inflight:recv"] == [[7]]


def test_profiler_may_end_as_soon_as_the_work_is_waited(rank: int, size: int) -> None:
    # the event of an operation in flight once ended after its work was complete, in a profiler that was gone
    tensor = torch.ones(1000)
    for _ in range(60):
        with torch.autograd.profiler.profile():
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, async_op=True).wait()
    assert tensor.unique().tolist() == [1.0]


def all_reduce_and_destroy(group: Any) -> None:
    dist.all_reduce(torch.ones(4), group=group, async_op=True)
    dist.destroy_process_group(group)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda group: dist.all_reduce(torch.ones(4), group=group), id="all_reduce"),
        pytest.param(lambda group: dist.all_reduce(torch.ones(4), group=group, async_op=True).wait(), id="wait"),
        pytest.param(dist.barrier, id="barrier"),
        pytest.param(all_reduce_and_destroy, id="destroy"),
    ],
)
def test_the_gil_is_free_while_waiting(rank: int, size: int, call: Callable[[Any], object]) -> None:
    """One rank calls first, and only a second thread of it, which needs the GIL for that, lets the others call."""
    store = MPIStore(mpi().COMM_WORLD.Dup(), timeout=timedelta(seconds=60))
    for first in range(size):
        group = dist.new_group(list(range(size)))
        if rank == first:
            calling = threading.Event()

            def let_the_others_come(key: str, calling: threading.Event = calling) -> None:
                calling.wait()
                for _ in range(20):  # by the end of it the call waits: it cannot return before the others come
                    time.sleep(0.005)
                store.set(key, "")

            thread = threading.Thread(target=let_the_others_come, args=(f"{first} waits",))
            thread.start()
            calling.set()
            call(group)
            thread.join()
        else:
            store.get(f"{first} waits")
            call(group)
        if call is not all_reduce_and_destroy:
            dist.destroy_process_group(group)
    assert store.close(timeout_s=60)
