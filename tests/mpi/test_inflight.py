"""A compiled region waits for what eager code issued; outside the context nothing is registered or kept."""

from __future__ import annotations

import contextlib
import gc
import threading
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

    from hpc_inflight.testing.late import Late

contexts = pytest.mark.parametrize(
    "context",
    [hi.allow_inflight_collective_as_graph_input, allow_inflight_collective_as_graph_input_ctx],
    ids=["ours", "torch's"],
)
backends = pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])


def compiled(function: Callable[..., Any], backend: str) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend=backend)


@contexts
@backends
def test_compiled_region_waits(
    rank: int, size: int, context: Any, backend: str, device: torch.device, late: Late
) -> None:
    def over_arch(received: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        return hi.wait_tensor(received) * 2 + dense

    region = compiled(over_arch, backend)
    dense = torch.ones(size, 3, device=device)
    region(torch.zeros(size, 3, device=device), dense)  # compile first, so that compiling does not hide a missed wait
    for _ in range(2):
        output = torch.full((size, 3), -1.0, device=device)
        before = work_registry.counts()
        dist.barrier()
        with context():
            work = late.all_to_all(output)
        assert registry_size() == 1
        assert [w.op for w in hi.inflight()] == ["all_to_all_single"]
        result = region(output, dense)
        assert result.tolist() == [[21.0 + 2 * sender] * 3 for sender in range(size)]
        assert registry_size() == 0
        after = work_registry.counts()
        assert after.waited_by_tensor - before.waited_by_tensor == 1
        assert after.unwaited == before.unwaited
        assert work.wait() is True


@backends
def test_gradients_pass_through_the_wait(size: int, backend: str, device: torch.device, late: Late) -> None:
    def region(received: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (hi.wait_tensor(received) * weight).sum()

    run = compiled(region, backend)
    output = torch.full((size, 3), -1.0, requires_grad=True, device=device)
    weight = torch.full((size, 3), 2.0, requires_grad=True, device=device)
    with hi.allow_inflight_collective_as_graph_input(), torch.no_grad():
        late.all_to_all(output)
    run(output, weight).backward()
    assert output.grad is not None
    assert output.grad.tolist() == [[2.0] * 3] * size
    assert weight.grad is not None
    assert weight.grad.tolist() == late.arrived(output).tolist()


@contexts
def test_outside_the_context_nothing_is_registered(rank: int, size: int, context: Any, device: torch.device) -> None:
    before = work_registry.counts()
    tensor = torch.ones(3, device=device)
    dist.all_reduce(tensor, async_op=True).wait()
    with context():
        dist.all_reduce(tensor)  # synchronous: waited by c10d itself
    dist.all_reduce(tensor, async_op=True).wait()
    assert registry_size() == 0
    assert work_registry.counts() == before


def test_counts_as_torchs_own_tests_expect(device: torch.device) -> None:
    # torch's test_unwaited: two un-waited collectives on one live tensor are two entries, complete or not
    tensor = torch.ones(8, device=device)
    with hi.allow_inflight_collective_as_graph_input():
        assert registry_size() == 0
        dist.all_reduce(tensor, async_op=True)
        assert registry_size() == 1
        dist.all_reduce(tensor, async_op=True)
        assert registry_size() == 2
    for _ in range(100):
        dist.all_reduce(torch.ones(8, device=device), async_op=True)
    assert registry_size() == 2
    hi.wait_tensor(tensor)
    assert registry_size() == 0


def test_wait_by_work_removes(device: torch.device) -> None:
    with hi.allow_inflight_collective_as_graph_input():
        tensor = torch.ones(8, device=device)
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


def test_one_work_with_many_outputs(rank: int, size: int, device: torch.device) -> None:
    outputs = [torch.empty(2, device=device) for _ in range(size)]
    with hi.allow_inflight_collective_as_graph_input():
        dist.all_gather(outputs, torch.full((2,), float(rank), device=device), async_op=True)
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
def test_views_find_the_work(
    size: int, view: Callable[[torch.Tensor], torch.Tensor], device: torch.device, late: Late
) -> None:
    output = torch.full((size, 3), -1.0, device=device)
    with hi.allow_inflight_collective_as_graph_input():
        late.all_to_all(output)
    hi.wait_tensor(view(output))
    assert output.tolist() == late.arrived(output).tolist()
    assert registry_size() == 0


def test_a_clone_does_not(size: int, device: torch.device, late: Late) -> None:
    output = torch.zeros(size, 3, device=device)
    with hi.allow_inflight_collective_as_graph_input():
        work = late.all_to_all(output)
    hi.wait_tensor(output.clone())
    assert registry_size() == 1
    work.wait()


def test_all_spellings_of_wait_tensor(device: torch.device) -> None:
    for spelling in (torch.ops._c10d_functional.wait_tensor, torch.ops.c10d_functional.wait_tensor, hi.wait_tensor):
        tensor = torch.ones(4, device=device)
        with hi.allow_inflight_collective_as_graph_input():
            dist.all_reduce(tensor, async_op=True)
        spelling(tensor)
        assert registry_size() == 0


def test_functional_collectives_under_the_context(rank: int, size: int, device: torch.device) -> None:
    with hi.allow_inflight_collective_as_graph_input():
        result = funcol.all_reduce(torch.full((4,), rank + 1.0, device=device), "sum", c10d._get_default_group())
        assert result.tolist() == [size * (size + 1) / 2] * 4
    assert registry_size() == 0


def test_issue_in_one_thread_and_wait_in_another(size: int, device: torch.device, late: Late) -> None:
    # the context is per thread: what this thread issues meanwhile is not registered
    output = torch.full((size, 3), -1.0, device=device)
    issued = threading.Event()

    def issue() -> None:
        with hi.allow_inflight_collective_as_graph_input():
            late.all_to_all(output)
        issued.set()

    thread = threading.Thread(target=issue)
    thread.start()
    issued.wait()
    dist.all_reduce(torch.ones(2, device=device), async_op=True)
    # torch counts per thread; ours is the whole process
    assert [w.op for w in hi.inflight()] == ["all_to_all_single"]
    hi.wait_tensor(output)
    assert output.tolist() == late.arrived(output).tolist()
    assert hi.inflight() == []
    thread.join()


def test_register_work_by_hand(size: int, device: torch.device, late: Late) -> None:
    output = torch.full((size, 3), -1.0, device=device)
    work = late.all_to_all(output)
    assert registry_size() == 0
    hi.register_work(output, work)
    hi.wait_tensor(output)
    assert output.tolist() == late.arrived(output).tolist()


def test_register_work_refuses_what_has_no_storage(device: torch.device) -> None:
    work = dist.all_reduce(torch.ones(2, device=device), async_op=True)
    with pytest.raises(hi.InvalidArgumentError, match="no storage to find the work by"):
        hi.register_work(torch.eye(3).to_sparse(), work)
    work.wait()


def test_a_foreign_work_can_be_registered(device: torch.device) -> None:
    class Other(torch.distributed.Work):
        waits = 0

        def wait(self, _timeout: object = None) -> bool:
            Other.waits += 1
            return True

        def is_completed(self) -> bool:
            return False

    tensor = torch.ones(3, device=device)
    hi.register_work(tensor, Other())
    assert [(w.op, w.shape, w.completed) for w in hi.inflight()] == [("Other", (3,), False)]
    hi.wait_tensor(tensor)
    assert Other.waits == 1


def test_waited_works_and_tensors_are_gone_without_the_garbage_collector(device: torch.device) -> None:
    gc.disable()
    try:
        alive = []
        for _ in range(2000):
            tensor = torch.ones(16, device=device)
            with hi.allow_inflight_collective_as_graph_input():
                work = dist.all_reduce(tensor, async_op=True)
            alive += [weakref.ref(tensor), weakref.ref(work)]
            hi.wait_tensor(tensor)
            del tensor, work
        hi.wait_for_all_pending_works(timeout_s=60)
        assert sum(ref() is not None for ref in alive) == 0
    finally:
        gc.enable()


def test_forgotten_works_go_when_nobody_could_wait(rank: int, size: int, device: torch.device) -> None:
    before = work_registry.counts()
    with hi.allow_inflight_collective_as_graph_input():
        for _ in range(500):
            dist.all_reduce(torch.ones(1000, device=device), async_op=True)
        hi.wait_for_all_pending_works(timeout_s=60)
        # two entries are looked at for each that is added: by now the earlier ones are gone
        for _ in range(300):
            dist.all_reduce(torch.ones(1000, device=device), async_op=True)
    assert registry_size() <= 310
    hi.wait_for_all_pending_works(timeout_s=60)
    work_registry.sweep()
    assert registry_size() == 0
    after = work_registry.counts()
    assert (after.registered - before.registered, after.unwaited - before.unwaited) == (800, 800)


def test_reused_addresses_never_find_a_foreign_work(rank: int, size: int, device: torch.device) -> None:
    before = work_registry.counts()
    for _ in range(1000):
        with hi.allow_inflight_collective_as_graph_input():
            dist.all_reduce(torch.ones(64, device=device), async_op=True)
        hi.wait_tensor(torch.ones(64, device=device))  # likely at the address that was just dropped
    hi.wait_for_all_pending_works(timeout_s=60)
    work_registry.sweep()
    assert work_registry.counts().waited_by_tensor == before.waited_by_tensor


def test_the_context_nests_and_restores(rank: int, device: torch.device) -> None:
    tensor = torch.ones(1, device=device)

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
