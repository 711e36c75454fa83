"""Jobs that the watchdog has to leave alone, or to end by the right name; started by test_watchdog_jobs.py.

usage: watched.py CASE
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

import hpc_inflight as hi

LONG_S = 100.0  # for what the job does not come to the end of
TIMEOUT_S = {
    "a rank does not come": 2.0,
    "a callback waits": 2.0,
    "a callback hangs": 2.0,
    "two threads": 2.0,
}


def issue() -> Any:
    """Issue a collective that takes all ranks."""
    return dist.all_reduce(torch.ones(4), async_op=True)


case = sys.argv[1]
world = hi.init(device="cpu", timeout_s=TIMEOUT_S.get(case, 60.0))
first, last = world.rank == 0, world.rank == world.world_size - 1
dist.barrier()
match case:
    case "a rank does not come":  # and the others are inside of their calls
        if last:
            time.sleep(LONG_S)
        dist.all_reduce(torch.ones(4))
    case "a callback waits":  # for what nobody else issues
        if first:
            issue().get_future().then(lambda _: dist.broadcast(torch.ones(4), 1, async_op=True).wait()).wait()
        else:
            time.sleep(0.5)
            issue().wait()
            time.sleep(LONG_S)
    case "a callback hangs":
        if first:
            issue().get_future().then(lambda _: time.sleep(LONG_S))
        time.sleep(LONG_S)
    case "two threads":
        if first:
            threading.Thread(target=lambda: dist.all_reduce(torch.ones(4)), daemon=True).start()
            time.sleep(1)
            dist.broadcast(torch.ones(4), 0)
        time.sleep(LONG_S)
    case "a rank is late for a reduction":  # the others have ended by then, or destroyed the group
        if first:
            time.sleep(5)
        dist.reduce(torch.ones(4), 1)
        if last:
            dist.destroy_process_group()
    case "a rank has ended beside a receive":
        if first:
            received = dist.irecv(torch.ones(4), 1)
            issue().wait()
    case "a program asks what failed":
        work = dist.all_reduce(torch.ones(4 + world.rank), async_op=True)
        while not work.is_completed():
            time.sleep(0.01)
        sys.stdout.write(f"asked: {type(work.exception()).__name__}\n")
        time.sleep(8)
sys.stdout.write("done\n")
