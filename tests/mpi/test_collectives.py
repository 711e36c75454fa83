"""Every collective on float32, async and not; expected values are formulas of rank and size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

# one number that names its sender, place and receiver: 100 * sender + place (+ 10_000 * receiver)
async_op = pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])


def finish(work: Any, is_async: bool) -> None:
    """A synchronous call returns None; an asynchronous one a work whose wait returns True, any number of times."""
    if is_async:
        assert work.wait() is True
        assert work.wait() is True
        assert work.is_completed()
        assert work.is_success()
        assert work.exception() is None
    else:
        assert work is None


def ramp(n: int, start: float = 0.0) -> torch.Tensor:
    return torch.arange(n, dtype=torch.float32) + start


def ranks_sum(size: int) -> float:
    return size * (size - 1) / 2


@async_op
def test_all_reduce(rank: int, size: int, async_op: bool) -> None:
    # sum over ranks of (place + rank) = size * place + size * (size - 1) / 2
    tensor = ramp(1000, rank)
    finish(dist.all_reduce(tensor, async_op=async_op), async_op)
    torch.testing.assert_close(tensor, size * ramp(1000) + ranks_sum(size), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (dist.ReduceOp.SUM, lambda n: n * (n + 1) / 2),
        (dist.ReduceOp.AVG, lambda n: (n + 1) / 2),
        (dist.ReduceOp.PRODUCT, lambda n: {1: 1, 2: 2, 3: 6, 4: 24}[n]),
        (dist.ReduceOp.MIN, lambda _: 1),
        (dist.ReduceOp.MAX, lambda n: n),
    ],
    ids=["SUM", "AVG", "PRODUCT", "MIN", "MAX"],
)
@async_op
def test_operators(rank: int, size: int, op: Any, expected: Any, async_op: bool) -> None:
    tensor = torch.full((7,), rank + 1.0)
    finish(dist.all_reduce(tensor, op=op, async_op=async_op), async_op)
    assert tensor.tolist() == [expected(size)] * 7


@async_op
def test_reduce_leaves_the_other_ranks_alone(rank: int, size: int, async_op: bool) -> None:
    for root in range(size):
        tensor = ramp(5, rank)
        finish(dist.reduce(tensor, root, async_op=async_op), async_op)
        expected = size * ramp(5) + ranks_sum(size) if rank == root else ramp(5, rank)
        assert tensor.tolist() == expected.tolist()


@async_op
def test_broadcast(rank: int, size: int, async_op: bool) -> None:
    for root in range(size):
        tensor = ramp(6, 100.0 * rank)
        finish(dist.broadcast(tensor, root, async_op=async_op), async_op)
        assert tensor.tolist() == ramp(6, 100.0 * root).tolist()


@async_op
def test_all_gather_list(rank: int, size: int, async_op: bool) -> None:
    outputs = [torch.full((2, 3), -1.0) for _ in range(size)]
    finish(dist.all_gather(outputs, ramp(6, 100.0 * rank).view(2, 3), async_op=async_op), async_op)
    for sender, output in enumerate(outputs):
        assert output.tolist() == ramp(6, 100.0 * sender).view(2, 3).tolist()


@async_op
def test_all_gather_uneven(rank: int, size: int, async_op: bool) -> None:
    # rank r contributes r elements: none from rank 0
    outputs = [torch.full((sender,), -1.0) for sender in range(size)]
    finish(dist.all_gather(outputs, ramp(rank, 100.0 * rank), async_op=async_op), async_op)
    for sender, output in enumerate(outputs):
        assert output.tolist() == ramp(sender, 100.0 * sender).tolist()


@async_op
def test_all_gather_into_tensor_stays_in_bounds(rank: int, size: int, async_op: bool) -> None:
    guarded = torch.full((4 * size + 8,), -7.0)
    output = guarded[4 : 4 + 4 * size]
    finish(dist.all_gather_into_tensor(output, ramp(4, 100.0 * rank), async_op=async_op), async_op)
    assert output.tolist() == [100.0 * sender + place for sender in range(size) for place in range(4)]
    assert guarded[:4].tolist() == guarded[-4:].tolist() == [-7.0] * 4


@async_op
def test_gather(rank: int, size: int, async_op: bool) -> None:
    for root in range(size):
        outputs = [torch.full((3,), -1.0) for _ in range(size)] if rank == root else None
        finish(dist.gather(ramp(3, 100.0 * rank), outputs, dst=root, async_op=async_op), async_op)
        for sender, output in enumerate(outputs or []):
            assert output.tolist() == ramp(3, 100.0 * sender).tolist()


@async_op
def test_scatter(rank: int, size: int, async_op: bool) -> None:
    for root in range(size):
        inputs = [ramp(3, 100.0 * root + 10_000.0 * to) for to in range(size)] if rank == root else None
        output = torch.full((3,), -1.0)
        finish(dist.scatter(output, inputs, src=root, async_op=async_op), async_op)
        assert output.tolist() == ramp(3, 100.0 * root + 10_000.0 * rank).tolist()


@async_op
def test_reduce_scatter_list(rank: int, size: int, async_op: bool) -> None:
    # rank i receives i + 1 elements: sum over senders of (place + 100 * sender + 10_000 * i)
    inputs = [ramp(to + 1, 100.0 * rank + 10_000.0 * to) for to in range(size)]
    output = torch.full((rank + 1,), -1.0)
    finish(dist.reduce_scatter(output, inputs, async_op=async_op), async_op)
    expected = size * (ramp(rank + 1) + 10_000.0 * rank) + 100.0 * ranks_sum(size)
    assert output.tolist() == expected.tolist()


@pytest.mark.parametrize("op", [dist.ReduceOp.SUM, dist.ReduceOp.AVG], ids=["SUM", "AVG"])
@async_op
def test_reduce_scatter_tensor_stays_in_bounds(rank: int, size: int, op: Any, async_op: bool) -> None:
    tensor = ramp(3 * size, float(rank))
    guarded = torch.full((3 + 8,), -7.0)
    output = guarded[4:7]
    finish(dist.reduce_scatter_tensor(output, tensor, op=op, async_op=async_op), async_op)
    total = size * ramp(3, 3.0 * rank) + ranks_sum(size)
    assert output.tolist() == (total / size if op == dist.ReduceOp.AVG else total).tolist()
    assert tensor.tolist() == ramp(3 * size, float(rank)).tolist()
    assert guarded[:4].tolist() == guarded[-4:].tolist() == [-7.0] * 4


@async_op
def test_all_to_all_list(rank: int, size: int, async_op: bool) -> None:
    # `sender` sends to + 1 elements to rank `to`
    inputs = [ramp(to + 1, 100.0 * rank + 10_000.0 * to) for to in range(size)]
    outputs = [torch.full((rank + 1,), -1.0) for _ in range(size)]
    finish(dist.all_to_all(outputs, inputs, async_op=async_op), async_op)
    for sender, output in enumerate(outputs):
        assert output.tolist() == ramp(rank + 1, 100.0 * sender + 10_000.0 * rank).tolist()


@async_op
def test_all_to_all_single_even(rank: int, size: int, async_op: bool) -> None:
    tensor = torch.stack([ramp(2, 100.0 * rank + 10_000.0 * to) for to in range(size)])
    output = torch.full((size, 2), -1.0)
    finish(dist.all_to_all_single(output, tensor, async_op=async_op), async_op)
    assert output.tolist() == [ramp(2, 100.0 * s + 10_000.0 * rank).tolist() for s in range(size)]


@async_op
def test_all_to_all_single_uneven_with_zeros(rank: int, size: int, async_op: bool) -> None:
    # sender s sends (s + to) % 3 rows of two to rank `to`, each filled with 10 * s + to
    splits_in = [(rank + to) % 3 for to in range(size)]
    splits_out = [(sender + rank) % 3 for sender in range(size)]
    tensor = torch.cat([torch.full((n, 2), 10.0 * rank + to) for to, n in enumerate(splits_in)])
    output = torch.full((sum(splits_out), 2), -1.0)
    finish(dist.all_to_all_single(output, tensor, splits_out, splits_in, async_op=async_op), async_op)
    expected = [[10.0 * sender + rank] * 2 for sender, n in enumerate(splits_out) for _ in range(n)]
    assert output.tolist() == expected


@async_op
def test_barrier(async_op: bool) -> None:
    finish(dist.barrier(async_op=async_op), async_op)


@async_op
def test_coalescing_manager(rank: int, size: int, async_op: bool) -> None:
    tensors = [torch.full((n,), rank + 1.0) for n in (1, 2, 3)]
    with c10d._coalescing_manager(async_ops=async_op) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    if async_op:
        manager.wait()
    for tensor in tensors:
        assert tensor.unique().tolist() == [size * (size + 1) / 2]


def test_coalescing_with_a_device_is_one_work(rank: int, size: int) -> None:
    outputs = [torch.full((size,), -1.0) for _ in range(3)]
    with c10d._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        for i, output in enumerate(outputs):
            dist.all_to_all_single(output, torch.full((size,), 10.0 * i + rank))
    manager.wait()
    for i, output in enumerate(outputs):
        assert output.tolist() == [10.0 * i + sender for sender in range(size)]


def test_all_gather_coalesced(rank: int, size: int) -> None:
    outputs = [[torch.zeros(2), torch.zeros(3)] for _ in range(size)]
    work = c10d._get_default_group().allgather_coalesced(
        outputs, [torch.full((2,), float(rank)), torch.full((3,), 10.0 + rank)]
    )
    work.wait()
    for sender, (two, three) in enumerate(outputs):
        assert two.tolist() == [float(sender)] * 2
        assert three.tolist() == [10.0 + sender] * 3


def test_non_contiguous_and_leaf_tensors(rank: int, size: int) -> None:
    table = torch.zeros(4, 6)
    column = table[:, 2]
    column += rank + 1
    dist.all_reduce(column)
    assert table[:, 2].tolist() == [size * (size + 1) / 2] * 4
    assert table.sum() == column.sum()
    leaf = torch.full((3,), float(rank), requires_grad=True)
    with torch.no_grad():
        dist.all_reduce(leaf)
    assert leaf.tolist() == [ranks_sum(size)] * 3
    turned = torch.zeros(size, 3).t()
    dist.all_gather_into_tensor(turned, torch.full((3,), float(rank)))
    assert turned.flatten().tolist() == [float(s) for s in range(size) for _ in range(3)]


def test_half_precision_is_rounded_once(size: int) -> None:
    # 1 + 2^-9 is no bfloat16; the sum of the ranks' 1.0 and one 2^-7 is exact up to 256
    tensor = torch.full((5,), 1.0 + 2.0**-7, dtype=torch.bfloat16)
    dist.all_reduce(tensor)
    expected = torch.tensor(size * (1.0 + 2.0**-7)).bfloat16().item()
    assert tensor.tolist() == [expected] * 5


def test_order_of_sync_behind_async(rank: int, size: int) -> None:
    # a synchronous collective issued behind asynchronous ones must not overtake them
    tensors = [torch.full((20_000,), float(rank)) for _ in range(20)]
    works = [dist.all_reduce(t, async_op=True) for t in tensors]
    last = torch.full((3,), float(rank))
    dist.all_reduce(last)
    assert all(work.is_completed() for work in works)
    assert last.tolist() == [ranks_sum(size)] * 3
    for tensor in tensors:
        assert tensor[0] == ranks_sum(size)


def test_async_op_may_differ_between_ranks(rank: int, size: int) -> None:
    tensor = torch.full((100_000,), float(rank))
    work = dist.all_reduce(tensor, async_op=bool(rank % 2))
    if work is not None:
        work.wait()
    assert tensor.unique().tolist() == [ranks_sum(size)]


def test_dropped_works_complete(rank: int, size: int) -> None:
    tensor = torch.full((1000,), float(rank))
    for _ in range(5):
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, async_op=True)
    dist.barrier()  # behind them in the same queue
    assert tensor.unique().tolist() == [size - 1]
