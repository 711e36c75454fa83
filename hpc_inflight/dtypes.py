"""Which dtype reduces how: plain tables of MPI's names and NCCL's numbers, so that reading them needs neither."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from hpc_inflight.errors import UnsupportedError

_FLOAT: Final = frozenset({"SUM", "AVG", "PRODUCT", "MIN", "MAX", "PREMUL_SUM"})
_INT: Final = frozenset({"SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"})
_BOOL: Final = frozenset({"SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"})
_COMPLEX: Final = frozenset({"SUM", "AVG", "PREMUL_SUM"})

MPI_OP: Final = {
    "SUM": "SUM",
    "AVG": "SUM",  # divided by the group's size afterwards
    "PREMUL_SUM": "SUM",  # scaled beforehand
    "PRODUCT": "PROD",
    "MIN": "MIN",
    "MAX": "MAX",
    "BAND": "BAND",
    "BOR": "BOR",
    "BXOR": "BXOR",
}
# bool is a truth value, not a small integer: its sum is "any", its product "all" (True + True stays True)
_MPI_BOOL_OP: Final = {
    "SUM": "LOR",
    "MAX": "LOR",
    "BOR": "LOR",
    "PRODUCT": "LAND",
    "MIN": "LAND",
    "BAND": "LAND",
    "BXOR": "LXOR",
}

# dtype -> (MPI type of the reduction, dtype it is computed in, operators that are defined)
_REDUCE: Final = {
    torch.float64: ("DOUBLE", torch.float64, _FLOAT),
    torch.float32: ("FLOAT", torch.float32, _FLOAT),
    # half precision is reduced in float32 and rounded once, at the end
    torch.float16: ("FLOAT", torch.float32, _FLOAT),
    torch.bfloat16: ("FLOAT", torch.float32, _FLOAT),
    torch.int8: ("INT8_T", torch.int8, _INT),
    torch.int16: ("INT16_T", torch.int16, _INT),
    torch.int32: ("INT32_T", torch.int32, _INT),
    torch.int64: ("INT64_T", torch.int64, _INT),
    torch.uint8: ("UINT8_T", torch.uint8, _INT),
    torch.uint16: ("UINT16_T", torch.uint16, _INT),
    torch.uint32: ("UINT32_T", torch.uint32, _INT),
    torch.uint64: ("UINT64_T", torch.uint64, _INT),
    torch.bool: ("C_BOOL", torch.bool, _BOOL),
    torch.complex64: ("C_FLOAT_COMPLEX", torch.complex64, _COMPLEX),
    torch.complex128: ("C_DOUBLE_COMPLEX", torch.complex128, _COMPLEX),
}

# MPI's sums of small integers saturate in some libraries (Open MPI's vectorised loops) and wrap in others; in 32 bits
# both are right, and narrowing wraps as torch's own arithmetic does
_WIDENED: Final = frozenset({torch.int8, torch.int16, torch.uint8, torch.uint16})

# Data movement needs only the width of an element, so bf16, fp8, bool and complex all move.
MOVE_TYPE: Final = {1: "UINT8_T", 2: "UINT16_T", 4: "UINT32_T", 8: "UINT64_T", 16: "C_DOUBLE_COMPLEX"}


@dataclass(frozen=True)
class ReduceSpec:
    """How one operator reduces one dtype.

    Attributes:
        mpi_type: Name of the MPI datatype of the reduction.
        mpi_op: Name of the MPI operator.
        compute_dtype: The dtype to convert to before and from after; the tensor's own for most.
        average: Divide the result by the group's size.
    """

    mpi_type: str
    mpi_op: str
    compute_dtype: torch.dtype
    average: bool


def reduce_spec(call: str, op: str, dtype: torch.dtype) -> ReduceSpec:
    """Look up how ``op`` reduces ``dtype``.

    **Local:** any rank, any time.

    Args:
        call: The collective's name, for the error.
        op: Operator name as in ``torch.distributed.ReduceOp``.
        dtype: The tensor's dtype.

    Raises:
        UnsupportedError: The operator is not defined for the dtype. It depends on arguments that every
            rank passes alike, so every rank raises it, before any communication.
    """
    if dtype not in _REDUCE:
        known = ", ".join(str(d).removeprefix("torch.") for d in _REDUCE)
        msg = f"{call}: {dtype} has no reduction; expected one of {known}; convert the tensor first"
        raise UnsupportedError(msg)
    mpi_type, compute, defined = _REDUCE[dtype]
    if op not in defined:
        msg = (
            f"{call}: ReduceOp.{op} is not defined for {dtype}; expected one of {', '.join(sorted(defined))}; "
            "choose another operator or dtype"
        )
        raise UnsupportedError(msg)
    if dtype in _WIDENED and op in {"SUM", "PRODUCT"}:
        mpi_type, compute = "INT32_T", torch.int32
    table = _MPI_BOOL_OP if dtype is torch.bool else MPI_OP
    return ReduceSpec(mpi_type, table[op], compute, op == "AVG")


# NCCL's own numbers (nccl.h); CuPy's table of them ends before bfloat16
NCCL_UINT8: Final = 1
_NCCL_OP: Final = {"SUM": 0, "PREMUL_SUM": 0, "PRODUCT": 1, "MAX": 2, "MIN": 3, "AVG": 4}
_NCCL_BOOL_OP: Final = {"SUM": 2, "MAX": 2, "PRODUCT": 3, "MIN": 3}  # of bytes that are 0 or 1: any is MAX, all is MIN

# dtype -> (NCCL's type of the reduction, dtype it is computed in, NCCL's elements in one)
_NCCL_REDUCE: Final = {
    torch.float64: (8, torch.float64, 1),
    torch.float32: (7, torch.float32, 1),
    torch.float16: (6, torch.float16, 1),
    torch.bfloat16: (9, torch.bfloat16, 1),
    torch.int8: (0, torch.int8, 1),
    torch.int16: (2, torch.int32, 1),  # NCCL has no integers of 16 bits; narrowing wraps as torch's arithmetic does
    torch.int32: (2, torch.int32, 1),
    torch.int64: (4, torch.int64, 1),
    torch.uint8: (1, torch.uint8, 1),
    torch.uint16: (2, torch.int32, 1),
    torch.uint32: (3, torch.uint32, 1),
    torch.uint64: (5, torch.uint64, 1),
    torch.bool: (1, torch.bool, 1),
    torch.complex64: (7, torch.complex64, 2),
    torch.complex128: (8, torch.complex128, 2),
}


@dataclass(frozen=True)
class NcclSpec:
    """How NCCL reduces one dtype by one operator.

    Attributes:
        nccl_type: Number of the NCCL datatype.
        nccl_op: Number of the NCCL operator.
        compute_dtype: The dtype to convert to before and from after; the tensor's own for most.
        width: NCCL's elements in one element: two for complex numbers.
        direct: The two dtypes are the same.
    """

    nccl_type: int
    nccl_op: int
    compute_dtype: torch.dtype
    width: int
    direct: bool


def nccl_spec(call: str, op: str, dtype: torch.dtype) -> NcclSpec:
    """Look up how NCCL reduces ``dtype`` by ``op``; what is defined is what is for MPI, without the bitwise operators.

    **Local:** any rank, any time.

    Args:
        call: The collective's name, for the error.
        op: Operator name as in ``torch.distributed.ReduceOp``.
        dtype: The tensor's dtype.

    Raises:
        UnsupportedError: The operator is not defined for the dtype, or not by NCCL.
    """
    reduce_spec(call, op, dtype)
    table = _NCCL_BOOL_OP if dtype is torch.bool else _NCCL_OP
    if op not in table:
        msg = (
            f"{call}: NCCL has no ReduceOp.{op}; expected one of {', '.join(sorted(table))}; "
            "reduce a CPU tensor of this group instead"
        )
        raise UnsupportedError(msg)
    nccl_type, compute, width = _NCCL_REDUCE[dtype]
    return NcclSpec(nccl_type, table[op], compute, width, direct=compute is dtype)
