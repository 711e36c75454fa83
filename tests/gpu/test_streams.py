"""Whoever waits is ordered after the collective, on whichever streams; and the host does not block."""

from __future__ import annotations

import gc
import time
import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllreduceOptions

import hpc_inflight as hi

ROUNDS = 200
LONG = 400_000_000  # cycles: about 0.2 s
BRIEF = 2_000_000
COUNT = 1 << 18


def hold_up(cycles: int = BRIEF) -> None:
    """Keep the current stream busy."""
    torch.cuda._sleep(cycles)


def total(size: int, first: int = 0) -> int:
    return sum(first + r for r in range(size))


def test_after_a_long_kernel(rank: int, size: int, gpu: torch.device) -> None:
    tensor = torch.zeros(COUNT, device=gpu)
    dist.all_reduce(tensor, async_op=True).wait()
    tensor.sum()  # loading a kernel waits for the device
    torch.cuda.synchronize()
    hold_up(LONG)
    tensor.fill_(rank + 1)
    started = time.perf_counter()
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    result = tensor.sum()
    took = time.perf_counter() - started
    behind = not torch.cuda.current_stream().query()
    assert result.item() == COUNT * total(size, 1)
    assert behind, f"the host was {took:.3f} s in issue and wait, and the stream was through by then"


def test_a_reader_on_a_side_stream(rank: int, size: int, gpu: torch.device) -> None:
    side = torch.cuda.Stream()
    for i in range(ROUNDS if size == 1 else 50):
        hold_up(BRIEF // 10)
        tensor = torch.full((COUNT,), float(rank + i), device=gpu)
        work = dist.all_reduce(tensor, async_op=True)
        with torch.cuda.stream(side):
            work.wait()
            assert tensor.sum().item() == COUNT * total(size, i)


def test_three_streams_and_an_allocator_under_pressure(rank: int, size: int, gpu: torch.device) -> None:
    maker, reader = torch.cuda.Stream(), torch.cuda.Stream()
    results, expected = [], []
    for i in range(ROUNDS if size == 1 else 50):
        with torch.cuda.stream(maker):
            hold_up(BRIEF // 20)
            tensor = torch.full((COUNT,), float(rank + i), device=gpu)
        torch.cuda.current_stream().wait_stream(maker)
        work = dist.all_reduce(tensor, async_op=True)
        with torch.cuda.stream(reader):
            work.wait()
            results.append(tensor.sum())
        del tensor, work
        with torch.cuda.stream(maker):  # would get the memory at once, were it free
            maker.wait_stream(reader)
            torch.full((COUNT,), -1.0, device=gpu)
        expected.append(COUNT * total(size, i))
    torch.cuda.synchronize()
    assert [result.item() for result in results] == expected


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather_into_tensor", "all_to_all_single", "strided"])
def test_dropped_right_after_issuing(rank: int, size: int, gpu: torch.device, collective: str) -> None:
    outputs = []
    for i in range(ROUNDS if size == 1 else 50):
        hold_up(BRIEF // 20)
        source = torch.full((COUNT // size * size,), float(rank + i), device=gpu)
        if collective == "all_reduce":
            out, work = source, dist.all_reduce(source, async_op=True)
        elif collective == "strided":
            source = source.view(-1, 2)[:, 0]
            out, work = source, dist.all_reduce(source, async_op=True)
        elif collective == "all_to_all_single":
            out = torch.empty_like(source)
            work = dist.all_to_all_single(out, source, async_op=True)
        else:
            out = torch.empty(size, source.numel(), device=gpu)
            work = dist.all_gather_into_tensor(out.view(-1), source, async_op=True)
        del source
        torch.full((COUNT,), -1.0, device=gpu)  # takes the memory, if it was given back
        work.wait()
        outputs.append((out.double().sum(), out.numel(), i))
        del out, work
    per_rank = {"all_reduce": 1, "strided": 1}.get(collective, size)
    for value, numel, i in outputs:
        assert value.item() == numel / per_rank * total(size, i)


def test_synchronous_is_on_the_current_stream(rank: int, size: int, gpu: torch.device) -> None:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for i in range(20):
            hold_up(BRIEF // 10)
            tensor = torch.full((COUNT,), float(rank + i), device=gpu)
            dist.all_reduce(tensor)
            assert tensor.sum().item() == COUNT * total(size, i)


def test_wait_with_a_timeout_blocks_the_host(rank: int, size: int, gpu: torch.device) -> None:
    tensor = torch.zeros(COUNT, device=gpu)
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    hold_up(5 * LONG)
    work = dist.all_reduce(tensor, async_op=True)
    with pytest.raises(hi.CollectiveTimeout, match=r"all_reduce \(seq \d+\)"):
        work.wait(timedelta(milliseconds=20))
    assert not work.is_completed()
    work.wait(timedelta(seconds=60))
    assert work.is_completed()
    assert work.is_success()


def test_a_synchronous_call_is_watched_by_its_own_timeout(rank: int, size: int, gpu: torch.device) -> None:
    group: Any = dist.group.WORLD
    tensor = torch.full((COUNT,), float(rank), device=gpu)
    dist.all_reduce(torch.zeros_like(tensor))
    torch.cuda.synchronize()
    opts = AllreduceOptions()
    opts.asyncOp, opts.timeout = False, timedelta(seconds=600)
    hold_up(5 * LONG)
    work = group.allreduce([tensor], opts)
    assert (work.completion.op, work.completion.timeout_s) == ("all_reduce", 600.0)
    assert work.completion in group.watched_works()
    work.wait()  # orders this stream, and no host
    assert not work.is_completed()
    assert tensor.sum().item() == COUNT * total(size)


def test_futures_chain(rank: int, size: int, gpu: torch.device) -> None:
    for i in range(20):
        hold_up(BRIEF // 5)
        tensor = torch.full((COUNT,), float(rank + i), device=gpu)
        work = dist.all_reduce(tensor, async_op=True)

        def double(done: Any) -> torch.Tensor:
            value: torch.Tensor = done.value()[0]
            return value * 2

        chained = work.get_future().then(double).then(lambda done: done.value() + 1)
        result = chained.wait()
        assert result.sum().item() == COUNT * (2 * total(size, i) + 1)
        assert work.get_future().wait()[0] is tensor


def test_tensors_go_when_the_device_is_through(gpu: torch.device, size: int) -> None:
    tensor = torch.ones(COUNT, device=gpu)
    alive = weakref.ref(tensor)
    dist.all_reduce(tensor, async_op=True)
    del tensor
    hi.wait_for_all_pending_works(timeout_s=30)
    gc.collect()
    assert alive() is None


def test_a_waited_tensor_is_free_at_once(gpu: torch.device) -> None:
    hold_up(LONG)
    tensor = torch.ones(COUNT, device=gpu)
    alive = weakref.ref(tensor)
    dist.all_reduce(tensor, async_op=True).wait()
    del tensor
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("context", [False, True], ids=["outside", "inside"])
def test_unwaited_collectives_keep_memory_flat(
    gpu: torch.device, size: int, monkeypatch: pytest.MonkeyPatch, context: bool
) -> None:
    dist.all_reduce(torch.ones(1, device=gpu))
    # ranks that share a GPU take milliseconds for each: fewer, and a bound that they reach
    count, numel = (50_000, 1 << 20) if size == 1 else (300, 1 << 18)
    reserved: list[int] = []
    if size > 1:
        monkeypatch.setattr(dist.group.WORLD._nccl, "_max_pending", 32)  # type: ignore[union-attr]

    def run() -> None:
        for i in range(count):
            dist.all_reduce(torch.empty(numel, device=gpu), async_op=True)
            if i in {count // 5, count - 1}:
                reserved.append(torch.cuda.memory_reserved())

    if context:
        with hi.allow_inflight_collective_as_graph_input():
            run()
    else:
        run()
    hi.wait_for_all_pending_works(timeout_s=60)
    assert reserved[1] <= reserved[0] * 1.1 + (64 << 20), reserved


def test_barrier_comes_after_the_current_streams_work(rank: int, size: int, gpu: torch.device) -> None:
    tensor = torch.zeros(4, device=gpu)
    dist.all_reduce(tensor)
    hold_up(LONG)
    dist.barrier()
    assert torch.cuda.current_stream().query()


def test_cpu_and_cuda_tensors_in_one_group(rank: int, size: int, gpu: torch.device) -> None:
    on_gpu, on_cpu = torch.ones(3, device=gpu), torch.ones(3)
    works = [dist.all_reduce(t, async_op=True) for t in (on_gpu, on_cpu, on_gpu, on_cpu)]
    for work in works:
        work.wait()
    assert on_gpu.tolist() == on_cpu.tolist() == [size**2] * 3
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, rank)
    assert objects == list(range(size))
    with pytest.raises(hi.UnsupportedError, match=r"all_gather_into_tensor: output is on cpu; this call moves cuda:\d"):
        dist.all_gather_into_tensor(torch.empty(3 * size), on_gpu)
    with pytest.raises(hi.UnsupportedError, match=r"all_gather: outputs.* is on cuda:\d; this call moves CPU"):
        dist.all_gather([on_gpu] * size, on_cpu)


def test_a_group_that_fails_is_closed(rank: int, size: int, gpu: torch.device) -> None:
    group: Any = dist.group.WORLD
    good, other = torch.ones(3, device=gpu), torch.ones(3, device=gpu)
    with pytest.raises(hi.UnsupportedError):
        group.allreduce_coalesced([good, torch.ones(3, dtype=torch.float8_e4m3fn, device=gpu), other])
    dist.all_reduce(good)
    assert good.tolist() == [size] * 3
    group._start_coalescing(gpu)
    first = group.broadcast([good], 0)
    with pytest.raises(hi.InvalidArgumentError):
        group.allgather_into_tensor_coalesced([good], [other]) if size > 1 else group.broadcast([good], 5)
    group.broadcast([other], 0)
    group._end_coalescing(gpu).wait()
    first.wait()
    dist.all_reduce(other)
    assert other.tolist() == [size] * 3


def test_capture_and_replay(rank: int, size: int, gpu: torch.device) -> None:
    tensor, result = torch.zeros(COUNT, device=gpu), torch.zeros(COUNT, device=gpu)
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dist.all_reduce(tensor)
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        result.copy_(tensor * 2)
    for i in range(3):
        tensor.fill_(rank + i)
        graph.replay()
        torch.cuda.synchronize()
        assert result[0].item() == 2 * size * total(size, i)
    work.wait()
    assert not dist.group.WORLD.pending_works()  # type: ignore[union-attr]
    del graph
    torch.cuda.synchronize()
