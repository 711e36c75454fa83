"""What a compiled region may do with a collective in flight, in every mode, on data that really arrives late.

Each region is compiled on data that is there already, then runs on data that is not, and is compared with the same
function run on the data alone. `test_inflight` has the plain case and what the registry counts.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch._dynamo.testing
import torch.distributed as dist
from torch._inductor.utils import run_and_get_code
from torch.distributed import _functional_collectives as funcol
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.checkpoint import checkpoint

import hpc_inflight as hi
from hpc_inflight import _torch_compat as compat
from hpc_inflight import work_registry
from hpc_inflight._torch_compat import registry_size
from hpc_inflight.testing import assert_on_all_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from hpc_inflight.testing.late import Late

pytestmark = [pytest.mark.timeout(300), pytest.mark.once]

modes = pytest.mark.parametrize("mode", ["eager", "aot_eager", "inductor"])


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Region:
    """A compiled function, and how often it was compiled."""

    def __init__(self, function: Callable[..., Any], mode: str, **options: Any) -> None:
        self._counter = torch._dynamo.testing.CompileCounterWithBackend(mode)
        self._run = torch.compile(function, backend=self._counter, **{"fullgraph": True, **options})

    def __call__(self, *args: Any) -> Any:
        return self._run(*args)

    @property
    def compiled(self) -> int:
        return self._counter.frame_count


def buffer(late: Late, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((dist.get_world_size(), *(shape or (3,))), -1.0, dtype=dtype, device=late.device)


def issue(late: Late, output: torch.Tensor, base: float = 10.0) -> torch.Tensor:
    """Issue an exchange into ``output``, from rank 0 late, and forget the work."""
    dist.barrier()
    with hi.allow_inflight_collective_as_graph_input():
        late.all_to_all(output, base)
    return output


def waited_by_tensor() -> int:
    return work_registry.counts().waited_by_tensor


# ------------------------------------------------------------------- one exchange, one input that is there

# name -> the region, given what waits: hi.wait_tensor, or what returns its argument, for the reference
CASES: dict[str, Callable[[Any, torch.Tensor, torch.Tensor], Any]] = {}


def case(function: Callable[[Any, torch.Tensor, torch.Tensor], Any]) -> Callable[..., Any]:
    CASES[function.__name__] = function
    return function


@case
def result_used(wait: Any, y: torch.Tensor, x: torch.Tensor) -> Any:
    return wait(y) * 2 + x


@case
def used_after_other_work(wait: Any, y: torch.Tensor, x: torch.Tensor) -> Any:
    h = (x @ x.t()).relu()
    return h @ wait(y)


@case
def result_ignored(wait: Any, y: torch.Tensor, x: torch.Tensor) -> Any:
    wait(y)
    return x + 1


@case
def result_ignored_then_input_used(wait: Any, y: torch.Tensor, x: torch.Tensor) -> Any:
    wait(y)
    return y * 2 + x


@case
def only_a_slice(wait: Any, y: torch.Tensor, x: torch.Tensor) -> Any:
    return wait(y[:1]).sum() + x


@case
def slice_of_the_result(wait: Any, y: torch.Tensor, x: torch.Tensor) -> Any:
    return wait(y)[:1, 1:] + x[:1, 1:]


@case
def mutated_afterwards(wait: Any, y: torch.Tensor, x: torch.Tensor) -> Any:
    z = wait(y)
    z.add_(1)
    return z * 2 + x


@case
def input_mutated_afterwards(wait: Any, y: torch.Tensor, x: torch.Tensor) -> Any:
    wait(y)
    y.add_(1)
    return y * 2 + x


@case
def mutated_through_the_result(wait: Any, y: torch.Tensor, x: torch.Tensor) -> Any:
    wait(y).add_(1)
    return x + 1


@case
def overwritten_afterwards(wait: Any, y: torch.Tensor, x: torch.Tensor) -> Any:
    z = wait(y) + x
    y.zero_()
    return z


@case
def returned_itself(wait: Any, y: torch.Tensor, x: torch.Tensor) -> Any:
    return wait(y), x + 1


@case
def returned_as_a_view(wait: Any, y: torch.Tensor, x: torch.Tensor) -> Any:
    return wait(y).view(-1)[1:], x + 1


@case
def several_outputs(wait: Any, y: torch.Tensor, x: torch.Tensor) -> Any:
    z = wait(y)
    return z + x, z.sum(0), z.t(), {"twice": z * 2}


@case
def waited_twice(wait: Any, y: torch.Tensor, x: torch.Tensor) -> Any:
    return wait(wait(y)) + wait(y) * x


@case
def under_a_condition(wait: Any, y: torch.Tensor, x: torch.Tensor) -> Any:
    return wait(y) + x if x.shape[1] > 2 else x


@modes
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", CASES)
def test_case(name: str, training: bool, mode: str, late: Late) -> None:
    function = CASES[name]
    region = Region(lambda y, x: function(hi.wait_tensor, y, x), mode)
    size = dist.get_world_size()
    values = torch.arange(3.0 * size, device=late.device).view(size, 3)

    def inputs() -> torch.Tensor:
        return values.clone().requires_grad_(training)

    region(buffer(late), inputs())
    expected_y, expected_x = late.arrived(buffer(late)), inputs()
    expected = function(lambda tensor: tensor, expected_y, expected_x)
    y, x, found = buffer(late), inputs(), waited_by_tensor()
    issue(late, y)
    assert registry_size() == 1
    result = region(y, x)
    torch.testing.assert_close(result, expected)
    assert registry_size() == 0
    torch.testing.assert_close(y, expected_y)  # arrived, and changed as the function changes it
    assert waited_by_tensor() - found == 1
    assert region.compiled == 1
    if training:
        loss_of(result).backward()
        loss_of(expected).backward()
        torch.testing.assert_close(x.grad, expected_x.grad)
        torch.testing.assert_close(y, expected_y)  # the backward has not used its memory for something else


def loss_of(result: Any) -> torch.Tensor:
    flat = torch.utils._pytree.tree_leaves(result)
    return torch.stack([tensor.square().sum() for tensor in flat if tensor.requires_grad]).sum()


def test_data_is_late_here(late: Late, rank: int, size: int) -> None:
    """Without the wait a region reads what was there before: what every other test of this file relies on."""
    region = Region(lambda y: y * 2, "eager")
    y = buffer(late)
    before: list[float] | None = None
    if rank != 0:
        with hi.allow_inflight_collective_as_graph_input():
            late.all_to_all(y)
        before = region(y)[0].tolist()
    assert_on_all_ranks(rank == 0 or before is not None)  # rank 0 issues after the others have looked
    if rank == 0:
        with hi.allow_inflight_collective_as_graph_input():
            late.all_to_all(y)
    else:
        assert before == [-2.0] * 3
    torch.testing.assert_close(hi.wait_tensor(y), late.arrived(y))


# ------------------------------------------------------------------------------------ several works, tensors


@modes
def test_one_work_with_several_outputs(mode: str, late: Late, rank: int, size: int) -> None:
    region = Region(lambda ys, x: sum(hi.wait_tensor(y) * (i + 1) for i, y in enumerate(ys)) + x, mode)
    x = torch.ones(3, device=late.device)
    outputs = [torch.full_like(x, -1.0) for _ in range(size)]
    region([torch.zeros_like(x) for _ in range(size)], x)
    dist.barrier()
    late.hold_up()
    with hi.allow_inflight_collective_as_graph_input():
        dist.all_gather(outputs, x + rank, async_op=True)
    found = waited_by_tensor()
    expected = sum((r + 1) * (r + 1) for r in range(size)) + 1.0
    assert region(outputs, x).tolist() == [expected] * 3
    assert waited_by_tensor() - found == 1
    assert registry_size() == 0
    assert region.compiled == 1


@modes
def test_two_works_on_one_tensor(mode: str, late: Late, rank: int, size: int) -> None:
    region = Region(lambda y: hi.wait_tensor(y) + 1, mode)
    y = torch.full((3,), 2.0, device=late.device)
    region(y)
    dist.barrier()
    with hi.allow_inflight_collective_as_graph_input():
        dist.all_reduce(y, async_op=True)
        late.hold_up()
        dist.all_reduce(y, async_op=True)
    assert registry_size() == 2
    assert region(y).tolist() == [2.0 * size * size + 1] * 3
    assert registry_size() == 0


@modes
def test_a_work_each_for_several_tensors(mode: str, late: Late) -> None:
    region = Region(lambda a, b, x: (hi.wait_tensor(a) * x, hi.wait_tensor(b).sum() + x), mode)
    a, b = buffer(late), buffer(late, 2, 5)
    x = torch.ones(3, device=late.device)
    region(torch.zeros_like(a), torch.zeros_like(b), x)
    issue(late, a, 1.0)
    issue(late, b, 100.0)
    first, second = region(a, b, x)
    torch.testing.assert_close(first, late.arrived(a, 1.0))
    torch.testing.assert_close(second, late.arrived(b, 100.0).sum() + x)
    assert registry_size() == 0


@modes
def test_waited_in_two_regions(mode: str, late: Late) -> None:
    """The second finds nothing to wait for, and the backward of neither changes what the other saved."""
    size = dist.get_world_size()

    def first(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (hi.wait_tensor(y) * (x @ x.t()).sin()[:, :1]).sum()

    def second(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (hi.wait_tensor(y) * x).sum()

    regions = Region(first, mode), Region(second, mode)
    x = torch.rand(size, 3, generator=torch.Generator().manual_seed(0)).to(late.device)
    for region in regions:
        region(buffer(late), x.clone().requires_grad_())
    y = issue(late, buffer(late))
    compiled, alone = x.clone().requires_grad_(), x.clone().requires_grad_()
    losses = [region(y, compiled) for region in regions]
    data = late.arrived(y)
    references = [(data * (alone @ alone.t()).sin()[:, :1]).sum(), (data * alone).sum()]
    torch.testing.assert_close(losses, references)
    for loss in (losses[0], losses[1]):
        loss.backward()
    torch.stack(references).sum().backward()
    torch.testing.assert_close(compiled.grad, alone.grad)
    torch.testing.assert_close(y, data)


# ------------------------------------------------------------------------------------ shapes, recompilation


@modes
@pytest.mark.parametrize("dynamic", [True, None])
def test_dynamic_shapes(mode: str, dynamic: bool | None, late: Late) -> None:
    region = Region(lambda y, x: hi.wait_tensor(y) * 2 + x.sum(), mode, dynamic=dynamic)
    for width in (3, 5):
        region(buffer(late, width), torch.ones(width, device=late.device))
    for width in (8, 13, 6):
        x = torch.ones(width, device=late.device)
        y = issue(late, buffer(late, width))
        torch.testing.assert_close(region(y, x), late.arrived(y) * 2 + width)
    assert region.compiled == (1 if dynamic else 2)  # None: the second size makes it dynamic
    assert registry_size() == 0


@modes
def test_twenty_calls_with_fresh_tensors(mode: str, late: Late, rank: int) -> None:
    region = Region(lambda y, x: hi.wait_tensor(y) * 2 + x, mode)
    x = torch.ones(3, device=late.device)
    region(buffer(late), x)
    found = waited_by_tensor()
    for call in range(20):
        y = buffer(late)
        with hi.allow_inflight_collective_as_graph_input():
            if call in {7, 19}:
                late.all_to_all(y, call)
            else:
                dist.all_to_all_single(y, torch.full_like(y, call + rank), async_op=True)
        torch.testing.assert_close(region(y, x), late.arrived(y, call) * 2 + x)
        assert registry_size() == 0
    assert waited_by_tensor() - found == 20
    assert region.compiled == 1


@modes
def test_async_collective_tensors_and_plain_ones_alternate(mode: str, late: Late, rank: int, size: int) -> None:
    world = dist.group.WORLD
    assert world is not None
    region = Region(lambda y, x: hi.wait_tensor(y) * 2 + x, mode)
    x = torch.ones(3, device=late.device)

    def functional() -> torch.Tensor:
        late.hold_up()
        sent = torch.full((size, 3), 10.0 + rank, device=late.device)
        output = funcol.all_to_all_single(sent, None, None, world)
        assert isinstance(output, funcol.AsyncCollectiveTensor)
        return output

    region(buffer(late), x)
    region(functional(), x)
    for _ in range(3):
        for made in (lambda: issue(late, buffer(late)), functional):
            y: torch.Tensor = made()  # type: ignore[no-untyped-call]  # mypy sees no types in a lambda
            torch.testing.assert_close(region(y, x), late.arrived(buffer(late)) * 2 + x)
            assert registry_size() == 0
    assert region.compiled == 2


# -------------------------------------------------------------------------------------------- graph breaks


@modes
@pytest.mark.parametrize("where", ["before", "after"])
def test_a_graph_break(mode: str, where: str, late: Late) -> None:
    def function(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        if where == "before":
            torch._dynamo.graph_break()
        z = hi.wait_tensor(y)
        if where == "after":
            torch._dynamo.graph_break()
        return z * 2 + x

    region = Region(function, mode, fullgraph=False)
    x = torch.ones(3, device=late.device)
    region(buffer(late), x)
    y = issue(late, buffer(late))
    torch.testing.assert_close(region(y, x), late.arrived(y) * 2 + x + 1)
    assert region.compiled == 2
    assert registry_size() == 0


# ------------------------------------------------------------------------------------------- inductor passes

REORDERING: dict[str, dict[str, Any]] = {
    "compute_comm_overlap": {"reorder_for_compute_comm_overlap": True},
    "sink_waits": {
        "reorder_for_compute_comm_overlap": True,
        "reorder_for_compute_comm_overlap_passes": ["sink_waits"],
    },
    "raise_comms": {
        "reorder_for_compute_comm_overlap": True,
        "reorder_for_compute_comm_overlap_passes": ["raise_comms", "reorder_compute_for_overlap", "sink_waits"],
    },
    "iterative": {
        "reorder_for_compute_comm_overlap": True,
        "reorder_for_compute_comm_overlap_passes": [
            "reorder_communication_preserving_peak_memory",
            "sink_waits_iterative",
        ],
    },
    "overlap_scheduling": {"aten_distributed_optimizations.enable_overlap_scheduling": True},
    "peak_memory": {"reorder_for_peak_memory": True, "reorder_for_locality": True},
}


# torch 2.11's own pass asks for the one device of a group, which torch 2.11 deprecates
@pytest.mark.filterwarnings("ignore:`_get_pg_default_device` will be deprecated", "ignore:Multiple backends are")
@pytest.mark.parametrize("used", [True, False], ids=["result used", "input used"])
@pytest.mark.parametrize("passes", REORDERING)
def test_reordering_keeps_the_wait_before_the_first_use(passes: str, used: bool, late: Late) -> None:
    if passes == "iterative" and compat.TORCH < (2, 10):
        pytest.skip("torch 2.8 has no such pass")
    size, world = dist.get_world_size(), dist.group.WORLD
    assert world is not None

    def function(y: torch.Tensor, x: torch.Tensor, wide: torch.Tensor) -> tuple[torch.Tensor, ...]:
        z = hi.wait_tensor(y) if used else y
        if not used:
            hi.wait_tensor(y)
        independent = (wide @ wide).relu() @ wide
        total = funcol.all_reduce(x * 3, "sum", world)  # a collective to reorder around
        return z * 2 + x, independent, total * z

    if passes == "overlap_scheduling" and late.device.type == "cpu":
        pytest.skip("inductor's overlap scheduling asks Triton for the GPU's bandwidth")
    known = {name: value for name, value in REORDERING[passes].items() if _inductor_has(name)}
    assert known
    x, wide = torch.ones(size, 3, device=late.device), torch.eye(64, device=late.device)
    with torch._inductor.config.patch(known):
        region = torch.compile(function, fullgraph=True, backend="inductor")
        _, codes = run_and_get_code(region, buffer(late), x, wide)
        lines = codes[0][codes[0].index("def call(") :].splitlines()
        waits = [i for i, line in enumerate(lines) if "_c10d_functional.wait_tensor.default(" in line]
        assert len(waits) == 2
        name = next(found.group(1) for i in waits if (found := re.search(r"wait_tensor\.default\((arg\w+)", lines[i])))
        first_wait = next(i for i in waits if f"({name})" in lines[i])
        reads = [
            i
            for i, line in enumerate(lines)
            if re.search(rf"\b{name}\b", line) and not re.search(r"assert_|^\s*del |args", line)
        ]
        assert reads[0] == first_wait
        y = issue(late, buffer(late))
        torch.testing.assert_close(region(y, x, wide), (late.arrived(y) * 2 + x, wide, 3.0 * size * late.arrived(y)))
    assert registry_size() == 0


def _inductor_has(name: str) -> bool:
    found: Any = torch._inductor.config
    for part in name.split("."):
        if not hasattr(found, part):
            return False
        found = getattr(found, part)
    return True


# ------------------------------------------------------------------------------------------------ backward


class _WaitsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(y)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (y,) = ctx.saved_tensors
        return gradients[0] * hi.wait_tensor(y), None


@modes
@pytest.mark.parametrize("issued", ["before the forward", "before the backward"])
def test_wait_in_the_backward_graph(mode: str, issued: str, late: Late) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _WaitsInBackward.apply(x, y)  # type: ignore[no-untyped-call]  # torch's own signature
        return result.sum()

    region = Region(function, mode)
    x = torch.ones(dist.get_world_size(), 3, device=late.device, requires_grad=True)
    region(x, buffer(late)).backward()
    x.grad = None
    y = buffer(late)
    if issued == "before the forward":
        issue(late, y)
        loss = region(x, y)
    else:
        loss = region(x, y)
        issue(late, y)
    loss.backward()
    torch.testing.assert_close(x.grad, late.arrived(y))
    assert registry_size() == 0
    assert region.compiled == 1


class _WaitsForItsGradient(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return hi.wait_tensor(gradients[0])


class _SendsItsGradient(torch.autograd.Function):
    late: Any = None

    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return issue(_SendsItsGradient.late, torch.full_like(gradients[0], -1.0))


@modes
def test_a_gradient_in_flight_is_waited_in_the_backward_graph(mode: str, late: Late) -> None:
    """The eager part of the backward issues an exchange; the compiled part, which comes next, waits for it."""
    _SendsItsGradient.late = late

    def function(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _WaitsForItsGradient.apply(x * 3)  # type: ignore[no-untyped-call]  # torch's own
        return result

    region = Region(function, mode)
    x = torch.ones(dist.get_world_size(), 3, device=late.device, requires_grad=True)
    for _ in range(2):  # the backward graph is compiled in the first
        x.grad = None
        _SendsItsGradient.apply(region(x)).sum().backward()  # type: ignore[no-untyped-call]  # torch's own
        torch.testing.assert_close(x.grad, 3 * late.arrived(x.detach()))
        assert registry_size() == 0


# --------------------------------------------------------------------- from graph to graph, other inputs, modes


@modes
def test_issued_in_a_previous_compiled_graph(mode: str, late: Late, rank: int, size: int) -> None:
    """A raw operator issues and nobody waits in that graph. Its input is an input of the graph on purpose.

    Inductor takes the memory of an intermediate for something else after its last use, and without a wait in the
    graph it does not know that the exchange still reads it.
    """
    world = dist.group.WORLD
    assert world is not None
    name = world.group_name

    def first(sent: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ops._c10d_functional.all_to_all_single(sent, [1] * size, [1] * size, name), x.sin()

    issuing, waiting = Region(first, mode), Region(lambda y, x: hi.wait_tensor(y) * 2 + x, mode)
    x, sent = torch.ones(size, 3, device=late.device), torch.full((size, 3), 10.0 + rank, device=late.device)
    waiting(*issuing(sent, x))
    dist.barrier()
    late.hold_up()
    y, sine = issuing(sent, x)
    assert registry_size() == 1
    torch.testing.assert_close(waiting(y, sine), late.arrived(y) * 2 + x.sin())
    assert registry_size() == 0


@modes
def test_dtensor_inputs(mode: str, late: Late, size: int) -> None:
    """The local tensor is what is in flight; of the DTensor itself torch says that it cannot be waited for."""
    mesh = init_device_mesh(late.device.type, (size,))

    def function(d: DTensor, x: torch.Tensor) -> tuple[DTensor, torch.Tensor]:
        local = hi.wait_tensor(d.to_local())
        return DTensor.from_local(local * 2, d.device_mesh, d.placements, run_check=False), local.sum() + x

    region = Region(function, mode)
    x = torch.ones(3, device=late.device)
    region(DTensor.from_local(buffer(late), mesh, [Shard(0)]), x)
    for placement in (Shard(0), Shard(0)):
        given = DTensor.from_local(buffer(late), mesh, [placement])
        issue(late, given.to_local())
        doubled, total = region(given, x)
        data = late.arrived(buffer(late))
        assert doubled.shape == (size * size, 3)
        torch.testing.assert_close(doubled.to_local(), data * 2)
        torch.testing.assert_close(total, data.sum() + x)
        assert registry_size() == 0
    assert region.compiled == 1
    given = DTensor.from_local(buffer(late), mesh, [Replicate()])
    with pytest.raises(Exception, match="does not have a sharding strategy registered"):
        Region(hi.wait_tensor, mode)(given)


@modes
@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode: str, guard: Any, late: Late) -> None:
    region = Region(lambda y, x: hi.wait_tensor(y) * 2 + x, mode)
    with guard():
        x = torch.ones(3, device=late.device)
        region(buffer(late), x)
        y = issue(late, buffer(late))
        torch.testing.assert_close(region(y, x), late.arrived(y) * 2 + x)
        assert region.compiled == 1
    assert registry_size() == 0


@modes
def test_waits_under_activation_checkpointing(mode: str, late: Late) -> None:
    """The backward runs the wait again and finds nothing left to wait for."""

    def block(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (hi.wait_tensor(y) * x).sin()

    def function(y: torch.Tensor, x: torch.Tensor) -> Any:
        return checkpoint(block, y, x, use_reentrant=False)

    region = Region(function, mode)
    x = torch.ones(dist.get_world_size(), 3, device=late.device, requires_grad=True)
    region(buffer(late), x).sum().backward()
    x.grad = None
    y = issue(late, buffer(late))
    region(y, x).sum().backward()
    data = late.arrived(y)
    torch.testing.assert_close(x.grad, (data * x.detach()).cos() * data)
    assert registry_size() == 0
    assert region.compiled == 1


# ------------------------------------------------------------------------------------------ export, ahead of time


class _OverArch(torch.nn.Module):
    def forward(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return hi.wait_tensor(y) * 2 + x


def exported(late: Late, dynamic: bool) -> torch.export.ExportedProgram:
    width = torch.export.Dim("width", min=2, max=64)
    shapes = {"y": {1: width}, "x": {1: width}} if dynamic else None
    size = dist.get_world_size()
    example = (buffer(late, 4), torch.ones(size, 4, device=late.device))
    return torch.export.export(_OverArch(), example, dynamic_shapes=shapes)


@pytest.mark.parametrize("dynamic", [False, True])
def test_export(dynamic: bool, late: Late, size: int, tmp_path: Path) -> None:
    program = exported(late, dynamic)
    assert [node.name for node in program.graph.nodes if "wait_tensor" in str(node.target)] == ["wait_tensor"]
    torch.export.save(program, tmp_path / "region.pt2")
    for way in (program, torch.export.load(tmp_path / "region.pt2")):
        run = way.module()
        for width in (4, 7) if dynamic else (4,):
            x = torch.ones(size, width, device=late.device)
            y = issue(late, buffer(late, width))
            torch.testing.assert_close(run(y, x), late.arrived(y) * 2 + x)
            assert registry_size() == 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_ahead_of_time_inductor(late: Late, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if late.device.type == "cuda":
        pytest.skip("torch 2.11 for CUDA 13 crashes as it loads any such package, one of plain arithmetic too")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # ranks that share one read each other's half files
    path = str(tmp_path / "region.pt2")
    run = torch._inductor.aoti_load_package(
        torch._inductor.aoti_compile_and_package(exported(late, dynamic=True), package_path=path)
    )
    for width in (4, 7):
        x = torch.ones(size, width, device=late.device)
        y = issue(late, buffer(late, width))
        torch.testing.assert_close(run(y, x), late.arrived(y) * 2 + x)
        assert registry_size() == 0


# ---------------------------------------------------------------------------------------------- CUDA graphs


# torch captures nothing once, to begin the graphs' memory pool
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_reduce_overhead(late: Late, device: torch.device, size: int) -> None:
    """The wait is not part of the graph that is replayed: every call waits for its own exchange."""
    if device.type != "cuda":
        pytest.skip("mode='reduce-overhead' records CUDA graphs; run with HPC_INFLIGHT_TEST_DEVICE=cuda")
    region = torch.compile(lambda y, x: hi.wait_tensor(y) * 2 + x, fullgraph=True, mode="reduce-overhead")
    x = torch.ones(size, 3, device=device)
    static = buffer(late)
    for base in (10.0, 20.0, 30.0, 40.0, 50.0):  # warm-up, recording, and replays
        for y in (static, buffer(late)):
            y.fill_(-1.0)
            torch.compiler.cudagraph_mark_step_begin()
            issue(late, y, base)
            torch.testing.assert_close(region(y, x).clone(), late.arrived(y, base) * 2 + x)
            assert registry_size() == 0
