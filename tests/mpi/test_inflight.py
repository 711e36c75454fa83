"""A compiled region waits for what eager code issued; outside the context nothing is registered or kept."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as funcol
from torch.distributed import distributed_c10d as c10d
from torch.distributed._functional_collectives import allow_inflight_collective_as_graph_input_ctx

import hpc_inflight as hi
from hpc_inflight import work_registry
from hpc_inflight._torch_compat import registry_size

if TYPE_CHECKING:
    from collections.abc import Callable

LATE_S = 0.3

contexts = pytest.mark.parametrize(
    "context",
    [hi.allow_inflight_collective_as_graph_input, allow_inflight_collective_as_graph_input_ctx],
    ids=["ours", "torch's"],
)
backends = pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])


def issue_late(rank: int, size: int, output: torch.Tensor) -> Any:
    """All-to-all in which rank 0's data is late on every other rank, so that a missed wait is a wrong number."""
    if rank == 0:
        time.sleep(LATE_S)
    return dist.all_to_all_single(output, torch.full((size, 3), 10.0 + rank), async_op=True)


def exchanged(size: int) -> list[list[float]]:
    return [[10.0 + sender] * 3 for sender in range(size)]


def compiled(function: Callable[..., Any], backend: str) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend=backend)


@contexts
@backends
@pytest.mark.timeout(240)
def test_compiled_region_waits(rank: int, size: int, context: Any, backend: str) -> None:
    def over_arch(received: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        return hi.wait_tensor(received) * 2 + dense

    region = compiled(over_arch, backend)
    dense = torch.ones(size, 3)
    region(torch.zeros(size, 3), dense)  # compile first, so that compiling does not hide a missed wait
    for _ in range(2):
        output = torch.full((size, 3), -1.0)
        before = work_registry.counts()
        dist.barrier()
        with context():
            work = issue_late(rank, size, output)
        assert registry_size() == 1
        assert [w.op for w in hi.inflight()] == ["all_to_all_single"]
        result = region(output, dense)
        assert result.tolist() == [[21.0 + 2 * sender] * 3 for sender in range(size)]
        assert registry_size() == 0
        after = work_registry.counts()
        assert after.waited_by_tensor - before.waited_by_tensor == 1
        assert after.unwaited == before.unwaited
        assert work.wait() is True
    if rank and size > 1:
        assert after.wait_s - before.wait_s > LATE_S / 2


@backends
@pytest.mark.timeout(240)
def test_gradients_pass_through_the_wait(rank: int, size: int, backend: str) -> None:
    def region(received: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (hi.wait_tensor(received) * weight).sum()

    run = compiled(region, backend)
    output = torch.full((size, 3), -1.0, requires_grad=True)
    weight = torch.full((size, 3), 2.0, requires_grad=True)
    with hi.allow_inflight_collective_as_graph_input(), torch.no_grad():
        issue_late(rank, size, output)
    run(output, weight).backward()
    assert output.grad is not None
    assert output.grad.tolist() == [[2.0] * 3] * size
    assert weight.grad is not None
    assert weight.grad.tolist() == exchanged(size)


@contexts
def test_outside_the_context_nothing_is_registered(rank: int, size: int, context: Any) -> None:
    before = work_registry.counts()
    tensor = torch.ones(3)
    dist.all_reduce(tensor, async_op=True).wait()
    with context():
        dist.all_reduce(tensor)  # synchronous: waited by c10d itself
    dist.all_reduce(tensor, async_op=True).wait()
    assert registry_size() == 0
    assert work_registry.counts() == before


def test_counts_as_torchs_own_tests_expect() -> None:
    # torch's test_unwaited: two un-waited collectives on one live tensor are two entries, complete or not
    tensor = torch.ones(8)
    with hi.allow_inflight_collective_as_graph_input():
        assert registry_size() == 0
        dist.all_reduce(tensor, async_op=True)
        assert registry_size() == 1
        dist.all_reduce(tensor, async_op=True)
        assert registry_size() == 2
    for _ in range(100):
        dist.all_reduce(torch.ones(8), async_op=True)
    assert registry_size() == 2
    hi.wait_tensor(tensor)
    assert registry_size() == 0


def test_wait_by_work_removes() -> None:
    with hi.allow_inflight_collective_as_graph_input():
        tensor = torch.ones(8)
        work = dist.all_reduce(tensor, async_op=True)
        assert registry_size() == 1
        before = work_registry.counts()
        work.wait()
        assert registry_size() == 0
        after = work_registry.counts()
        assert (after.waited_by_work - before.waited_by_work, after.waited_by_tensor - before.waited_by_tensor) == (
            1,
            0,
        )
        first, second = (dist.all_reduce(tensor, async_op=True) for _ in range(2))
        first.wait()
        assert [w.op for w in hi.inflight()] == ["all_reduce"]
        second.wait()
        assert registry_size() == 0


def test_one_work_with_many_outputs(rank: int, size: int) -> None:
    outputs = [torch.empty(2) for _ in range(size)]
    with hi.allow_inflight_collective_as_graph_input():
        dist.all_gather(outputs, torch.full((2,), float(rank)), async_op=True)
    assert registry_size() == size
    hi.wait_tensor(outputs[-1])
    assert registry_size() == 0
    assert outputs[0].tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t[1:2],
        lambda t: t.detach(),
        lambda t: t.view(-1),
        lambda t: t.as_strided((1,), (1,), 2),
        lambda t: t.data,
    ],
    ids=["slice", "detach", "view", "as_strided", "data"],
)
def test_views_find_the_work(rank: int, size: int, view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    output = torch.full((size, 3), -1.0)
    with hi.allow_inflight_collective_as_graph_input():
        issue_late(rank, size, output)
    hi.wait_tensor(view(output))
    assert output.tolist() == exchanged(size)
    assert registry_size() == 0


def test_a_clone_does_not(rank: int, size: int) -> None:
    output = torch.zeros(size, 3)
    with hi.allow_inflight_collective_as_graph_input():
        work = issue_late(rank, size, output)
    hi.wait_tensor(output.clone())
    assert registry_size() == 1
    work.wait()


def test_all_spellings_of_wait_tensor() -> None:
    for spelling in (torch.ops._c10d_functional.wait_tensor, torch.ops.c10d_functional.wait_tensor, hi.wait_tensor):
        tensor = torch.ones(4)
        with hi.allow_inflight_collective_as_graph_input():
            dist.all_reduce(tensor, async_op=True)
        spelling(tensor)
        assert registry_size() == 0


def test_functional_collectives_under_the_context(rank: int, size: int) -> None:
    with hi.allow_inflight_collective_as_graph_input():
        result = funcol.all_reduce(torch.full((4,), rank + 1.0), "sum", c10d._get_default_group())
        assert result.tolist() == [size * (size + 1) / 2] * 4
    assert registry_size() == 0


def test_issue_in_one_thread_and_wait_in_another(rank: int, size: int) -> None:
    # the context is per thread: what this thread issues meanwhile is not registered
    output = torch.full((size, 3), -1.0)
    issued = threading.Event()

    def issue() -> None:
        with hi.allow_inflight_collective_as_graph_input():
            issue_late(rank, size, output)
        issued.set()

    thread = threading.Thread(target=issue)
    thread.start()
    issued.wait()
    dist.all_reduce(torch.ones(2), async_op=True)
    # torch counts per thread; ours is the whole process
    assert [w.op for w in hi.inflight()] == ["all_to_all_single"]
    hi.wait_tensor(output)
    assert output.tolist() == exchanged(size)
    assert hi.inflight() == []
    thread.join()


def test_register_work_by_hand(rank: int, size: int) -> None:
    output = torch.full((size, 3), -1.0)
    work = issue_late(rank, size, output)
    assert registry_size() == 0
    hi.register_work(output, work)
    hi.wait_tensor(output)
    assert output.tolist() == exchanged(size)


def test_register_work_refuses_what_has_no_storage() -> None:
    work = dist.all_reduce(torch.ones(2), async_op=True)
    with pytest.raises(hi.InvalidArgumentError, match="no storage to find the work by"):
        hi.register_work(torch.eye(3).to_sparse(), work)
    work.wait()


def test_a_foreign_work_can_be_registered() -> None:
    class Other(torch.distributed.Work):
        waits = 0

        def wait(self, _timeout: object = None) -> bool:
            Other.waits += 1
            return True

        def is_completed(self) -> bool:
            return False

    tensor = torch.ones(3)
    hi.register_work(tensor, Other())
    assert [(w.op, w.shape, w.completed) for w in hi.inflight()] == [("Other", (3,), False)]
    hi.wait_tensor(tensor)
    assert Other.waits == 1


def test_waited_works_and_tensors_are_gone_without_the_garbage_collector() -> None:
    gc.disable()
    try:
        alive = []
        for _ in range(2000):
            tensor = torch.ones(16)
            with hi.allow_inflight_collective_as_graph_input():
                work = dist.all_reduce(tensor, async_op=True)
            alive += [weakref.ref(tensor), weakref.ref(work)]
            hi.wait_tensor(tensor)
            del tensor, work
        hi.wait_for_all_pending_works(timeout_s=10)
        assert sum(ref() is not None for ref in alive) == 0
    finally:
        gc.enable()


def test_forgotten_works_go_when_nobody_could_wait(rank: int, size: int) -> None:
    before = work_registry.counts()
    with hi.allow_inflight_collective_as_graph_input():
        for _ in range(500):
            dist.all_reduce(torch.ones(1000), async_op=True)
        hi.wait_for_all_pending_works(timeout_s=10)
        # two entries are looked at for each that is added: by now the earlier ones are gone
        for _ in range(300):
            dist.all_reduce(torch.ones(1000), async_op=True)
    assert registry_size() <= 310
    hi.wait_for_all_pending_works(timeout_s=10)
    work_registry.sweep()
    assert registry_size() == 0
    after = work_registry.counts()
    assert (after.registered - before.registered, after.unwaited - before.unwaited) == (800, 800)


def test_reused_addresses_never_find_a_foreign_work(rank: int, size: int) -> None:
    before = work_registry.counts()
    for _ in range(1000):
        with hi.allow_inflight_collective_as_graph_input():
            dist.all_reduce(torch.ones(64), async_op=True)
        hi.wait_tensor(torch.ones(64))  # likely at the address that was just dropped
    hi.wait_for_all_pending_works(timeout_s=10)
    work_registry.sweep()
    assert work_registry.counts().waited_by_tensor == before.waited_by_tensor


def test_the_context_nests_and_restores(rank: int) -> None:
    tensor = torch.ones(1)

    def registered() -> bool:
        dist.all_reduce(tensor, async_op=True)
        found = registry_size() > 0
        hi.wait_tensor(tensor)
        return found

    with contextlib.suppress(KeyError), hi.allow_inflight_collective_as_graph_input():
        with hi.allow_inflight_collective_as_graph_input():
            assert registered()
        assert registered()
        raise KeyError
    assert not registered()
    dist.barrier()
