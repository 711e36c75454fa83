"""CUDA graph captures beside work in flight: drained first, nothing asked meanwhile, no mark left by failures."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

import hpc_inflight as hi
from hpc_inflight import _cupy, _gate, capture, group_set
from hpc_inflight.launch_env import clean_env
from hpc_inflight.work import Completion

if TYPE_CHECKING:
    from collections.abc import Callable

# what torch warns of where nothing is captured, as with one rank, or on purpose in these tests
pytestmark = [
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning"),
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning"),
]

COUNT = 1 << 16
ROUNDS = int(os.environ.get("HPC_INFLIGHT_TEST_CAPTURES", "20"))


def total(size: int, plus: int = 0) -> float:
    return float(sum(r + plus for r in range(size)))


@pytest.fixture
def tensor(gpu: torch.device) -> torch.Tensor:
    made = torch.zeros(COUNT, device=gpu)
    dist.all_reduce(made)  # the communicator is there before any capture
    torch.cuda.synchronize()
    return made


@pytest.mark.timeout(500)
def test_works_in_flight_then_a_capture_then_replays(rank: int, size: int, tensor: torch.Tensor) -> None:
    """The program of pytorch #104487, as often as HPC_INFLIGHT_TEST_CAPTURES says."""
    side = torch.cuda.Stream()
    flying = [torch.zeros(COUNT, device=tensor.device) for _ in range(30)]
    failures = 0
    for i in range(ROUNDS):
        for other in flying:
            other.fill_(rank)
            dist.all_reduce(other, async_op=True)
        graph = torch.cuda.CUDAGraph()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            graph.capture_begin()
            try:
                dist.all_reduce(tensor)
                tensor.add_(1)
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(side)
        for _ in range(2):
            tensor.fill_(rank + i)
            graph.replay()
        torch.cuda.synchronize()
        failures += tensor[0].item() != total(size, i) + 1 or any(t[-1].item() != total(size) for t in flying[::10])
        del graph
    assert failures == 0


# What a watchdog without our gate does. In a process of its own: torch keeps its stream, and a mark in its allocator.
KILLED = """
import os, threading
import torch

tensor, event = torch.zeros(4, device="cuda"), torch.cuda.Event()
event.record()
graph = torch.cuda.CUDAGraph()
try:
    with torch.cuda.graph(graph):
        asker = threading.Thread(target=event.query)
        asker.start()
        asker.join()
        tensor.add_(1)
except RuntimeError as error:
    print(error, flush=True)
    os._exit(0)
"""


def test_an_event_query_by_another_thread_kills_a_capture_and_the_watchdog_makes_none(
    rank: int, size: int, tensor: torch.Tensor
) -> None:
    if rank == 0:  # this half shows that the other can fail
        killed = subprocess.run(
            [sys.executable, "-c", KILLED],
            env=clean_env(os.environ),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert "captur" in killed.stdout, killed.stderr
    work: Any = dist.all_reduce(tensor, async_op=True)
    looked = threading.Event()

    def look() -> None:  # as the watchdog does, on a work that may be in flight
        for group in group_set.groups():
            group.pending_works()
        assert isinstance(work.completion, Completion)
        work.completion.poll()
        looked.set()

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        thread = threading.Thread(target=look)
        thread.start()
        assert looked.wait(60)
        tensor.fill_(rank)
        dist.all_reduce(tensor)
    thread.join()
    work.wait()
    graph.replay()
    torch.cuda.synchronize()
    assert tensor[0].item() == total(size)


def in_thread(before: Callable[[], object], during: Callable[[], object]) -> Callable[[], None]:
    """Start a thread that runs ``before`` at once; what is returned has it run ``during``, and waits for its end."""
    ready, go = threading.Event(), threading.Event()

    def run() -> None:
        before()
        ready.set()
        go.wait(60)
        during()

    thread = threading.Thread(target=run)
    thread.start()
    assert ready.wait(60)

    def go_on() -> None:
        go.set()
        thread.join()

    return go_on


def test_a_thread_that_connects_or_ends_nccl_kills_no_capture(
    rank: int, size: int, gpu: torch.device, tensor: torch.Tensor
) -> None:
    event = torch.cuda.Event()
    event.record()
    ask = in_thread(lambda: _cupy.runtime().settle_device(gpu.index), event.query)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ask()
        tensor.fill_(rank)
        dist.all_reduce(tensor)
    graph.replay()
    torch.cuda.synchronize()
    assert tensor[0].item() == total(size)


def test_a_thread_that_issues_beside_a_capture_does_not_kill_it(
    rank: int, size: int, gpu: torch.device, tensor: torch.Tensor
) -> None:
    """While a graph holds its communicator, NCCL asks about an event of its own at each launch."""
    others = [torch.full((COUNT,), float(rank + i), device=gpu) for i in range(2)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    first = torch.cuda.CUDAGraph()
    with torch.cuda.graph(first):
        dist.all_reduce(tensor)

    def issue() -> None:
        with torch.cuda.stream(side):
            work = dist.all_reduce(others[0], async_op=True)
            dist.all_reduce(others[1])
            assert work is not None
            work.wait()

    issue_in_thread = in_thread(lambda: torch.cuda.set_device(gpu), issue)
    second = torch.cuda.CUDAGraph()
    with torch.cuda.graph(second):
        issue_in_thread()
        tensor.add_(1)
    torch.cuda.synchronize()
    assert [other[0].item() for other in others] == [total(size), total(size, 1)]
    tensor.fill_(rank)
    first.replay()
    second.replay()
    torch.cuda.synchronize()
    assert tensor[0].item() == total(size) + 1


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_modes_and_replays_with_new_values(rank: int, size: int, tensor: torch.Tensor, mode: str) -> None:
    gathered = torch.zeros(size * COUNT, device=tensor.device)
    dist.all_gather_into_tensor(gathered, tensor)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with hi.graph(graph, capture_error_mode=mode):
        work: Any = dist.all_gather_into_tensor(gathered, tensor, async_op=True)
        work.wait()
        dist.barrier()
        gathered.mul_(2)
    for i in range(3):
        tensor.fill_(rank + i)
        graph.replay()
        torch.cuda.synchronize()
        assert gathered[::COUNT].tolist() == [2.0 * (r + i) for r in range(size)]
    assert work.is_completed()
    work.wait()  # outside: nothing to wait for


def test_an_all_reduce_alone(rank: int, size: int, tensor: torch.Tensor) -> None:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dist.all_reduce(tensor)
    tensor.fill_(rank + 1)
    graph.replay()
    torch.cuda.synchronize()
    assert tensor[0].item() == total(size, 1)


@pytest.mark.mpi(min_size=2)
def test_messages_in_a_capture(rank: int, size: int, tensor: torch.Tensor) -> None:
    received, to, of = torch.zeros_like(tensor), (rank + 1) % size, (rank - 1) % size

    def ring() -> None:
        works = [dist.isend(tensor, to), dist.irecv(received, of)]
        for work in works:
            assert work is not None
            work.wait()

    with pytest.raises(hi.CaptureError, match="not connected"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        ring()
    torch.cuda.synchronize()
    ring()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ring()
    tensor.fill_(rank + 7)
    graph.replay()
    torch.cuda.synchronize()
    assert received[0].item() == of + 7


def test_a_group_without_a_communicator_says_what_to_do(rank: int, size: int, tensor: torch.Tensor) -> None:
    group = dist.new_group(list(range(size)))
    with (
        pytest.raises(hi.InvalidArgumentError, match="issue a collective on a CUDA tensor of the group before"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        dist.all_reduce(tensor, group=group)
    torch.cuda.synchronize()
    dist.all_reduce(tensor, group=group)
    dist.destroy_process_group(group)


def test_work_enqueued_on_the_capturing_group_is_an_error(rank: int, size: int, tensor: torch.Tensor) -> None:
    other = torch.zeros_like(tensor)
    # another thread issues after the drain, and the device is held up: the work cannot be complete
    with pytest.raises(hi.CaptureError, match=r"all_reduce on group \w+: captured while 1 of its operations are enq"):  # noqa: PT012, SIM117
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
            issuer = threading.Thread(target=lambda: dist.all_reduce(other, async_op=True))
            issuer.start()
            issuer.join()
            dist.all_reduce(tensor, async_op=True)
    torch.cuda.synchronize()
    dist.all_reduce(tensor)


def test_a_body_that_raises_leaves_no_mark(rank: int, size: int, tensor: torch.Tensor) -> None:
    with pytest.raises(KeyError, match="body"), torch.cuda.graph(torch.cuda.CUDAGraph()):  # noqa: PT012
        tensor.add_(1)
        raise KeyError("body")
    assert not _gate.capturing()
    torch.cuda.synchronize()
    tensor.fill_(rank)
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    work.wait()
    hi.wait_for_all_pending_works(timeout_s=60)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dist.all_reduce(tensor)
    graph.replay()
    torch.cuda.synchronize()
    assert tensor[0].item() == total(size) * size


def test_two_captures_at_once(rank: int, size: int, tensor: torch.Tensor) -> None:
    graphs = [torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()]
    tensors = [tensor, torch.zeros_like(tensor)]
    groups = [dist.new_group(list(range(size))) for _ in graphs]
    for one, group in zip(tensors, groups, strict=True):
        dist.all_reduce(one, group=group)
    torch.cuda.synchronize()
    meet, errors = threading.Barrier(2), []

    def run(i: int) -> None:
        try:
            torch.cuda.set_device(tensor.device)
            with torch.cuda.stream(torch.cuda.Stream()):
                graphs[i].capture_begin(capture_error_mode="thread_local")
                meet.wait(60)
                tensors[i].add_(1)
                dist.all_reduce(tensors[i], group=groups[i])
                meet.wait(60)
                graphs[i].capture_end()
        except BaseException as error:  # noqa: BLE001  # told by the main thread
            errors.append(error)
            meet.abort()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert errors == []
    assert not _gate.capturing()
    for i, graph in enumerate(graphs):
        tensors[i].fill_(rank + i)
        graph.replay()
        torch.cuda.synchronize()
        assert tensors[i][0].item() == total(size, i + 1)
    del graphs[:], graph
    torch.cuda.synchronize()
    for group in groups:
        dist.destroy_process_group(group)


@pytest.mark.parametrize("end", ["gone", "reset", "kept"])
def test_destroying_after_a_capture(rank: int, size: int, tensor: torch.Tensor, end: str) -> None:
    """A graph that lives longer than its group can be replayed; what ends, and when, meets no later capture."""
    for _ in range(3):
        group: Any = dist.new_group(list(range(size)))
        dist.all_reduce(tensor, group=group)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            dist.all_reduce(tensor, group=group)
        graph.replay()
        torch.cuda.synchronize()
        if end == "reset":
            graph.reset()
        elif end == "gone":
            del graph
        nccl = group._nccl._nccl
        started = time.monotonic()
        dist.destroy_process_group(group)
        assert time.monotonic() - started < 5
        left = id(nccl) in _cupy.runtime()._kept
        assert left == (end == "kept" and size > 1)  # alone, NCCL's communicator has no part in the graph
        if end == "kept":
            tensor.fill_(rank)
            graph.replay()
            torch.cuda.synchronize()
            assert tensor[0].item() == total(size)
            del graph
        after = torch.cuda.CUDAGraph()
        with torch.cuda.graph(after):
            dist.all_reduce(tensor)
        tensor.fill_(rank)
        after.replay()
        torch.cuda.synchronize()
        assert tensor[0].item() == total(size)


def test_graphed_callables(rank: int, size: int, tensor: torch.Tensor) -> None:
    layer = torch.nn.Linear(8, 8).to(tensor.device)
    works = [dist.all_reduce(torch.zeros_like(tensor), async_op=True) for _ in range(10)]
    sample = torch.randn(4, 8, device=tensor.device, requires_grad=True)
    graphed: Any = torch.cuda.make_graphed_callables(layer, (sample,))
    expected = layer(sample)
    assert torch.allclose(graphed(sample), expected)
    for work in works:
        assert work is not None
        work.wait()


def test_what_the_drain_costs(rank: int, size: int, tensor: torch.Tensor) -> None:
    graph: Any = threading.Event()  # anything will do: nothing is captured
    times = []
    for _ in range(2000):
        started = time.perf_counter()
        capture.begin(lambda: None, graph, 10.0, "test")
        times.append(time.perf_counter() - started)
        _gate.capture_ended(graph)
    if rank == 0:
        print(f"\ndrain with nothing pending: median {1e6 * statistics.median(times):.1f} us")  # noqa: T201
    assert statistics.median(times) < 1e-3
