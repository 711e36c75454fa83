"""The watchdog costs next to nothing while nothing fails."""

from __future__ import annotations

import statistics
import time

import pytest
import torch
import torch.distributed as dist

from hpc_inflight.watchdog import watchdog


@pytest.mark.mpi(min_size=2)
def test_a_look_at_64_groups_takes_less_than_a_hundredth_of_the_time_between_two(size: int) -> None:
    groups = [dist.new_group(range(size)) for _ in range(64)]
    for group in groups:
        dist.all_reduce(torch.ones(4), group=group)
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
