"""One rank fails in one way, while the others wait for it in one way; started by test_drills.py.

usage: drill.py CASE WAITER GROUP
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import hpc_inflight as hi

TIMEOUT_S = 3.0
LIMIT = timedelta(seconds=TIMEOUT_S)  # torch gives a new group half an hour, whatever the default group has
BAD = 1  # the rank that fails

case, waiter, which = sys.argv[1:]
world = hi.init(device="cpu")
default: Any = dist.group.WORLD
group = default if which == "world" else dist.new_group([0, 1], timeout=LIMIT)
other = dist.new_group([1, 2] if which == "subgroup" else [0, 1], timeout=timedelta(seconds=600))
dist.barrier()
default.set_timeout(LIMIT)  # not before: how long a start takes is not what is drilled
tensor = torch.ones(4)
member = which == "world" or world.rank in {0, 1}


def fail() -> None:
    """Do what the case says, on the rank that fails."""
    global tensor  # noqa: PLW0603  # the shape differs
    match case:
        case "raises":
            raise ValueError("boom")
        case "exits":
            sys.exit(3)
        case "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "is stuck in Python":
            stuck_in_python()
        case "is stuck in another collective":
            dist.barrier(other)
        case "differs in shape":
            tensor = torch.ones(9)
        case "is slow":
            time.sleep(TIMEOUT_S / 2)
        case "does not come to new_group":
            stuck_in_python()


def stuck_in_python() -> None:
    """Be busy with something else for longer than the test lasts."""
    time.sleep(1000)


if world.rank == BAD:
    fail()
if case == "does not come to new_group" and member:
    dist.new_group([0, 1], timeout=LIMIT)
if member:
    op = dist.ReduceOp.MAX if case == "differs in op" and world.rank == BAD else dist.ReduceOp.SUM
    if waiter == "main thread":
        dist.all_reduce(tensor, op=op, group=group)
    elif waiter == "worker":
        work = dist.all_reduce(tensor, op=op, group=group, async_op=True)
        assert work is not None  # for mypy
        work.wait()
    else:
        dist.all_reduce(tensor, op=op, group=group, async_op=True)
        if case != "is slow":
            time.sleep(1000)
elif case != "is slow":
    time.sleep(1000)
default.set_timeout(timedelta(seconds=600))
dist.barrier()
sys.stdout.write(f"rank {world.rank} done\n")
hi.finalize()
