"""A rank makes CUDA contexts on the GPUs that it uses and on no other: each costs some hundred MiB of its memory.

Jobs of their own, since this process has a context: run it without a launcher.
"""

from __future__ import annotations

import os

import pytest
import torch

from hpc_inflight.testing.launch import run_ranks

PROGRAM = """
import ctypes, sys, time
import torch, torch.distributed as dist
import hpc_inflight as hi

def has_context(index):
    driver, device = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    flags, active = ctypes.c_uint(), ctypes.c_int()
    assert driver.cuInit(0) == 0
    assert driver.cuDeviceGet(ctypes.byref(device), index) == 0
    assert driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active)) == 0
    return bool(active.value)

def use(device):
    group = dist.new_group([0, 1])
    for is_async in (False, True):
        work = dist.all_reduce(torch.ones(4, device=device), group=group, async_op=is_async)
        if work is not None:
            work.wait()
    time.sleep(1)  # 20 looks of the watchdog
    hi.wait_for_all_pending_works(60)
    dist.barrier(group)
    dist.destroy_process_group(group)

world = hi.init()
mine = world.device.index
assert mine is not None
use("cpu")
assert not torch.cuda.is_initialized()
count = torch.cuda.device_count()
found = [index for index in range(count) if has_context(index)]
assert found == [], f"CPU tensors: contexts on {found}"
torch.cuda.set_device(mine)
use(world.device)
found = [index for index in range(count) if has_context(index)]
assert found == [mine], f"tensors on {mine}: contexts on {found}"
hi.finalize()
sys.stdout.write(f"rank {world.rank} done\\n")
"""


def test_contexts_are_made_on_the_device_in_use_alone() -> None:
    if "OMPI_COMM_WORLD_SIZE" in os.environ or "PMI_SIZE" in os.environ:
        pytest.skip("starts a job of its own; run it without a launcher")
    run = run_ranks(2, ["-m", "mpi4py", "-c", PROGRAM], env={"HPC_INFLIGHT_WATCHDOG_S": "0.05"})
    assert run.returncode == 0, run
    assert run.stdout.count(" done") == 2
    # with one GPU, or a mask for each rank, the second half shows only that the first can fail
    assert torch.cuda.device_count() >= 1
