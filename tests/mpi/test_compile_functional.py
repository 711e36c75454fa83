"""Functional collectives inside a compiled region, on late data: issued and waited for, whoever uses the result."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._inductor.utils import run_and_get_code
from torch.distributed import _functional_collectives as funcol

from hpc_inflight._torch_compat import registry_size
from hpc_inflight.testing import gather_on_all_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hpc_inflight.testing.late import Late

pytestmark = [pytest.mark.timeout(300), pytest.mark.once]

modes = pytest.mark.parametrize("mode", ["eager", "aot_eager", "inductor"])

# name -> the collective, and what it leaves, from what every rank sends (2 rows for each rank)
COLLECTIVES: dict[str, tuple[Callable[[torch.Tensor, Any], torch.Tensor], Callable[..., torch.Tensor]]] = {
    "all_reduce": (lambda t, group: funcol.all_reduce(t, "sum", group), lambda sent, _rank: torch.stack(sent).sum(0)),
    "all_gather_tensor": (
        lambda t, group: funcol.all_gather_tensor(t, 0, group),
        lambda sent, _rank: torch.cat(sent),
    ),
    "reduce_scatter_tensor": (
        lambda t, group: funcol.reduce_scatter_tensor(t, "sum", 0, group),
        lambda sent, rank: torch.stack(sent).sum(0)[2 * rank : 2 * rank + 2],
    ),
    "all_to_all_single": (
        lambda t, group: funcol.all_to_all_single(t, None, None, group),
        lambda sent, rank: torch.cat([s[2 * rank : 2 * rank + 2] for s in sent]),
    ),
    "broadcast": (lambda t, group: funcol.broadcast(t, 0, group), lambda sent, _rank: sent[0]),
}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compile_and_run(function: Callable[..., Any], mode: str, tensor: torch.Tensor) -> tuple[Any, list[str]]:
    """Compile, run once, and return the compiled function and the c10d operators that it calls, in order."""
    operators: list[str] = []

    def record(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        operators.extend(
            str(node.target).removesuffix(".default").split(".")[-1]
            for node in graph.graph.nodes
            if "_c10d_functional" in str(node.target)
        )
        return graph if mode == "eager" else make_boxed_func(graph.forward)

    if mode == "inductor":
        region = torch.compile(function, fullgraph=True, backend="inductor")
        _, codes = run_and_get_code(region, tensor)
        body = codes[0][codes[0].index("def call(") :]
        return region, re.findall(r"torch\.ops\._c10d_functional\.(\w+?)_?\.default\(", body)
    backend: Any = record if mode == "eager" else aot_autograd(fw_compiler=record)
    region = torch.compile(function, fullgraph=True, backend=backend)
    region(tensor)
    return region, [name.removesuffix("_") for name in operators]


@modes
@pytest.mark.parametrize("use", ["all", "only the last rank", "nobody"])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_issued_and_waited(name: str, use: str, mode: str, late: Late, rank: int, size: int) -> None:
    collective, reference = COLLECTIVES[name]
    world = dist.group.WORLD
    assert world is not None
    uses = {"all": True, "only the last rank": rank == size - 1, "nobody": False}[use]

    def function(tensor: torch.Tensor) -> torch.Tensor:
        received = collective(tensor * 2, world)
        return received * 3 if uses else tensor + 1

    sent = [torch.arange(4.0 * size).view(2 * size, 2) + 100 * r for r in range(size)]
    region, operators = compile_and_run(function, mode, torch.zeros(2 * size, 2, device=late.device))
    assert operators[-1] == "wait_tensor"  # also where nobody looks at the result
    assert len(operators) == 2
    if size > 1:
        dist.barrier()
    late.hold_up()
    result = region(sent[rank].to(late.device))
    assert registry_size() == 0
    expected = reference([2 * s for s in sent], rank) * 3 if uses else sent[rank] + 1
    torch.testing.assert_close(result.cpu(), expected)
    assert len(set(gather_on_all_ranks(operators[0]))) == 1


@modes
def test_chained_and_shared(mode: str, late: Late, rank: int, size: int) -> None:
    """Results that feed other collectives, two that are independent, and one that is used twice."""
    world = dist.group.WORLD
    assert world is not None

    def function(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        exchanged = funcol.all_to_all_single(tensor, None, None, world)
        total = funcol.all_reduce(tensor.sin(), "sum", world)
        gathered = funcol.all_gather_tensor(exchanged.cos(), 0, world)
        return exchanged + total, gathered.sum() + exchanged, total

    tensor = torch.arange(2.0 * size, device=late.device) + rank
    eager = [t.clone() for t in function(tensor)]
    region, operators = compile_and_run(function, mode, torch.zeros_like(tensor))
    assert operators.count("wait_tensor") == 3
    dist.barrier()
    late.hold_up()
    torch.testing.assert_close(list(region(tensor)), eager)
    assert registry_size() == 0
