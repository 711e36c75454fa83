from __future__ import annotations

import os
import statistics
import sys
import textwrap
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

import hpc_inflight as hi
from hpc_inflight.testing.launch import run_ranks

if TYPE_CHECKING:
    from pathlib import Path


def test_create_and_destroy_many_times(rank: int, size: int, gpu: torch.device) -> None:
    cycles = max(8, int(os.environ.get("HPC_INFLIGHT_TEST_CYCLES", "20")))  # half a second each; some for a median
    tensor = torch.ones(1000, device=gpu)
    free = []
    for i in range(cycles):
        group = dist.new_group(range(size))
        tensor.fill_(1)
        dist.all_reduce(tensor, group=group, async_op=bool(i % 2))
        dist.destroy_process_group(group)
        assert tensor[0].item() == size
        dist.barrier()  # a rank that shares the device has freed its part, too
        free.append(torch.cuda.mem_get_info()[0])
    # by two groups, one of each kind; of the whole device, on which other processes may begin and end
    lost = [before - after for before, after in zip(free, free[2:], strict=False)]
    assert statistics.median(lost) < 4 << 20, f"device memory is lost with every group: {lost}"


def test_destroyed_twice_and_in_any_order(rank: int, size: int, gpu: torch.device) -> None:
    groups: list[Any] = [dist.new_group(range(size)) for _ in range(3)]
    tensor = torch.ones(4, device=gpu)
    for group in groups:
        dist.all_reduce(tensor, group=group)
    for group in (groups[1], groups[0], groups[2]):
        group.shutdown()
        group.shutdown()
        with pytest.raises(hi.GroupDestroyedError):
            group.allreduce([tensor])
    for group in groups:
        dist.destroy_process_group(group)
    torch.cuda.synchronize()


def test_abort(gpu: torch.device, size: int) -> None:
    group: Any = dist.new_group(range(size))
    tensor = torch.ones(4, device=gpu)
    dist.all_reduce(tensor, group=group)
    torch.cuda.synchronize()
    group.abort()
    with pytest.raises(hi.GroupDestroyedError):
        group.allreduce([tensor])
    dist.destroy_process_group(group)


def test_a_tensor_of_no_device_of_ours(rank: int, size: int, gpu: torch.device) -> None:
    group: Any = dist.new_group(range(size), timeout=timedelta(seconds=30))
    with pytest.raises(hi.NCCLUnavailableError, match=r"rank 0 on .*; CPU tensors of the group are not affected"):
        group._open_nccl("test", 77)
    with pytest.raises(hi.NCCLUnavailableError, match="rank 0 on"):
        group.allreduce([torch.ones(1, device=gpu)])
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=group)
    assert tensor.item() == size
    dist.destroy_process_group(group)


def test_two_ranks_on_one_gpu_are_refused_by_name(
    rank: int, size: int, gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if size == 1 or torch.cuda.device_count() > 1:
        pytest.skip("needs ranks that share a GPU")
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE")
    group: Any = dist.new_group(range(size), timeout=timedelta(seconds=30))
    with pytest.raises(hi.NCCLUnavailableError, match=r"ranks 0(, | and )1.* on .* (both|all) use GPU-[0-9a-f]{8}-"):
        dist.all_reduce(torch.ones(1, device=gpu), group=group)
    dist.destroy_process_group(group)


def test_connected_at_once(rank: int, size: int, gpu: torch.device) -> None:
    group: Any = dist.new_group(range(size))
    group.eager_connect_single_device(gpu)
    assert group._nccl is not None
    dist.destroy_process_group(group)


PROGRAMS = {
    "never destroyed": "pass",
    "unwaited": "dist.all_reduce(t, async_op=True)",
    "destroyed": "hi.finalize()",
    "message without a receiver": "dist.isend(t, (w.rank + 1) % w.world_size) if w.world_size > 1 else None",
}


def alone(size: int) -> None:
    if size > 1 or "OMPI_COMM_WORLD_SIZE" in os.environ:
        pytest.skip("starts a job of its own; run it without a launcher")


def test_a_peer_is_gone_while_destroying(size: int, tmp_path: Path) -> None:
    alone(size)
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent("""
            import os, time, torch, torch.distributed as dist, hpc_inflight as hi
            w = hi.init(timeout_s=10, eager=True)
            t = torch.ones(1000, device=w.device)
            dist.all_reduce(t)
            torch.cuda.synchronize()
            dist.barrier()
            if w.rank == 1:
                os._exit(3)
            dist.all_reduce(t, async_op=True)
            dist.destroy_process_group()
            time.sleep(60)  # whoever is left ends with the job
            """),
        encoding="utf-8",
    )
    started = time.time()
    result = run_ranks(2, ["-m", "mpi4py", str(program)])
    assert result.returncode != 0
    assert time.time() - started < 60


@pytest.mark.parametrize("end", PROGRAMS)
def test_the_process_ends(size: int, end: str, tmp_path: Path) -> None:
    alone(size)
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent(f"""
            import time, torch, torch.distributed as dist, hpc_inflight as hi
            w = hi.init(timeout_s=60, eager=True)
            assert dist.group.WORLD._nccl is not None
            t = torch.ones(1000, device=w.device)
            dist.all_reduce(t)
            torch.cuda.synchronize()
            {PROGRAMS[end]}
            print("end", time.time(), flush=True)
            """),
        encoding="utf-8",
    )
    started = time.time()
    result = run_ranks(2, ["-m", "mpi4py", str(program)])
    assert result.returncode == 0, result
    ended = [float(line.split()[1]) for line in result.stdout.splitlines() if line.startswith("end")]
    assert len(ended) == 2
    sys.stdout.write(f"{end}: the job was over {time.time() - max(ended):.1f} s after its program\n")  # for -rP
    assert time.time() - max(ended) < 15
    assert started < min(ended)
