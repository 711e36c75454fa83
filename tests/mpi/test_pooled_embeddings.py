"""The exchange of pooled embeddings: values, gradients, and what runs while it travels, in both directions."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch._dynamo.testing
import torch.distributed as dist
from torch import nn

import hpc_inflight as hi
from hpc_inflight import _torch_compat as compat
from hpc_inflight import work_registry
from hpc_inflight._torch_compat import registry_size
from hpc_inflight.testing import gather_on_all_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hpc_inflight.testing.late import Late

pytestmark = [
    pytest.mark.timeout(300),
    # dynamo hides its own look at .grad of an input that is no leaf, but not from warnings that are errors
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]

modes = pytest.mark.parametrize("mode", [None, "eager", "aot_eager", "inductor"], ids=str)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Sharded:
    """Features of one batch on every rank, those of them that this rank owns, and the plan of their exchange."""

    def __init__(
        self,
        dims: Sequence[int],
        owners: Sequence[int],
        batch_sizes: Sequence[int],
        device: torch.device,
        dtypes: torch.dtype | Sequence[torch.dtype] = torch.float64,
    ) -> None:
        self.rank = dist.get_rank()
        self.owners, self.batch_sizes = list(owners), list(batch_sizes)
        self.plan = hi.PooledEmbeddingsAllToAll(dims, owners, dtypes, device=device)
        kinds = [dtypes] * len(dims) if isinstance(dtypes, torch.dtype) else dtypes
        generator = torch.Generator().manual_seed(5)
        self.features = [
            (10 * torch.randn(sum(batch_sizes), dim, generator=generator, dtype=torch.float64)).to(device, kind)
            for dim, kind in zip(dims, kinds, strict=True)
        ]
        for feature in self.features:
            feature.requires_grad_(feature.is_floating_point())

    def own(self) -> list[torch.Tensor]:
        return [f for f, owner in zip(self.features, self.owners, strict=True) if owner == self.rank]

    def parts(self, rank: int) -> list[torch.Tensor]:
        """Return what a rank receives."""
        bounds = [0, *accumulate(self.batch_sizes)]
        return [feature[bounds[rank] : bounds[rank + 1]] for feature in self.features]

    def issue(self, **options: Any) -> hi.PooledEmbeddingsAwaitable:
        return self.plan(self.own(), self.batch_sizes, **options)


def loss_of(features: Sequence[torch.Tensor], rank: int) -> torch.Tensor:
    """Return a loss that weighs every element otherwise, on every rank and for every feature."""
    total = torch.zeros((), dtype=torch.float64, device=features[0].device)
    for number, feature in enumerate(features):
        weights = torch.arange(1.0, feature.numel() + 1, dtype=torch.float64, device=feature.device)
        total = total + (feature.double().sin() * weights.view_as(feature) * (number + 1) * (rank + 1)).sum()
    return total


def compiled(function: Callable[..., Any], mode: str | None) -> Callable[..., Any]:
    return function if mode is None else torch.compile(function, fullgraph=True, backend=mode)


# three features more than ranks, so that a rank owns several, and the last of several ranks owns none
def uneven(size: int) -> dict[str, Any]:
    dims = [3, 1, 4, 0, *[2] * size][: size + 3]
    owners = [(3 * f) % max(1, size - 1) for f in range(len(dims))]
    return {"dims": dims, "owners": owners, "batch_sizes": [(2 * r + 1) % 4 for r in range(size)]}


@modes
def test_values_and_gradients_are_those_of_the_unsharded_features(
    mode: str | None, late: Late, rank: int, size: int
) -> None:
    region = compiled(lambda awaitable: (loss_of(features := awaitable.wait(), rank), features), mode)
    sharded = Sharded(**uneven(size), device=late.device)
    region(sharded.issue())[0].backward()
    for feature in sharded.own():
        feature.grad = None

    dist.barrier()
    late.hold_up()
    awaitable = sharded.issue()
    assert registry_size() == 1
    loss, features = region(awaitable)
    assert registry_size() == 0
    torch.testing.assert_close(list(features), sharded.parts(rank), rtol=0, atol=0)
    late.hold_up()
    loss.backward()
    gradients = [feature.grad for feature in sharded.own()]

    reference = [feature.detach().requires_grad_() for feature in sharded.features]
    sharded.features = reference
    torch.stack([loss_of(sharded.parts(r), r) for r in range(size)]).sum().backward()
    torch.testing.assert_close(loss, loss_of(sharded.parts(rank), rank))
    torch.testing.assert_close(gradients, [feature.grad for feature in sharded.own()])


@modes
def test_dtypes_travel_side_by_side(mode: str | None, late: Late, rank: int, size: int) -> None:
    kinds = [torch.float32, torch.bfloat16, torch.int64, torch.float32, torch.float64, torch.bool]
    owners = [f % size for f in range(len(kinds))]
    sharded = Sharded([2, 3, 1, 4, 2, 1], owners, [3] * size, late.device, kinds)
    region = compiled(lambda awaitable: (loss_of(features := awaitable.wait(), rank), features), mode)
    region(sharded.issue())
    dist.barrier()
    late.hold_up()
    awaitable = sharded.issue()
    assert len(awaitable.buffers) == 5
    loss, features = region(awaitable)
    assert [feature.dtype for feature in features] == kinds
    torch.testing.assert_close(list(features), sharded.parts(rank), rtol=0, atol=0)
    loss.backward()
    gradients = [feature.grad for feature in sharded.own()]
    sharded.features = [f.detach().requires_grad_(f.is_floating_point()) for f in sharded.features]
    torch.stack([loss_of(sharded.parts(r), r) for r in range(size)]).sum().backward()
    for found, expected, feature in zip(gradients, [f.grad for f in sharded.own()], sharded.own(), strict=True):
        assert (found is None) == (not feature.is_floating_point())
        torch.testing.assert_close(found, expected)


class _SumOfRanks(torch.autograd.Function):
    """Sum over the ranks; each rank's own part has the gradient."""

    @staticmethod
    def forward(_ctx: Any, loss: torch.Tensor) -> torch.Tensor:
        total = loss.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(_ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


class _OnEveryRank(torch.autograd.Function):
    """The same tensors on all ranks; their gradients are the sums of the ranks'."""

    @staticmethod
    def forward(_ctx: Any, *features: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(feature.clone() for feature in features)

    @staticmethod
    def backward(_ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        totals = tuple(gradient.clone() for gradient in gradients)
        for total in totals:
            dist.all_reduce(total)
        return totals


@pytest.mark.parametrize("mode", [None, "aot_eager"], ids=str)
def test_gradcheck(mode: str | None, device: torch.device, rank: int, size: int) -> None:
    """The exchange as a function of all features, on every rank alike, against finite differences."""
    dims = [2, 0, 1, 1][: max(3, size)]
    # each rank owns one, or gradcheck, which asks for the gradients of the features alone, runs no backward there
    sharded = Sharded(dims, [f % size for f in range(len(dims))], [1 + r % 2 for r in range(size)], device)
    region = compiled(lambda awaitable: loss_of(awaitable.wait(), rank), mode)

    def total(*features: torch.Tensor) -> Any:
        copies = _OnEveryRank.apply(*features)  # type: ignore[no-untyped-call]  # torch's own
        nothing = 0 * torch.cat(copies, dim=1).sum()  # for a rank that owns none to take part in their backward
        own = [copy for copy, owner in zip(copies, sharded.owners, strict=True) if owner == rank]
        return _SumOfRanks.apply(nothing + region(sharded.plan(own, sharded.batch_sizes)))  # type: ignore[no-untyped-call]

    assert torch.autograd.gradcheck(total, sharded.features)


@pytest.mark.mpi(min_size=2)  # alone, nobody is late
@modes
def test_both_directions_overlap(mode: str | None, device: torch.device, rank: int, size: int) -> None:
    """Rank 0 sends only when the others have told it that the work which is to overlap has run on them."""
    log: list[str] = []
    dim, batch = 3, 2
    table = nn.Embedding(7, dim, device=device, dtype=torch.float64)
    bottom = nn.Linear(4, dim, device=device, dtype=torch.float64)
    plan = hi.PooledEmbeddingsAllToAll([dim] * size, range(size), torch.float64, device=device)

    def over_arch(dense: torch.Tensor, awaitable: hi.PooledEmbeddingsAwaitable) -> torch.Tensor:
        return torch.stack([*awaitable.wait(), dense]).prod(0).sum()

    region = compiled(over_arch, mode)
    rows = torch.arange(batch * size, device=device) % 7
    inputs = torch.ones(batch, 4, device=device, dtype=torch.float64)

    def step(hold_back: bool) -> torch.Tensor:
        looked_up = table(rows)
        if hold_back and rank == 0:
            gather_on_all_ranks("forward")
        awaitable = plan([looked_up], [batch] * size)
        dense = bottom(inputs)
        log.append("bottom")
        if hold_back and rank != 0:
            assert [work.completed for work in hi.inflight()] == [False]
            gather_on_all_ranks("forward")
        if hold_back and rank == 0:
            # before this rank's gradients leave
            awaitable.buffers[0].register_hook(lambda _: gather_on_all_ranks("backward") and None)
        awaitable.buffers[0].register_hook(lambda _: log.append("issue"))
        loss: torch.Tensor = region(dense, awaitable)
        log.append("region")
        return loss

    step(hold_back=False).backward()  # compiles both directions
    log.clear()
    hooks = [table.weight.register_post_accumulate_grad_hook(lambda _: log.append("table"))]

    def bottom_done(_: torch.Tensor) -> None:
        log.append("bottom's gradient")
        if rank != 0:
            gather_on_all_ranks("backward")

    hooks.append(bottom.weight.register_post_accumulate_grad_hook(bottom_done))
    table.weight.grad = bottom.weight.grad = None
    loss = step(hold_back=True)
    loss.backward()
    for hook in hooks:
        hook.remove()
    assert log == ["bottom", "region", "issue", "bottom's gradient", "table"]

    check_step(table, bottom(inputs), rows, batch, loss)


def check_step(table: nn.Embedding, dense: torch.Tensor, rows: torch.Tensor, batch: int, loss: torch.Tensor) -> None:
    """Compare the losses and gradients of all ranks with a model that has all tables."""
    assert table.weight.grad is not None
    tables = gather_on_all_ranks(table.weight.detach().cpu())
    denses = gather_on_all_ranks(dense.detach().cpu())
    found = gather_on_all_ranks((table.weight.grad.cpu(), loss.item()))
    for weight in tables:
        weight.requires_grad_()
    losses = [
        torch.stack([*[t[rows.cpu()][batch * r : batch * (r + 1)] for t in tables], denses[r]]).prod(0).sum()
        for r in range(len(tables))
    ]
    torch.stack(losses).sum().backward()
    for weight, (gradient, value), expected in zip(tables, found, losses, strict=True):
        torch.testing.assert_close(gradient, weight.grad)
        assert value == pytest.approx(expected.item())


def test_nothing_is_recompiled(device: torch.device, rank: int, size: int) -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def total(features: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.stack([feature.sin().sum() * (number + 1) for number, feature in enumerate(features)]).sum()

    region = torch.compile(lambda awaitable: total(awaitable.wait()), fullgraph=True, backend=counter)
    found = work_registry.counts().waited_by_tensor
    for batch in (4, 4, 6, 7, 9, 4):  # the second size makes it dynamic
        sharded = Sharded([2, 3, 1], [0, size - 1, 0], [batch] * size, device)
        region(sharded.issue()).backward()
        torch.testing.assert_close(region(sharded.issue()), total(sharded.parts(rank)))
    assert counter.frame_count == 2
    assert work_registry.counts().waited_by_tensor - found == 12


@pytest.mark.parametrize("how", ["no_grad", "inference_mode", "gradients=False"])
def test_without_gradients(how: str, device: torch.device, rank: int, size: int) -> None:
    sharded = Sharded([2, 3], [0, size - 1], [2] * size, device)
    if how == "gradients=False":
        awaitable = sharded.issue(gradients=False)
    else:
        with torch.no_grad() if how == "no_grad" else torch.inference_mode():
            awaitable = sharded.issue()
    assert not any(buffer.requires_grad for buffer in awaitable.buffers)
    torch.testing.assert_close(list(awaitable.wait()), [part.detach() for part in sharded.parts(rank)])


def test_the_backward_can_run_twice(device: torch.device, rank: int, size: int) -> None:
    sharded = Sharded([2, 3], [0, size - 1], [2] * size, device)
    loss = loss_of(sharded.issue().wait(), rank)
    loss.backward(retain_graph=True)
    once = [feature.grad.clone() for feature in sharded.own() if feature.grad is not None]
    loss.backward()
    torch.testing.assert_close([feature.grad for feature in sharded.own()], [2 * gradient for gradient in once])


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled:UserWarning")
def test_anomaly_mode_sees_no_data_in_flight(device: torch.device, rank: int, size: int) -> None:
    sharded = Sharded([2, 3], [0, size - 1], [2] * size, device)
    with torch.autograd.detect_anomaly(check_nan=True):
        loss_of(sharded.issue().wait(), rank).backward()


def test_it_is_a_pytree(device: torch.device, rank: int, size: int) -> None:
    sharded = Sharded([2, 3], [0, size - 1], [2] * size, device)
    leaves, spec = torch.utils._pytree.tree_flatten(sharded.issue())
    assert len(leaves) == 1
    features = torch.utils._pytree.tree_unflatten(leaves, spec).wait()
    torch.testing.assert_close(list(features), sharded.parts(rank))


def test_nothing_is_kept(device: torch.device, size: int) -> None:
    sharded = Sharded([2], [0], [2] * size, device)
    before = work_registry.counts().unwaited
    sharded.issue()  # never waited for, and dropped
    hi.wait_for_all_pending_works(timeout_s=30)
    work_registry.sweep()
    assert hi.inflight() == []
    assert work_registry.counts().unwaited - before == 1


def test_wrong_arguments(device: torch.device, rank: int, size: int) -> None:
    with pytest.raises(hi.InvalidArgumentError, match="2 dims, 1 owners and 2 dtypes; expected one of each"):
        hi.PooledEmbeddingsAllToAll([1, 2], [0])
    with pytest.raises(hi.InvalidArgumentError, match=rf"feature 1 has dim 2 and owner {size}; expected a dim"):
        hi.PooledEmbeddingsAllToAll([1, 2], [0, size])
    plan = hi.PooledEmbeddingsAllToAll([3], [rank], device=device)  # as if this rank owned it
    with pytest.raises(hi.InvalidArgumentError, match=rf"0 features; expected the 1 that rank {rank} owns: \[0\]"):
        plan([], [2] * size)
    with pytest.raises(hi.InvalidArgumentError, match=rf"batch_sizes=\[2, 2.*expected {size} numbers of samples"):
        plan([torch.ones(2 * size, 3, device=device)], [2] * (size + 1))
    with pytest.raises(
        hi.InvalidArgumentError, match=rf"is \({2 * size}, 4\) torch.float32 on .*expected \({2 * size}"
    ):
        plan([torch.ones(2 * size, 4, device=device)], [2] * size)

    @torch.compile(backend="eager", fullgraph=True)
    def region(feature: torch.Tensor) -> Any:
        return plan([feature], [2] * size).wait()

    # torch before 2.10 tells no more than the kind
    said = "UserDefinedException.*UnsupportedError" if compat.TORCH < (2, 10) else "issue the exchange in eager code"
    with pytest.raises(Exception, match=said):
        region(torch.ones(2 * size, 3, device=device))
