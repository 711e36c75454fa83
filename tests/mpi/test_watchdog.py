"""The watchdog costs next to nothing while nothing fails, and a drain says what it waits for."""

from __future__ import annotations

import re
import statistics
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllreduceOptions

import hpc_inflight as hi
from hpc_inflight import _mpi
from hpc_inflight.communicators.mpi import MPICommunicator
from hpc_inflight.testing import wait_until
from hpc_inflight.watchdog import watchdog


@pytest.mark.mpi(min_size=2)
def test_a_look_at_64_groups_takes_less_than_a_hundredth_of_the_time_between_two(size: int) -> None:
    groups = [dist.new_group(range(size)) for _ in range(64)]
    for group in groups:
        dist.all_reduce(torch.ones(4), group=group)
    threads = [thread for thread in threading.enumerate() if "watchdog" in thread.name]
    assert [thread.daemon for thread in threads] == [True]  # one, whatever the number of groups
    watchdog.stop()
    took = []
    try:
        for _ in range(51):
            work = dist.all_reduce(torch.ones(1 << 16), group=groups[0], async_op=True)
            began = time.thread_time()  # of this thread alone, whatever else the machine does
            watchdog.look()
            took.append(time.thread_time() - began)
            assert work is not None
            work.wait()
    finally:
        watchdog.start()
    assert statistics.median(took) < watchdog.period_s / 100
    for group in groups:
        dist.destroy_process_group(group)


@pytest.mark.mpi(min_size=2)
def test_a_drain_that_gives_up_names_group_rank_operation_shape_and_age(rank: int, size: int) -> None:
    group = dist.new_group(range(size))
    dist.barrier()
    if rank == 0:
        works = [
            dist.all_reduce(torch.ones(3, 5, dtype=torch.float64), group=group, async_op=True),
            dist.irecv(torch.ones(7), size - 1, group=group),
        ]
        said = rf" pending after 0\.1 s on group \w+ \(rank 0 of {size}\), the oldest "
        with pytest.raises(hi.DrainTimeout, match="wait_for_all_pending_works: 2" + said) as caught:
            hi.wait_for_all_pending_works(0.1)
        assert re.search(
            r"all_reduce \(seq 1\), shape \(3, 5\), torch\.float64, issued \d+\.\d s ago", str(caught.value)
        )
    dist.barrier()  # of the default group
    if rank:
        works = [dist.all_reduce(torch.ones(3, 5, dtype=torch.float64), group=group, async_op=True)]
        if rank == size - 1:
            works.append(dist.isend(torch.ones(7), 0, group=group))
    for work in works:
        assert work is not None
        work.wait()
    dist.destroy_process_group(group)


@pytest.mark.mpi(min_size=2)
def test_a_synchronous_call_is_watched_by_its_own_timeout(rank: int, size: int) -> None:
    group: Any = dist.new_group(range(size), timeout=timedelta(seconds=1200))
    opts = AllreduceOptions()
    opts.asyncOp, opts.timeout = False, timedelta(seconds=600)
    tensor = torch.ones(4)
    caller = threading.Thread(target=lambda: group.allreduce([tensor], opts).wait())
    if rank == 0:
        caller.start()
        wait_until(lambda: bool(group.watched_works()))
        assert [(work.op, work.seq, work.timeout_s) for work in group.watched_works()] == [("all_reduce", 1, 600.0)]
    dist.barrier()
    if rank:
        caller.start()
    caller.join(60)
    assert tensor.tolist() == [float(size)] * 4
    dist.destroy_process_group(group)


def test_an_interrupt_in_a_call_leaves_nothing_pending() -> None:
    comm = MPICommunicator(_mpi.mpi().COMM_SELF.Dup(), "alone")

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        comm.enqueue("all_reduce", [interrupted], (), 5.0)
    assert comm.pending_works() == []
    comm.shutdown(5.0)
