"""One rank fails in one way, while the others wait for it in one way; started by test_drills.py, here and in tests/gpu.

usage: drill.py CASE WAITER GROUP

Who waits: the "main thread", in its own call or, on a GPU, in a synchronize; a "worker", or "nobody"; or the "caller" of
a synchronous call on a GPU. The subgroup has all ranks but the last. HPC_INFLIGHT_DRILL_DEVICE is cpu, cuda, or fake:
the NCCL communicator over the stand-in for CUDA and NCCL; with "fake, blocking" what is launched blocks, as NCCL does
when it connects. HPC_INFLIGHT_DRILL_TIMEOUT_S is how long an operation may take.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import hpc_inflight as hi

DEVICE = os.environ["HPC_INFLIGHT_DRILL_DEVICE"]
TIMEOUT_S = float(os.environ["HPC_INFLIGHT_DRILL_TIMEOUT_S"])
LONG = timedelta(seconds=600)  # for what is not drilled: how long a start takes
LIMIT = timedelta(seconds=TIMEOUT_S)
BAD = 1  # the rank that fails

case, waiter, which = sys.argv[1:]


def synchronize() -> None:
    """Block the host for the device."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    elif DEVICE == "fake":
        event = runtime.event_create()
        runtime.event_record(event, runtime.current_stream(-1))
        while not runtime.event_done(event):
            time.sleep(1e-3)


def use_nccl(group: Any, *, connect: bool) -> None:
    """Have a group use NCCL, with its communicator made, or not before the group's first operation."""
    if DEVICE.startswith("fake"):

        def open_nccl(_call: str, _tensor: torch.Tensor) -> Any:
            return group._nccl or group._open_nccl("drill", -1)

        group._open = open_nccl
    if connect:
        tensor = torch.ones(1, device=world.device)  # kept until then: the stand-in has no allocator of its own
        dist.all_reduce(tensor, group=group)
        synchronize()


def fail() -> None:
    """Do what the case says, on the rank that fails."""
    global tensor  # noqa: PLW0603  # the shape differs
    Path(os.environ["HPC_INFLIGHT_DRILL_MARK"]).touch()
    match case:
        case "raises":
            raise ValueError("boom")
        case "exits":
            sys.exit(3)
        case "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "is stuck in Python" | "does not come to new_group" | "does not come to connect":
            stuck_in_python()
        case "is stuck in another collective":
            if DEVICE == "cpu":
                dist.barrier(other)
            else:
                dist.all_reduce(tensor, group=other)
                synchronize()
        case "differs in shape":
            tensor = torch.ones(9)
        case "is slow":
            time.sleep(TIMEOUT_S / 2)
        case "issues another operation":
            dist.broadcast(tensor, 0, group=group)
            synchronize()
            stuck_in_python()


def stuck_in_python() -> None:
    """Be busy with something else for longer than the test lasts."""
    time.sleep(1000)


world = hi.init(device=None if DEVICE == "cuda" else "cpu", timeout_s=LONG.total_seconds())
everyone = list(range(world.world_size))
members = everyone if which == "world" else everyone[:-1]
member = world.rank in members
default: Any = dist.group.WORLD
group: Any = default if which == "world" else dist.new_group(members, timeout=LONG)
other: Any = dist.new_group(everyone, timeout=LONG)  # of the last rank, too, and so no copy of the group
if DEVICE == "cuda":
    torch.cuda.set_device(world.device)
if DEVICE.startswith("fake"):
    from hpc_inflight import _cupy
    from hpc_inflight.testing.fake_nccl import FakeRuntime

    _cupy._runtime = runtime = FakeRuntime()  # type: ignore[assignment]
    if DEVICE == "fake":
        runtime.use_stream(runtime.new_stream(-1))  # else the current one is the calling thread
if DEVICE != "cpu":
    use_nccl(other, connect=True)
    if member:
        use_nccl(group, connect=case != "does not come to connect")
tensor = torch.ones(4, device=world.device)
synchronize()
other.barrier().wait()
if member:
    group.set_timeout(LIMIT)

if world.rank == BAD:
    fail()
if case == "does not come to new_group" and member:
    dist.new_group(members, timeout=LIMIT)
if member:
    op = dist.ReduceOp.MAX if case == "differs in op" and world.rank == BAD else dist.ReduceOp.SUM
    if waiter == "caller" or (waiter == "main thread" and DEVICE == "cpu"):
        dist.all_reduce(tensor, op=op, group=group)
        synchronize()
    elif waiter != "nobody":
        work = dist.all_reduce(tensor, op=op, group=group, async_op=True)
        assert work is not None  # for mypy
        work.wait()
        synchronize()
    else:
        dist.all_reduce(tensor, op=op, group=group, async_op=True)
        if case != "is slow":
            time.sleep(1000)
elif case != "is slow":
    time.sleep(1000)
default.set_timeout(LONG)
dist.barrier()
sys.stdout.write(f"rank {world.rank} done\n")
hi.finalize()
