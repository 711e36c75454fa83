from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import hpc_inflight as hi
from hpc_inflight import _cupy

MIB_8 = 2 * 1024 * 1024  # float32 elements


def test_a_ring_in_which_all_send_first(rank: int, size: int, gpu: torch.device) -> None:
    if size == 1:
        pytest.skip("needs two ranks")
    for i in range(3):
        received = torch.empty(MIB_8, device=gpu)
        sent = dist.isend(torch.full((MIB_8,), float(rank + i), device=gpu), (rank + 1) % size)
        dist.recv(received, (rank - 1) % size)
        assert sent is not None
        sent.wait()
        assert received.unique().tolist() == [(rank - 1) % size + i]


def test_a_ring_after_one_of_empty_tensors(rank: int, size: int, gpu: torch.device) -> None:
    """Of an empty message NCCL is told nothing, so the next one is its first, which waits for the peer."""
    if size == 1:
        pytest.skip("needs two ranks")
    group = dist.new_group(list(range(size)))
    for count in (0, MIB_8, 0, MIB_8):
        received = torch.empty(count, device=gpu)
        sent = dist.isend(torch.full((count,), float(rank), device=gpu), (rank + 1) % size, group=group)
        dist.recv(received, (rank - 1) % size, group=group)
        assert sent is not None
        sent.wait()
        assert received.unique().tolist() == [(rank - 1) % size] * bool(count)
    dist.destroy_process_group(group)


def test_no_stream_is_given_out_twice(gpu: torch.device) -> None:
    runtime = _cupy.runtime()
    made = [runtime.new_stream(gpu.index) for _ in range(80)]
    torchs = [torch.cuda.Stream(gpu, priority=-1) for _ in range(80)]
    own = {runtime.raw_stream(stream) for stream in made}
    assert len(own) == len(made)
    assert not own & {stream.cuda_stream for stream in torchs}
    with torch.cuda.stream(made[0]):
        assert torch.cuda.current_stream(gpu).cuda_stream == runtime.raw_stream(made[0])
        assert torch.ones(4, device=gpu).sum().item() == 4
    runtime.streams.setdefault(gpu.index, []).extend(made)


def test_a_ring_in_which_all_receive_first(rank: int, size: int, gpu: torch.device) -> None:
    if size == 1:
        pytest.skip("needs two ranks")
    works, tensors = [], []
    for _ in range(5):
        tensors.append(torch.empty(1000, device=gpu))
        works.append(dist.irecv(tensors[-1], (rank - 1) % size))
    sent = [torch.full((1000,), float(rank + i), device=gpu) for i in range(5)]
    works += [dist.isend(tensor, (rank + 1) % size) for tensor in sent]
    for work in works:
        assert work is not None
        work.wait()
    assert [t.unique().tolist() for t in tensors] == [[(rank - 1) % size + i] for i in range(5)]


def test_batch_isend_irecv(rank: int, size: int, gpu: torch.device) -> None:
    received = torch.empty(MIB_8, device=gpu)
    sent = torch.full((MIB_8,), float(rank), device=gpu)
    operations = [
        dist.P2POp(dist.isend, sent, (rank + 1) % size),
        dist.P2POp(dist.irecv, received, (rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert received.unique().tolist() == [(rank - 1) % size]


def test_a_block_of_messages_and_collectives(rank: int, size: int, gpu: torch.device) -> None:
    received, strided = torch.empty(MIB_8, device=gpu), torch.zeros(2, 1000, device=gpu).t()
    flag = torch.full((3,), float(rank), device=gpu)
    with c10d._coalescing_manager(dist.group.WORLD, gpu, async_ops=True) as manager:
        dist.isend(torch.full((MIB_8,), float(rank), device=gpu), (rank + 1) % size)
        dist.irecv(received, (rank - 1) % size)
        dist.isend(torch.full((2000,), float(rank), device=gpu), (rank + 1) % size)
        early: Any = dist.irecv(strided, (rank - 1) % size)
        with pytest.raises(hi.InflightError, match="not issued before its block of coalesced calls ends"):
            early.wait()
        dist.broadcast(flag, 0)
    manager.wait()
    early.wait()
    assert received.unique().tolist() == strided.unique().tolist() == [(rank - 1) % size]
    assert flag.tolist() == [0.0] * 3


def test_a_future_of_the_first_message(rank: int, size: int, gpu: torch.device) -> None:
    if size == 1:
        pytest.skip("needs two ranks")
    group: Any = dist.new_group(range(size))
    received = torch.empty(1000, device=gpu)
    work: Any = dist.irecv(received, (rank - 1) % size, group)
    future = work.get_future().then(lambda done: done.value()[0] + 1)
    sent = dist.isend(torch.full((1000,), float(rank), device=gpu), (rank + 1) % size, group)
    assert future.wait().unique().tolist() == [(rank - 1) % size + 1]
    assert sent is not None
    sent.wait()
    torch.cuda.synchronize()
    dist.destroy_process_group(group)


def test_what_nccl_cannot(gpu: torch.device, size: int) -> None:
    group: Any = dist.group.WORLD
    with pytest.raises(hi.UnsupportedError, match="cannot receive from any rank"):
        group.recv_anysource([torch.empty(1, device=gpu)], 0)
    with pytest.raises(hi.InvalidArgumentError, match=f"peer rank {size} is not in group"):
        group.send([torch.empty(1, device=gpu)], size, 0)
