"""Collectives that gradients pass through, eager and compiled, and the ways to name the group of one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional as dist_nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hpc_inflight import _torch_compat as compat

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import hpc_inflight as hi

EXACT = 1e-12  # float64, summed in another order


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


def own(rank: int, *shape: int) -> torch.Tensor:
    """Return a leaf with a rank's own values, the same at every call."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()


def with_gradients(collective: Callable[..., Any], leaves: list[torch.Tensor], rank: int) -> list[torch.Tensor]:
    """Return what a collective gives and the gradients of a loss that weighs every element otherwise on every rank."""
    outputs = collective(*leaves)
    listed = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    loss = torch.zeros((), dtype=torch.float64)
    for i, output in enumerate(listed):
        weights = torch.arange(1.0, output.numel() + 1, dtype=torch.float64).view_as(output)
        loss = loss + (output.square() * weights * (rank + 1) * (i + 1)).sum()
    loss.backward()
    gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
    return [*[output.detach().clone() for output in listed], *gradients]


def all_to_all_single(group: dist.ProcessGroup, tensor: torch.Tensor) -> torch.Tensor:
    output = torch.empty_like(tensor)
    result: torch.Tensor = dist_nn.all_to_all_single(output, tensor, group=group)
    return result


# name -> the collective, and whether its input is a list of one tensor per rank
NN_FUNCTIONAL: dict[str, tuple[Callable[..., Any], bool]] = {
    "all_reduce": (lambda group, t: dist_nn.all_reduce(t * 1, group=group), False),
    "all_gather": (lambda group, t: dist_nn.all_gather(t, group=group), False),
    "broadcast": (lambda group, t: dist_nn.broadcast(t * 1, dist.get_world_size() - 1, group=group), False),
    "reduce": (lambda group, t: dist_nn.reduce(t * 1, 0, group=group), False),
    "gather": (lambda group, t: dist_nn.gather(t, 0, group=group), False),
    "scatter": (lambda group, *ts: dist_nn.scatter(ts, 0, group=group), True),
    "reduce_scatter": (
        lambda group, *ts: dist_nn.reduce_scatter(torch.empty_like(ts[0]), [t * 1 for t in ts], group=group),
        True,
    ),
    "all_to_all": (
        lambda group, *ts: dist_nn.all_to_all([torch.empty_like(t) for t in ts], list(ts), group=group),
        True,
    ),
    "all_to_all_single": (all_to_all_single, False),
}


deprecated = pytest.mark.filterwarnings("ignore:torch.distributed.nn.functional.*is deprecated:FutureWarning")


@deprecated
@pytest.mark.parametrize("name", NN_FUNCTIONAL)
def test_nn_functional(name: str, gloo: dist.ProcessGroup, ours: dist.ProcessGroup, rank: int, size: int) -> None:
    collective, listed = NN_FUNCTIONAL[name]
    results = []
    for group in (gloo, ours):
        leaves = [own(rank + 10 * i, 2 * size, 3) for i in range(size if listed else 1)]
        results.append(with_gradients(lambda *ts, group=group: collective(group, *ts), leaves, rank))
        if name == "reduce" and rank > 0:
            del results[-1][0]  # off the root the output is undefined, and Gloo leaves partial sums in it
    torch.testing.assert_close(results[1], results[0], rtol=EXACT, atol=EXACT)
    assert any(t.any() for t in results[1])


@pytest.mark.filterwarnings("ignore:.*_all_gather_base` is a private function:FutureWarning")
def test_nn_all_gather_base(gloo: dist.ProcessGroup, ours: dist.ProcessGroup, rank: int, size: int) -> None:
    for group in (gloo, ours):
        leaf, output = own(rank, 2, 3), torch.empty(2 * size, 3, dtype=torch.float64)
        gathered = dist_nn._AllGatherBase.apply(output, leaf, group)
        torch.testing.assert_close(gathered, torch.cat([own(r, 2, 3) for r in range(size)]), rtol=0, atol=0)
        with pytest.raises(RuntimeError, match="Backend not supported!"):  # torch has a list of backends here
            gathered.sum().backward()


def halves() -> list[int]:
    return [2] * dist.get_world_size()


FUNCTIONAL: dict[str, Callable[[torch.Tensor, Any], Any]] = {
    "all_reduce": lambda t, group: funcol.all_reduce(t, "sum", group),
    "all_gather": lambda t, group: funcol.all_gather_tensor_autograd(t, 0, group),
    "all_gather dim 1": lambda t, group: funcol.all_gather_tensor_autograd(t, 1, group),
    "reduce_scatter": lambda t, group: funcol.reduce_scatter_tensor_autograd(t, "sum", 0, group),
    "all_to_all": lambda t, group: funcol.all_to_all_single_autograd(t, halves(), halves(), group),
}


WITHOUT_GRADIENT = {"all_reduce", "all_gather dim 1"}  # in torch before 2.11, whatever the backend


@pytest.mark.parametrize("name", FUNCTIONAL)
def test_functional_with_gradients(
    name: str, gloo: dist.ProcessGroup, ours: dist.ProcessGroup, rank: int, size: int
) -> None:
    if compat.TORCH < (2, 11) and name in WITHOUT_GRADIENT:
        pytest.skip("torch has no gradient of it before 2.11")
    expected, results = (
        with_gradients(lambda t, g=group: FUNCTIONAL[name](t, g), [own(rank, 2 * size, 3)], rank)
        for group in (gloo, ours)
    )
    torch.testing.assert_close(results, expected, rtol=EXACT, atol=EXACT)
    assert results[1].any()


@pytest.mark.parametrize(("backend", "by_name"), [("aot_eager", True), ("inductor", False)])
def test_functional_with_gradients_compiled(
    backend: str, by_name: bool, gloo: dist.ProcessGroup, ours: dist.ProcessGroup, rank: int, size: int
) -> None:
    def chained(tensor: torch.Tensor, group: Any) -> torch.Tensor:
        exchanged = funcol.all_to_all_single_autograd(tensor, halves(), halves(), group)
        gathered = funcol.all_gather_tensor_autograd(exchanged.sin(), 0, group)
        scattered: torch.Tensor = funcol.reduce_scatter_tensor_autograd(gathered, "sum", 0, group)
        return scattered

    torch._dynamo.reset()
    region = torch.compile(chained, fullgraph=True, backend=backend)
    group = ours.group_name if by_name else ours
    eager = with_gradients(lambda t: chained(t, gloo), [own(rank, 2 * size, 3)], rank)
    compiled = with_gradients(lambda t: region(t, group), [own(rank, 2 * size, 3)], rank)
    torch.testing.assert_close(compiled, eager, rtol=EXACT, atol=EXACT)


def test_c10d_calls_in_a_graph(ours: dist.ProcessGroup, rank: int, size: int) -> None:
    """Dynamo rewrites the synchronous calls of c10d into functional ones."""

    def region(tensor: torch.Tensor) -> list[torch.Tensor]:
        total = tensor * 2
        dist.all_reduce(total, group=ours)
        gathered = tensor.new_empty(size * 2 * size)
        dist.all_gather_into_tensor(gathered, tensor, group=ours)
        part = tensor.new_empty(2)
        dist.reduce_scatter_tensor(part, tensor, group=ours)
        received = torch.empty_like(tensor)
        dist.all_to_all_single(received, tensor, group=ours)
        return [total, gathered, part, received]

    torch._dynamo.reset()
    every = [torch.arange(2.0 * size) + 100 * r for r in range(size)]
    total, gathered, part, received = torch.compile(region, fullgraph=True, backend="aot_eager")(every[rank])
    assert torch.equal(total, 2 * torch.stack(every).sum(0))
    assert torch.equal(gathered, torch.cat(every))
    assert torch.equal(part, torch.stack(every).sum(0)[2 * rank : 2 * rank + 2])
    assert torch.equal(received, torch.cat([e[2 * rank : 2 * rank + 2] for e in every]))


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning")  # torch's option classes
@pytest.mark.mpi(min_size=2)  # torch refuses to send to the sender
@pytest.mark.parametrize("call", ["all_reduce", "broadcast", "reduce", "isend"])
def test_c10d_calls_at_a_graph_break(call: str, rank: int, size: int) -> None:
    def region(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor + rank
        if call == "all_reduce":
            work = dist.all_reduce(tensor, async_op=True)
            assert work is not None
            work.wait()
        elif call == "broadcast":
            dist.broadcast(tensor, size - 1)
        elif call == "reduce":
            dist.reduce(tensor, size - 1)
        else:
            works = [dist.isend(tensor, (rank + 1) % size), dist.irecv(received, (rank - 1) % size)]
            for work in works:
                assert work is not None
                work.wait()
        return tensor * 2

    torch._dynamo.reset()
    received = torch.zeros(2)
    result = torch.compile(region, backend="eager")(torch.ones(2))
    everything = size + size * (size - 1) / 2
    expected = {
        "all_reduce": everything,
        "broadcast": float(size),
        "reduce": everything if rank == size - 1 else rank + 1.0,
    }
    assert result.tolist() == [2 * expected.get(call, rank + 1.0)] * 2
    assert received.tolist() == [(rank - 1) % size + 1.0 if call == "isend" else 0.0] * 2


def destroy_groups_of(*meshes: DeviceMesh) -> None:
    """Destroy each group of the meshes once; a mesh over all ranks borrows the default one."""
    for group in {group.group_name: group for mesh in meshes for group in mesh.get_all_groups()}.values():
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def test_groups_by_object_name_and_mesh(ours: dist.ProcessGroup, rank: int, size: int) -> None:
    world_mesh = init_device_mesh("cpu", (size,))
    odd_even = [dist.new_group(list(range(first, size, 2))) for first in range(min(2, size))]
    half = odd_even[rank % 2]
    members = range(rank % 2, size, 2)
    # a mesh over a group that exists keeps that group
    half_mesh = DeviceMesh.from_group(half, "cpu")
    assert half_mesh.get_group() is half
    both = DeviceMesh.from_group(
        [ours, ours], "cpu", torch.arange(size).view(1, size).expand(1, size), mesh_dim_names=("a", "b")
    )
    for ways, ranks in (
        ((ours, ours.group_name, world_mesh, (world_mesh, 0), (both, 1)), range(size)),
        ((half, half.group_name, half_mesh, (half_mesh, 0)), members),
    ):
        for way in ways:
            tensor = torch.full((len(ranks), 2), rank + 1.0)
            total = sum(r + 1.0 for r in ranks)
            assert funcol.all_reduce(tensor, "sum", way).tolist() == [[total] * 2] * len(ranks)
            assert funcol.all_reduce(tensor, "max", way).tolist() == [[ranks[-1] + 1.0] * 2] * len(ranks)
            assert funcol.broadcast(tensor, len(ranks) - 1, way).tolist() == [[ranks[-1] + 1.0] * 2] * len(ranks)
            rows = [[r + 1.0] * 2 for r in ranks]
            assert funcol.all_gather_tensor(tensor[:1].clone(), 0, way).tolist() == rows
            assert funcol.reduce_scatter_tensor(tensor, "sum", 0, way).tolist() == [[total] * 2]
            assert funcol.all_to_all_single(tensor, None, None, way).tolist() == rows
            summed = funcol.all_reduce_coalesced([tensor, tensor[0] * 2], "sum", way)
            assert [t.flatten()[0].item() for t in summed] == [total, 2 * total]
            gathered = funcol.all_gather_into_tensor_coalesced([tensor[:1].clone(), tensor[:1] * 2], way)
            assert [t.tolist() for t in gathered] == [rows, [[2 * v for v in row] for row in rows]]
            parts = funcol.reduce_scatter_tensor_coalesced([tensor, tensor * 2], "sum", [0, 0], way)
            assert [t.tolist() for t in parts] == [[[total] * 2], [[2 * total] * 2]]
            if way is ours:
                # of a flat tensor: torch passes its number of elements as its number of rows
                shifted = funcol.permute_tensor(tensor.flatten(), [(r + 1) % size for r in range(size)], way)
                assert shifted.tolist() == [(rank - 1) % size + 1.0] * 2 * size
    for group in odd_even:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)


def test_device_meshes(rank: int, size: int) -> None:
    rows, columns = (2, 2) if size == 4 else (size, 1)
    flat = init_device_mesh("cpu", (rows, columns), mesh_dim_names=("row", "column"))
    deep = init_device_mesh("cpu", (rows, columns, 1), mesh_dim_names=("a", "b", "c"))
    row, column = divmod(rank, columns)
    assert list(flat.get_coordinate() or ()) == [row, column]
    assert list(deep.get_coordinate() or ()) == [row, column, 0]
    down, across = [r * columns + column for r in range(rows)], [row * columns + c for c in range(columns)]
    for mesh, names in ((flat, ("row", "column")), (deep, ("a", "b", "c"))):
        for dim, (name, members) in enumerate(zip(names, (down, across, [rank]), strict=False)):
            group = mesh.get_group(name)
            assert dist.get_process_group_ranks(group) == members
            assert dist.get_backend(group) == "hpc_inflight"
            tensor = torch.tensor([float(rank)])
            dist.all_reduce(tensor, group=group)
            assert tensor.item() == sum(members)
            by_dim = funcol.all_reduce(torch.tensor([float(rank)]), "sum", (mesh, dim))
            assert by_dim.item() == sum(members)
            assert mesh[name].get_group() is group
    flattened = deep["a", "b"]._flatten("ab")
    assert funcol.all_reduce(torch.tensor([float(rank)]), "sum", flattened).item() == size * (size - 1) / 2
    destroy_groups_of(flat, deep, flattened)


def test_split_group_is_refused_by_torch_without_an_accelerator(
    gloo: dist.ProcessGroup, ours: dist.ProcessGroup, size: int
) -> None:
    for group in (gloo, ours):
        with pytest.raises(RuntimeError, match="No device associated with the default pg, not safe to split"):
            dist.split_group(group, [list(range(size))])
