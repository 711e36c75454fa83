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

from hpc_inflight import _cupy
from hpc_inflight.testing.fake_nccl import FakeRuntime

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

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
