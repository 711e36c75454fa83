"""The matrix of tests/mpi/test_matrix.py on CUDA tensors: NCCL rounds half precision at every step.

Ranks that share one GPU take turns on it, so four ranks perform one in twelve combinations, and two one in three.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import pytest


def matrix_of_our_own() -> Any:
    """Load test_matrix.py once more, so that its settings can differ."""
    path = Path(__file__).parent.with_name("mpi") / "test_matrix.py"
    spec = importlib.util.spec_from_file_location("gpu_matrix", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


matrix = matrix_of_our_own()
matrix.DEVICE = torch.device("cuda")
matrix.STEPWISE = True
matrix.MISSING = {"recv_from_any"}
for operator in ("BAND", "BOR", "BXOR"):
    matrix.DEFINED[operator] = ()
ranks = int(os.environ.get("OMPI_COMM_WORLD_SIZE", os.environ.get("PMI_SIZE", "1")))
matrix.THIN = {1: 1, 2: 3}.get(ranks, 12)

teams = matrix.teams
_no_grad = matrix._no_grad
test_every_dtype_moves_bit_for_bit = matrix.test_every_dtype_moves_bit_for_bit
test_every_bit_pattern_of_fp8_survives = matrix.test_every_bit_pattern_of_fp8_survives
test_every_operator_of_every_dtype = matrix.test_every_operator_of_every_dtype
test_every_layout = matrix.test_every_layout
test_every_group = matrix.test_every_group
test_integer_sums_and_products_wrap_around = matrix.test_integer_sums_and_products_wrap_around
test_undefined_reductions_are_refused = matrix.test_undefined_reductions_are_refused_before_any_communication
test_expanded_outputs_are_refused = matrix.test_expanded_outputs_are_refused
test_inputs_and_outputs_that_share_memory = matrix.test_inputs_and_outputs_that_share_memory


def test_how_much_was_checked(capsys: pytest.CaptureFixture[str], rank: int, size: int) -> None:
    assert len(matrix.CHECKED) > 6000 // matrix.THIN // 4
    if rank == 0:
        with capsys.disabled():
            sys.stdout.write(f"\nmatrix: {len(matrix.CHECKED)} combinations checked on {size} ranks\n")
