from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.distributed as dist

import hpc_inflight as hi

pytestmark = pytest.mark.mpi(min_size=2)
MIB_8 = 2 * 1024 * 1024  # float32 elements: far past any eager protocol, so that sending needs the receiver


def test_ring_where_all_send_first(rank: int, size: int) -> None:
    received = torch.empty(MIB_8)
    work = dist.isend(torch.full((MIB_8,), float(rank)), (rank + 1) % size)
    dist.recv(received, (rank - 1) % size)
    assert work is not None
    work.wait()
    assert received.unique().tolist() == [(rank - 1) % size]


def test_batch_isend_irecv(rank: int, size: int) -> None:
    received = torch.empty(1000)
    ops = [
        dist.P2POp(dist.isend, torch.full((1000,), float(rank)), (rank + 1) % size),
        dist.P2POp(dist.irecv, received, (rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert received.unique().tolist() == [(rank - 1) % size]


def test_recv_from_any_source(rank: int, size: int) -> None:
    if rank == 0:
        seen = {}
        for _ in range(size - 1):
            tensor = torch.empty(4)
            sender = dist.recv(tensor)
            seen[sender] = tensor.tolist()
        assert seen == {sender: [10.0 * sender] * 4 for sender in range(1, size)}
    else:
        dist.send(torch.full((4,), 10.0 * rank), 0)
    dist.barrier()


def test_tags_keep_messages_apart(rank: int, size: int) -> None:
    if rank == 0:
        works = [dist.isend(torch.full((2,), float(tag)), 1, tag=tag) for tag in (7, 3)]
        for work in works:
            assert work is not None
            work.wait()
    elif rank == 1:
        for tag in (3, 7):
            tensor = torch.empty(2)
            dist.recv(tensor, 0, tag=tag)
            assert tensor.tolist() == [float(tag)] * 2
    dist.barrier()


def test_into_a_strided_tensor(rank: int, size: int) -> None:
    if rank == 0:
        dist.send(torch.arange(12.0).view(3, 4).t(), 1)
    elif rank == 1:
        table = torch.zeros(3, 8)
        dist.recv(table[:, ::2].t(), 0)
        assert table[:, ::2].tolist() == torch.arange(12.0).view(3, 4).tolist()
        assert table[:, 1::2].sum() == 0
    dist.barrier()


def test_dropped_send_completes_and_lets_go(rank: int, size: int) -> None:
    tensor = torch.full((MIB_8,), float(rank))
    alive = weakref.ref(tensor)
    dist.isend(tensor, (rank + 1) % size)
    del tensor
    received = torch.empty(MIB_8)
    dist.recv(received, (rank - 1) % size)
    assert received[0] == (rank - 1) % size
    dist.barrier()
    hi.wait_for_all_pending_works(timeout_s=60)
    gc.collect()
    assert alive() is None


def test_future_of_a_receive_needs_no_wait(rank: int, size: int) -> None:
    received = torch.empty(MIB_8)
    work = dist.irecv(received, (rank - 1) % size)
    assert work is not None
    future = work.get_future().then(lambda done: done.value()[0].sum().item())
    sent = dist.isend(torch.full((MIB_8,), float(rank)), (rank + 1) % size)
    assert future.wait() == MIB_8 * ((rank - 1) % size)
    assert sent is not None
    sent.wait()
