"""What happens to works, buffers and groups when somebody gives up, drops something, or calls back."""

from __future__ import annotations

import copy
import gc
import os
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as funcol
from torch.distributed import distributed_c10d as c10d

import hpc_inflight as hi
from hpc_inflight import _gate
from hpc_inflight import config as config_module
from hpc_inflight._torch_compat import registry_size
from hpc_inflight.testing import wait_until


def group_of(size: int, timeout_s: float | None = None) -> Any:
    group: Any = dist.new_group(list(range(size)))
    if timeout_s is not None:  # not earlier: it holds for making the group, too
        group.set_timeout(timedelta(seconds=timeout_s))
    return group


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("ending", ["abort", "destroy"])
def test_a_pending_receive_keeps_its_buffer_beyond_its_group(rank: int, size: int, ending: str) -> None:
    group = group_of(size, timeout_s=0.3)
    if rank == 1:
        group.recv([torch.empty(300_000)], 0, 0)
        if ending == "abort":
            group.abort()
            with pytest.raises(hi.GroupDestroyedError):
                group.allreduce([torch.ones(1)])
            group.shutdown()
        else:
            with pytest.raises(hi.DrainTimeout, match="destroying group"):
                group.shutdown()
    dist.barrier()
    if rank == 0:
        group.send([torch.ones(300_000)], 1, 0)
        group.abort()
    del group
    gc.collect()
    for _ in range(20):  # what MPI may still write to must not be in use for anything else
        torch.full((300_000,), 7.0)
    dist.barrier()


@pytest.mark.mpi(min_size=2)
def test_abort_fails_everything_that_is_pending(rank: int, size: int) -> None:
    group = group_of(size)
    if rank == 1:
        works = [group.allreduce([torch.ones(2)]) for _ in range(3)]  # rank 0 never comes
        wait_until(group._comm._worker._executing.locked)  # the first one runs
        works.append(group.recv([torch.ones(2)], 0, 0))
        group.abort(hi.CommunicatorAborted("it failed"))
        for work in works:
            assert work.is_completed()
            with pytest.raises(hi.CommunicatorAborted, match="it failed"):
                work.wait()
        with pytest.raises(hi.CommunicatorAborted, match="it failed"):
            group.allreduce([torch.ones(2)])
        with pytest.raises(hi.CommunicatorAborted, match="it failed"):
            hi.wait_for_all_pending_works(timeout_s=1)  # so that no capture begins, either
    dist.barrier()
    if rank != 1:
        group.allreduce([torch.ones(2)]).wait()  # what ran when the group was aborted goes through
        group.abort()
    group.shutdown()
    hi.wait_for_all_pending_works(timeout_s=1)


def test_after_a_timed_out_barrier_the_group_refuses(rank: int, size: int) -> None:
    if size == 1:
        pytest.skip("one rank waits for nobody")
    group = group_of(size, timeout_s=0.3)
    if rank == 0:
        with pytest.raises(hi.CollectiveTimeout):
            dist.barrier(group)
        with pytest.raises(hi.GroupDestroyedError, match=r"is out of step since a deadline passed .*make a new one"):
            dist.barrier(group)
        with pytest.raises(hi.GroupDestroyedError, match="is out of step"):
            dist.all_reduce(torch.ones(1), group=group, async_op=True)
    dist.barrier()
    dist.destroy_process_group(group)


def test_monitored_barrier_behind_what_is_enqueued(rank: int, size: int) -> None:
    group = group_of(size)
    tensor = torch.full((500_000,), 1.0)
    for _ in range(3):
        group.allreduce([tensor], _max())
    group.monitored_barrier(timedelta(seconds=60))
    dist.destroy_process_group(group)


def _max() -> Any:
    opts = dist.AllreduceOptions()
    opts.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
    return opts


def test_a_callback_may_issue_and_wait(rank: int, size: int) -> None:
    first, second = torch.full((1000,), float(rank)), torch.full((10,), 1.0)

    def again(_: Any) -> torch.Tensor:
        dist.all_reduce(second, async_op=True).get_future().wait()
        dist.all_reduce(second)
        return second

    chained = dist.all_reduce(first, async_op=True).get_future().then(again)
    later = torch.full((10,), 3.0)
    dist.all_reduce(later, async_op=True).wait()
    assert chained.wait().tolist() == [float(size**2)] * 10
    assert later.tolist() == [3.0 * size] * 10


@pytest.mark.mpi(min_size=2)
def test_a_callback_may_issue_on_another_group_beside_a_drain_that_waits_for_it(rank: int, size: int) -> None:
    group, other = group_of(size), group_of(size)
    first, second, issued = torch.ones(4), torch.full((4,), float(rank)), threading.Event()

    def issue(_: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():  # where the work was not complete before
            wait_until(lambda: _gate.gate.closed)
        dist.all_reduce(second, group=other, async_op=True)
        issued.set()

    if rank == size - 1:
        time.sleep(0.3)
    dist.all_reduce(first, group=group, async_op=True).get_future().then(issue)
    hi.wait_for_all_pending_works(30)
    assert issued.is_set()
    assert second.tolist() == [float(sum(range(size)))] * 4  # waited for, too
    for made in (group, other):
        dist.destroy_process_group(made)


def test_a_callback_may_issue_when_the_queue_is_full(rank: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPC_INFLIGHT_MAX_PENDING", "2")
    config_module.config.cache_clear()
    group = group_of(size)
    extra = torch.ones(4)
    futures = []
    for _ in range(20):
        work = dist.all_reduce(torch.ones(20_000), group=group, async_op=True)
        futures.append(work.get_future().then(lambda _: dist.all_reduce(extra, op=dist.ReduceOp.MAX, group=group)))
    for future in futures:
        future.wait()
    assert extra.tolist() == [1.0] * 4
    dist.destroy_process_group(group)
    monkeypatch.delenv("HPC_INFLIGHT_MAX_PENDING")
    config_module.config.cache_clear()


def test_a_coalesced_work_can_be_registered(rank: int, size: int) -> None:
    tensor = torch.full((3,), float(rank))
    with c10d._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        if rank == 0:
            time.sleep(0.2)
        dist.broadcast(tensor, 0)
    hi.register_work(tensor, manager.works[0])
    assert hi.wait_tensor(tensor).tolist() == [0.0] * 3
    assert manager.works[0].is_success()
    assert manager.works[0].get_future().wait()[0].tolist() == [0.0] * 3
    assert registry_size() == 0


def test_an_asynchronous_failure_belongs_to_the_wait(rank: int, size: int) -> None:
    # the mismatch is seen when it runs, on every rank, also in a world of one
    tensor = torch.sparse_coo_tensor(torch.tensor([[0]]), torch.ones(1), (2 + rank % 2,), check_invariants=True)
    work = dist.all_reduce(tensor, async_op=True)
    if size == 1:
        work.wait()
        return
    for _ in range(3):
        with pytest.raises(hi.InvalidArgumentError, match="sparse tensors of one shape") as caught:
            work.wait()
        depth = 0
        trace = caught.value.__traceback__
        while trace is not None:
            depth, trace = depth + 1, trace.tb_next
        assert depth == 2  # this frame and wait's: none of the worker's, none of an earlier wait
    assert not work.is_success()


def test_tensors_that_wrap_others(rank: int, size: int) -> None:
    waiting = funcol.all_reduce(torch.full((4,), rank + 1.0), "sum", c10d._get_default_group())
    assert type(waiting) is not torch.Tensor
    output = torch.empty(4 * size)
    dist.all_gather_into_tensor(output, waiting)
    assert output.tolist() == [size * (size + 1) / 2] * (4 * size)
    again = funcol.all_reduce(torch.full((4,), rank + 1.0), "sum", c10d._get_default_group())
    dist.all_reduce(again)
    assert again.tolist() == [size * size * (size + 1) / 2] * 4
    fake = torch._subclasses.FakeTensorMode().from_tensor(torch.ones(2))
    with pytest.raises(hi.UnsupportedError, match="FakeTensor, which has no memory of its own"):
        dist.all_reduce(fake)


def test_options_can_be_copied() -> None:

    options = c10d._get_default_group()._get_backend(torch.device("cpu")).options
    assert copy.deepcopy(options)._timeout == options._timeout


def test_a_forked_child_that_finalizes_leaves_the_parent_alone(rank: int, size: int) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            hi.finalize()
        except hi.GroupDestroyedError:
            os._exit(7)
        os._exit(8)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [float(size)] * 3
    c10d._get_default_group().get_group_store().set(f"after-fork{rank}", "1")
    assert c10d._get_default_group().get_group_store().get(f"after-fork{size - 1}") == b"1"
