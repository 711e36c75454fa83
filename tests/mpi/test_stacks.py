"""The training stacks of torch, each against the same training on Gloo in the same job.

Everything is in float64 unless the stack itself rounds, so that only the order of summation may differ. Each rank
trains on its own data: without communication no two ranks would agree, and neither would the two groups.
"""

from __future__ import annotations

import contextlib
import copy
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.modules import _functions
from torch.nn.parallel import DistributedDataParallel

from hpc_inflight._torch_compat import sequence_number

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import hpc_inflight as hi

WIDTH = 12
STEPS = 3
BUCKET_MB = 0.002  # several buckets in these small models
EXACT = 1e-12  # of values near 1, in float64, summed in another order


@pytest.fixture(scope="module")
def gloo(world: hi.World) -> Iterator[dist.ProcessGroup]:
    group = dist.new_group(backend="gloo")
    assert group is not None
    yield group
    dist.destroy_process_group(group)


@pytest.fixture
def ours(world: hi.World) -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


@pytest.fixture
def compare(gloo: dist.ProcessGroup, ours: dist.ProcessGroup) -> Callable[..., None]:
    """Run a training on both groups from the same seed and compare whatever it returns."""

    def run(train: Callable[[dist.ProcessGroup], Any], tolerance: float = EXACT, collectives: int = 2 * STEPS) -> None:
        results, issued = [], []
        for group in (gloo, ours):
            torch.manual_seed(0)
            before = sequence_number(ours)
            results.append(train(group))
            issued.append(sequence_number(ours) - before)
        # the second run was not on the first one's group; pipelines have no collectives, sub-meshes have other groups,
        # and a world of one has little to say
        assert issued[1] - issued[0] >= (collectives if ours.size() > 1 else 0)
        torch.testing.assert_close(results[1], results[0], rtol=tolerance, atol=tolerance)

    return run


class Net(nn.Module):
    """Two ways through, so that a rank can leave one unused, and buffers, which DDP broadcasts."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.left = nn.Linear(WIDTH, WIDTH)
        self.right = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 1)
        self.double()

    def forward(self, rows: torch.Tensor, *, left: bool = True, right: bool = True) -> torch.Tensor:
        hidden = self.norm(torch.tanh(self.first(rows)))
        out = torch.zeros_like(hidden)
        if left:
            out = out + self.left(hidden)
        if right:
            out = out + self.right(hidden)
        result: torch.Tensor = self.last(torch.tanh(out))
        return result


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH)).double()


def batch(rank: int, step: int, rows: int = 5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)


def train(
    model: Callable[..., torch.Tensor],
    optimizer: Any,
    rank: int,
    *,
    steps: int = STEPS,
    used: Callable[[int], dict[str, bool]] = lambda _step: {},
    accumulate: Any = None,
) -> list[torch.Tensor]:
    """Return the losses; ``accumulate`` is a context for a first backward of each step, whose gradients stay local."""
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        if accumulate is not None:
            with accumulate():
                model(batch(rank, 100 + step)).square().mean().backward()
        loss = model(batch(rank, step), **used(step)).double().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def state(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of what a module holds, whole where it is sharded."""
    whole = {n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in module.state_dict().items()}
    return {name: value.detach().clone() for name, value in whole.items()}


# data parallel ----------------------------------------------------------------------------------------------


def train_ddp(
    group: dist.ProcessGroup,
    *,
    hook: Callable[[DistributedDataParallel], None] = lambda _model: None,
    accumulate: bool = False,
    join: bool = False,
    compiler: str | None = None,
    bucket_mb: float = BUCKET_MB,
    steps: int = STEPS,
    used: Callable[[int], dict[str, bool]] = lambda _step: {},
    **options: Any,
) -> Any:
    model = DistributedDataParallel(Net(), process_group=group, bucket_cap_mb=bucket_mb, **options)
    hook(model)
    forward: Any = torch.compile(model, backend=compiler) if compiler else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with model.join() if join else contextlib.nullcontext():
        losses = train(
            forward,
            optimizer,
            dist.get_rank(group),
            steps=steps,
            used=used,
            accumulate=model.no_sync if accumulate else None,
        )
    return losses, state(model)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        pytest.param({"gradient_as_bucket_view": True}, id="bucket views"),
        pytest.param({"accumulate": True}, id="no_sync"),
        pytest.param({"accumulate": True, "gradient_as_bucket_view": True}, id="no_sync on bucket views"),
        pytest.param({"static_graph": True}, id="static graph"),
    ],
)
def test_ddp(compare: Callable[..., None], options: dict[str, Any]) -> None:
    compare(lambda group: train_ddp(group, **options))


def test_ddp_find_unused_parameters(compare: Callable[..., None], rank: int) -> None:
    # rank 0 never takes the left way and the others never the right; in the last step nobody goes left
    def used(step: int) -> dict[str, bool]:
        return {"left": rank > 0 and step < STEPS - 1, "right": rank == 0}

    compare(lambda group: train_ddp(group, used=used, find_unused_parameters=True))


@pytest.mark.parametrize(
    ("hook", "tolerance"),
    [
        pytest.param(default_hooks.allreduce_hook, EXACT, id="all_reduce"),
        # one unit in the last place of 16-bit gradients near 0.1, where Gloo rounds every partial sum
        pytest.param(default_hooks.fp16_compress_hook, 1e-3, id="fp16"),
        # a function of another name: DDP refuses this one by its name wherever there is no CUDA
        pytest.param(lambda group, bucket: default_hooks.bf16_compress_hook(group, bucket), 4e-3, id="bf16"),  # noqa: PLW0108
    ],
)
def test_ddp_hook(compare: Callable[..., None], hook: Any, tolerance: float) -> None:
    compare(
        lambda group: train_ddp(group, hook=lambda model: model.register_comm_hook(group, hook)),
        tolerance,
    )


def test_ddp_powersgd(compare: Callable[..., None]) -> None:
    """PowerSGD issues collectives in the callbacks of a collective's future and waits for them there."""

    def run(group: dist.ProcessGroup) -> Any:
        power = powerSGD_hook.PowerSGDState(group, 2, start_powerSGD_iter=2, min_compression_rate=1)

        def hook(model: DistributedDataParallel) -> None:
            model.register_comm_hook(power, powerSGD_hook.powerSGD_hook)

        # one bucket: with more, both threads of Gloo end up waiting
        return train_ddp(group, steps=4, bucket_mb=25, hook=hook)

    compare(run)


def test_ddp_join_of_uneven_inputs(compare: Callable[..., None], rank: int) -> None:
    compare(lambda group: train_ddp(group, steps=2 + rank, join=True))


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_ddp_compiled(compare: Callable[..., None], monkeypatch: pytest.MonkeyPatch, compiler: str) -> None:
    torch._dynamo.reset()
    # torch cuts the graph at the buckets; inductor takes seconds for each part, so it gets one
    monkeypatch.setattr(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 1000)
    bucket_mb = BUCKET_MB if compiler == "aot_eager" else 25
    compare(lambda group: train_ddp(group, compiler=compiler, bucket_mb=bucket_mb))


def test_ddp_with_sparse_gradients(compare: Callable[..., None]) -> None:
    def run(group: dist.ProcessGroup) -> Any:
        rank = dist.get_rank(group)
        table = nn.EmbeddingBag(20, 4, sparse=True, mode="sum", dtype=torch.float64)
        model = DistributedDataParallel(table, process_group=group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(STEPS):
            optimizer.zero_grad()
            # rows that overlap with the neighbour's, one of them twice
            model(torch.tensor([[rank, rank, rank + 1], [step, 10 + rank, 19]])).square().sum().backward()
            optimizer.step()
        return state(model)

    compare(run)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # raised while torch imports its own optimizers
def test_zero_redundancy_optimizer(compare: Callable[..., None]) -> None:
    def run(group: dist.ProcessGroup) -> Any:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        rank = dist.get_rank(group)
        model = DistributedDataParallel(Net(), process_group=group)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, process_group=group, lr=0.01)
        losses = train(model, optimizer, rank)
        optimizer.consolidate_state_dict(to=0)
        moments = optimizer.state_dict()["state"] if rank == 0 else None
        return losses, state(model), moments

    compare(run)


# SyncBatchNorm has kernels for GPUs only; these stand in for them, so that its own code can run the collectives.
def _stats(rows: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    return rows.mean(0), (rows.var(0, correction=0) + eps).rsqrt()


def _gather_stats(
    _rows: torch.Tensor, means: torch.Tensor, invstds: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    *_running, eps, counts = rest
    share = (counts / counts.sum())[:, None]
    mean = (means * share).sum(0)
    square = ((invstds**-2 - eps + means**2) * share).sum(0)
    return mean, (square - mean**2 + eps).rsqrt()


def _element(rows: torch.Tensor, weight: Any, bias: Any, mean: Any, invstd: Any, _eps: float) -> torch.Tensor:
    result: torch.Tensor = (rows - mean) * invstd * weight + bias
    return result


def _backward_reduce(grad: torch.Tensor, rows: torch.Tensor, mean: Any, invstd: Any, *_: Any) -> Any:
    along = (grad * (rows - mean)).sum(0)
    return grad.sum(0), along, along * invstd, grad.sum(0)


def _backward_element(grad: torch.Tensor, rows: torch.Tensor, *rest: Any) -> Any:
    mean, invstd, weight, sum_dy, sum_along, counts = rest
    n = counts.sum()
    return (grad - sum_dy / n - (rows - mean) * invstd**2 * sum_along / n) * invstd * weight


def test_sync_batch_norm(
    gloo: dist.ProcessGroup, ours: dist.ProcessGroup, rank: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "batch_norm_stats", _stats)
    monkeypatch.setattr(torch, "batch_norm_gather_stats_with_counts", _gather_stats)
    monkeypatch.setattr(torch, "batch_norm_elemt", _element)
    monkeypatch.setattr(torch, "batch_norm_backward_reduce", _backward_reduce)
    monkeypatch.setattr(torch, "batch_norm_backward_elemt", _backward_element)
    every = torch.cat([batch(r, 0, rows=3 + r) for r in range(size)]).requires_grad_()
    weight, bias = batch(0, 1, rows=2).unbind()
    expected = nn.functional.batch_norm(every, None, None, weight, bias, training=True)
    expected.pow(3).sum().backward()
    assert every.grad is not None
    first = sum(3 + r for r in range(rank))
    mine = slice(first, first + 3 + rank)
    for group in (gloo, ours):
        rows = batch(rank, 0, rows=3 + rank).requires_grad_()
        out = _functions.SyncBatchNorm.apply(rows, weight, bias, None, None, 1e-5, 0.1, group, size)
        out.pow(3).sum().backward()
        torch.testing.assert_close(out, expected[mine], rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(rows.grad, every.grad[mine], rtol=1e-10, atol=1e-10)
        with pytest.raises(ValueError, match="SyncBatchNorm layers only work with GPU modules"):  # torch says so
            DistributedDataParallel(nn.SyncBatchNorm(WIDTH, process_group=group), process_group=group)


# sharded ----------------------------------------------------------------------------------------------------


# Meshes are equal when their ranks and names are, and DTensor caches by that: the backend in the name keeps those of
# the two groups apart.


def line(group: dist.ProcessGroup) -> DeviceMesh:
    """Return a mesh of all ranks on a group: the default group's the usual way, any other's from the group."""
    name = dist.get_backend(group)
    if group is dist.group.WORLD:
        return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(name,))
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=(name,))


@contextlib.contextmanager
def square(group: dist.ProcessGroup) -> Iterator[DeviceMesh]:
    """Make a mesh of 2 x 2 ranks whose groups have the backend of ``group``."""
    backend = dist.get_backend(group)
    names = (f"{backend} 0", f"{backend} 1")
    mesh: DeviceMesh
    if group is dist.group.WORLD:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    else:
        enumerations: list[list[list[int]]] = [[[0, 2], [1, 3]], [[0, 1], [2, 3]]]
        groups = [dist.new_subgroups_by_enumeration(ranks, backend=backend)[0] for ranks in enumerations]
        mesh = DeviceMesh.from_group(groups, "cpu", torch.arange(4).view(2, 2), mesh_dim_names=names)
    yield mesh
    for made in mesh.get_all_groups():
        assert dist.get_backend(made) == backend
        dist.destroy_process_group(made)


def train_fsdp(
    rank: int, mesh: DeviceMesh, policy: MixedPrecisionPolicy, *, reshard: bool, parallel: Any = None
) -> Any:
    model = mlp()
    if parallel is not None:
        tensor_parallel(model, parallel)
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    losses = train(model, torch.optim.Adam(model.parameters(), lr=0.01), rank)
    return losses, state(model)


PRECISIONS = [
    pytest.param(MixedPrecisionPolicy(), EXACT, id="float64"),
    # gradients of bfloat16 products, reduced in float32: the same up to float32's rounding ...
    pytest.param(MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32), 1e-5, id="bf16, reduced in float32"),
    # ... and in bfloat16: Adam's first steps are lr * sign(gradient), so parameters differ by that at most
    pytest.param(MixedPrecisionPolicy(torch.bfloat16), 6e-2, id="bf16"),
]


@pytest.mark.parametrize("reshard", [True, False], ids=["reshard", "no reshard"])
@pytest.mark.parametrize(("policy", "tolerance"), PRECISIONS)
def test_fsdp(compare: Callable[..., None], policy: MixedPrecisionPolicy, tolerance: float, *, reshard: bool) -> None:
    compare(lambda group: train_fsdp(dist.get_rank(group), line(group), policy, reshard=reshard), tolerance)


def tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def test_tensor_parallel(compare: Callable[..., None]) -> None:
    def run(group: dist.ProcessGroup) -> Any:
        model = tensor_parallel(mlp(), line(group))
        # one batch for all ranks, as tensor parallelism has it
        losses = train(model, torch.optim.Adam(model.parameters(), lr=0.01), 0)
        return losses, state(model)

    compare(run)


@pytest.mark.mpi(min_size=4)
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")  # no in-place operation is here
@pytest.mark.parametrize("stack", ["replicated shards", "sharded tensor parallel"])
def test_fsdp_on_two_dimensions(compare: Callable[..., None], rank: int, stack: str) -> None:
    def run(group: dist.ProcessGroup) -> Any:
        with square(group) as mesh:
            if stack == "replicated shards":
                return train_fsdp(rank, mesh, MixedPrecisionPolicy(), reshard=True)
            sharded, parallel = (mesh[name] for name in mesh.mesh_dim_names or ())
            return train_fsdp(rank // 2, sharded, MixedPrecisionPolicy(), reshard=True, parallel=parallel)

    compare(run, collectives=0)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("schedule", [ScheduleGPipe, Schedule1F1B])
def test_pipeline(compare: Callable[..., None], rank: int, size: int, schedule: Any) -> None:
    def run(group: dist.ProcessGroup) -> Any:
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double() for _ in range(size)]
        inputs, target = batch(0, 0, rows=2 * size), batch(0, 1, rows=2 * size)
        stage = PipelineStage(copy.deepcopy(layers[rank]), rank, size, torch.device("cpu"), group=group)
        steps = schedule(stage, n_microbatches=size, loss_fn=nn.functional.mse_loss)
        losses: list[torch.Tensor] = []
        arguments = {"target": target, "losses": losses} if rank == size - 1 else {}
        output = steps.step(*([inputs] if rank == 0 else []), **arguments)
        whole = nn.Sequential(*layers)(inputs)
        nn.functional.mse_loss(whole, target).backward()
        gradients = [p.grad for p in stage.submod.parameters()]
        torch.testing.assert_close(gradients, [p.grad for p in layers[rank].parameters()], rtol=EXACT, atol=EXACT)
        if rank == size - 1:
            torch.testing.assert_close(output, whole.detach(), rtol=EXACT, atol=EXACT)
        return gradients, [loss.detach() for loss in losses]

    compare(run, collectives=0)


@pytest.fixture
def shared_folder(rank: int) -> Iterator[Path]:
    """Make a folder that all ranks see; one rank makes it and removes it."""
    made = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(made, src=0)
    yield Path(str(made[0]))
    dist.barrier()
    if rank == 0:
        shutil.rmtree(str(made[0]))


@pytest.mark.parametrize("asynchronous", [False, True], ids=["save", "async_save"])
def test_checkpoint(
    gloo: dist.ProcessGroup, ours: dist.ProcessGroup, rank: int, shared_folder: Path, *, asynchronous: bool
) -> None:
    """What either group saved, the other loads into a model that is sharded the same way."""
    expected = []
    for group in (gloo, ours):
        torch.manual_seed(0)
        model: Any = fully_shard(mlp(), mesh=line(group))
        train(model, torch.optim.Adam(model.parameters(), lr=0.01), rank, steps=1)
        expected.append(state(model))
        saved = {"model": get_model_state_dict(model), "step": 3}
        path = shared_folder / dist.get_backend(group)
        if asynchronous:
            # on a group of its own, as torch asks for, while training goes on
            other = dist.new_group(backend=dist.get_backend(group))
            future: Any = async_save(saved, checkpoint_id=path, process_group=other)
            train(model, torch.optim.SGD(model.parameters(), lr=0.1), rank)
            future.result()
            dist.destroy_process_group(other)
        else:
            save(saved, checkpoint_id=path, process_group=group)
    for group, other_backend, values in ((ours, "gloo", expected[0]), (gloo, "hpc_inflight", expected[1])):
        model = fully_shard(mlp(), mesh=line(group))
        loaded: dict[str, Any] = {"model": get_model_state_dict(model), "step": 0}
        load(loaded, checkpoint_id=shared_folder / other_backend, process_group=group)
        set_model_state_dict(model, loaded["model"])
        torch.testing.assert_close(state(model), values, rtol=0, atol=0)
        assert loaded["step"] == 3
