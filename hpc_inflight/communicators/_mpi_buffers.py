"""Tensors as MPI sees them: address, count and type, with a copy only where the layout needs one."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import torch

from hpc_inflight import dtypes
from hpc_inflight._mpi import mpi
from hpc_inflight.communicators._checks import check_writable, unusable
from hpc_inflight.config import config
from hpc_inflight.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Buffer = tuple[Any, int, Any]

# checks -----------------------------------------------------------------------------------------------------


def check_tensor(call: str, tensor: torch.Tensor, argument: str = "tensor") -> None:
    """Refuse what MPI cannot address.

    Raises:
        UnsupportedError: Not a dense tensor in CPU memory.
    """
    if tensor.layout is not torch.strided or not tensor.is_cpu:
        raise unusable(call, tensor, argument, "CPU")


def check_output(call: str, tensor: torch.Tensor, argument: str) -> None:
    """Refuse an output that cannot be written element by element; otherwise as `check_tensor`.

    Raises:
        UnsupportedError: As `check_tensor`.
        InvalidArgumentError: Several elements share one place in memory, as in an expanded tensor.
    """
    check_tensor(call, tensor, argument)
    check_writable(call, tensor, argument)


# buffers ----------------------------------------------------------------------------------------------------


def _memory(tensor: torch.Tensor) -> Any:
    return mpi().buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)


def reduce_buffer(tensor: torch.Tensor, mpi_type: Any, blocks: int = 1) -> Buffer:
    """Describe a contiguous tensor to a reduction; the caller keeps the tensor alive.

    Where a call divides the memory into ``blocks`` equal parts, mpi4py takes the count for that of one part.
    """
    return _memory(tensor), tensor.numel() // blocks, mpi_type


def move_buffer(tensor: torch.Tensor, blocks: int = 1) -> Buffer:
    """Describe a contiguous tensor to a data movement; otherwise as `reduce_buffer`.

    Past what MPI counts in an int, each part becomes one element of a type as large as the part.
    """
    count, base = tensor.numel(), _move_type(tensor.element_size())
    if count > config().max_count:
        return _memory(tensor), 1, _large_type(tensor.element_size(), count // blocks)
    return _memory(tensor), count // blocks, base


def vector_buffer(flat: torch.Tensor, counts: Sequence[int]) -> tuple[Any, list[int], Any]:
    """Describe a contiguous tensor as consecutive parts of ``counts`` elements.

    Past what MPI counts in an int, the parts are counted in their greatest common divisor.
    """
    unit = vector_unit("", counts)
    if unit == 1:
        return _memory(flat), list(counts), _move_type(flat.element_size())
    return _memory(flat), [count // unit for count in counts], _large_type(flat.element_size(), unit)


def vector_unit(call: str, counts: Sequence[int]) -> int:
    """Return in how many elements the parts of a vector are counted: 1 unless their sum is too large for an int.

    Raises:
        UnsupportedError: Too large even in their greatest common divisor.
    """
    total, limit = sum(counts), config().max_count
    if total <= limit:
        return 1
    unit = math.gcd(*counts)
    if total // unit > limit:
        msg = (
            f"{call}: {total} elements in parts of {list(counts)[:8]} are more than MPI counts ({limit}), also in "
            f"units of {unit}; make the parts multiples of a common size, such as whole rows"
        )
        raise UnsupportedError(msg)
    return unit


def chunks(tensor: torch.Tensor, mpi_type: Any) -> Iterator[Buffer]:
    """Describe a contiguous tensor to a reduction in parts that MPI can count; one part for all but huge tensors."""
    count, limit = tensor.numel(), config().max_count
    if count <= limit:
        yield reduce_buffer(tensor, mpi_type)
        return
    for part in tensor.view(-1).split(limit):
        yield reduce_buffer(part, mpi_type)


@functools.cache
def _move_type(width: int) -> Any:
    return getattr(mpi(), dtypes.MOVE_TYPE[width])


@functools.lru_cache(maxsize=64)
def _large_type(width: int, count: int) -> Any:
    """Return an MPI type of ``count`` elements; never freed, since programs use few sizes as large as that."""
    module, base, limit = mpi(), _move_type(width), config().max_count
    whole, rest = divmod(count, limit)
    if whole == 0:
        return base.Create_contiguous(rest).Commit()
    body = base.Create_contiguous(limit).Create_contiguous(whole)
    if rest:
        body = module.Datatype.Create_struct([1, rest], [0, whole * limit * width], [body, base])
    return body.Commit()
