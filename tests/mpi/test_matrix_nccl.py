"""The matrix of test_matrix.py on the NCCL communicator, which runs on a stand-in for CUDA and NCCL on CPU tensors.

A stream of the stand-in is late by a millisecond at every step, so that a wait that is missing shows as wrong numbers.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from hpc_inflight import _cupy
from hpc_inflight.testing.fake_nccl import FakeRuntime

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpc_inflight.process_group import ProcessGroupInflight


def matrix_of_our_own() -> Any:
    """Load test_matrix.py once more, so that its settings can differ."""
    path = Path(__file__).with_name("test_matrix.py")
    spec = importlib.util.spec_from_file_location(f"{__name__}_matrix", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


matrix = matrix_of_our_own()
matrix.STEPWISE = True
for operator in ("BAND", "BOR", "BXOR"):
    matrix.DEFINED[operator] = ()
matrix.MISSING = {"recv_from_any"}
matrix.THIN = 3

Team = matrix.Team
teams_on_mpi = matrix.teams
_no_grad = matrix._no_grad

test_every_dtype_moves_bit_for_bit = matrix.test_every_dtype_moves_bit_for_bit
test_every_layout = matrix.test_every_layout
test_every_operator_of_every_dtype = matrix.test_every_operator_of_every_dtype
test_every_group = matrix.test_every_group
test_every_bit_pattern_of_fp8_survives = matrix.test_every_bit_pattern_of_fp8_survives
test_integer_sums_and_products_wrap_around = matrix.test_integer_sums_and_products_wrap_around
test_undefined_reductions_are_refused = matrix.test_undefined_reductions_are_refused_before_any_communication
test_expanded_outputs_are_refused = matrix.test_expanded_outputs_are_refused
test_inputs_and_outputs_that_share_memory = matrix.test_inputs_and_outputs_that_share_memory


def on_fake_nccl(group: ProcessGroupInflight) -> None:
    """Have a group send its CPU tensors to an NCCL communicator on the stand-in."""

    def open_nccl(self: Any, _call: str, _tensor: torch.Tensor) -> Any:
        if self._coalescing is not None and self._coalesces():
            self._note_call()
        return self._nccl

    group._open_nccl("test", -1)
    group._open = types.MethodType(open_nccl, group)  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def teams(teams_on_mpi: dict[str, Any], rank: int) -> Iterator[dict[str, Any]]:
    patch = pytest.MonkeyPatch()
    runtime = FakeRuntime(late_s=1e-3)
    patch.setattr(_cupy, "_runtime", runtime)
    try:
        for team in teams_on_mpi.values():
            on_fake_nccl(team.group)
        yield teams_on_mpi
        assert not runtime.open_groups()
    finally:
        patch.undo()
        world = teams_on_mpi["world"].group
        world._nccl.shutdown(60)
        del world._open
        world._nccl, world._nccl_index = None, None


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("view", ["negated", "conjugated"])
def test_what_one_rank_alone_hands_over_as_a_view_counts_by_its_values(
    teams: dict[str, Any], rank: int, size: int, view: str
) -> None:
    """Where all ranks do so, a sum of the memory is the memory of the sum, and shows nothing."""
    world = teams["world"].group
    values = [torch.full((4,), complex(r + 1, r + 2)) for r in range(size)]

    def handed_over(tensor: torch.Tensor) -> torch.Tensor:
        if rank:
            return tensor
        return torch._neg_view(-tensor) if view == "negated" else tensor.conj().resolve_conj().conj()

    def read(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.resolve_conj().resolve_neg()

    own, gathered, part = handed_over(values[rank].clone()), torch.zeros(4 * size) + 0j, torch.zeros(4) + 0j
    assert torch.equal(read(own), values[rank])
    world._allgather_base(gathered, own, torch._C._distributed_c10d.AllgatherOptions()).wait()
    assert torch.equal(gathered, torch.cat(values))
    whole = handed_over(values[rank].repeat(size))
    world._reduce_scatter_base(part, whole, dist.ReduceScatterOptions()).wait()
    assert torch.equal(part, sum(values, torch.zeros(4)))
    world.allreduce([own], dist.AllreduceOptions()).wait()
    assert torch.equal(read(own), sum(values, torch.zeros(4)))
