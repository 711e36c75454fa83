"""The training stacks of torch on this backend, each against one process that trains on the full batch."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH, BATCH, STEPS = 64, 8, 4


def model(gpu: torch.device) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)).to(gpu)


def batch(gpu: torch.device, step: int, ranks: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(ranks * BATCH, WIDTH, generator=generator).to(gpu)


def train(
    net: nn.Module, data: Callable[[int], torch.Tensor], loss_over: Callable[[torch.Tensor], torch.Tensor]
) -> list[float]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        values = data(step)
        loss = (net(values) - values.roll(1, 1)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss_over(loss.detach()).item())
    return losses


def alone(gpu: torch.device, size: int) -> list[float]:
    return train(model(gpu), lambda step: batch(gpu, step, size), lambda loss: loss)


def together(net: nn.Module, gpu: torch.device, rank: int, size: int) -> list[float]:
    def mean(loss: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(loss, dist.ReduceOp.AVG)
        return loss

    return train(net, lambda step: batch(gpu, step, size)[rank * BATCH : (rank + 1) * BATCH], mean)


@pytest.mark.parametrize("hook", ["none", "bf16", "allreduce", "compiled"])
def test_ddp(rank: int, size: int, gpu: torch.device, hook: str) -> None:
    net: Any = DistributedDataParallel(
        model(gpu), device_ids=[gpu.index], bucket_cap_mb=25 if hook == "compiled" else 0.01
    )
    if hook == "bf16":
        net.register_comm_hook(None, default_hooks.bf16_compress_hook)
    elif hook == "allreduce":
        net.register_comm_hook(None, default_hooks.allreduce_hook)
    elif hook == "compiled":
        torch._dynamo.reset()
        net = torch.compile(net)
    tolerance = 2e-2 if hook == "bf16" else 1e-5
    assert together(net, gpu, rank, size) == pytest.approx(alone(gpu, size), rel=tolerance)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_fsdp2(rank: int, size: int, gpu: torch.device, compiled: bool) -> None:
    net: Any = model(gpu)
    mesh = init_device_mesh("cuda", (size,))
    for layer in (net[0], net[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    if compiled:
        torch._dynamo.reset()
        net = torch.compile(net)
    assert together(net, gpu, rank, size) == pytest.approx(alone(gpu, size), rel=1e-5)


def test_tensor_parallel(rank: int, size: int, gpu: torch.device) -> None:
    mesh = init_device_mesh("cuda", (size,))
    net = parallelize_module(model(gpu), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    losses = train(net, lambda step: batch(gpu, step, size), lambda loss: loss)
    assert losses == pytest.approx(alone(gpu, size), rel=1e-5)


def test_dtensor(rank: int, size: int, gpu: torch.device) -> None:
    mesh = init_device_mesh("cuda", (size,))
    whole = torch.arange(4.0 * size * size, device=gpu).view(2 * size, 2 * size)
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    assert torch.equal(rows.redistribute(mesh, [Shard(1)]).full_tensor(), whole)
    assert torch.equal(rows.redistribute(mesh, [Replicate()]).to_local(), whole)
    product = rows @ distribute_tensor(whole, mesh, [Shard(1)])
    assert isinstance(product, DTensor)
    torch.testing.assert_close(product.full_tensor(), whole @ whole)


def test_checkpoint(rank: int, size: int, gpu: torch.device, tmp_path_factory: pytest.TempPathFactory) -> None:
    where: list[Any] = [str(tmp_path_factory.mktemp("checkpoint")) if rank == 0 else None]
    dist.broadcast_object_list(where, 0)
    net = model(gpu)
    fully_shard(net)
    together(net, gpu, rank, size)
    state: Any = get_model_state_dict(net)
    save(state, checkpoint_id=Path(where[0]))
    kept = {name: copy.deepcopy(value.full_tensor()) for name, value in state.items()}
    other = model(gpu)
    fully_shard(other)
    fresh: Any = get_model_state_dict(other)
    load(fresh, checkpoint_id=Path(where[0]))
    set_model_state_dict(other, fresh)
    restored: Any = get_model_state_dict(other)
    for name, value in restored.items():
        assert torch.equal(value.full_tensor(), kept[name])
