"""Tensors as MPI sees them: address, count and type, with a copy only where the layout needs one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hpc_inflight import dtypes
from hpc_inflight._mpi import mpi
from hpc_inflight.errors import InvalidArgumentError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Sequence

Buffer = tuple[Any, int, Any]


def check_tensor(call: str, tensor: torch.Tensor, argument: str = "tensor") -> None:
    """Refuse what MPI cannot address.

    Raises:
        UnsupportedError: Not a dense tensor in CPU memory.
    """
    if tensor.layout is not torch.strided:
        msg = (
            f"{call}: {argument} has layout {tensor.layout}; expected a dense (torch.strided) tensor; "
            "call to_dense() first"
        )
        raise UnsupportedError(msg)
    if not tensor.is_cpu:
        msg = (
            f"{call}: {argument} is on {tensor.device}; this group moves CPU tensors; "
            "move it with .cpu(), or use a backend for that device"
        )
        raise UnsupportedError(msg)


def check_same(call: str, tensors: Sequence[torch.Tensor], like: torch.Tensor, argument: str) -> None:
    """Refuse a list whose tensors MPI cannot address, or whose dtypes differ from ``like``.

    Raises:
        UnsupportedError: As `check_tensor`.
        InvalidArgumentError: A dtype differs.
    """
    for i, tensor in enumerate(tensors):
        check_tensor(call, tensor, f"{argument}[{i}]")
        if tensor.dtype is not like.dtype:
            msg = f"{call}: {argument}[{i}] is {tensor.dtype}; expected {like.dtype} as the input; convert one of them"
            raise InvalidArgumentError(msg)


def reduce_buffer(tensor: torch.Tensor, mpi_type: Any, blocks: int = 1) -> Buffer:
    """Describe a contiguous tensor to a reduction; the caller keeps the tensor alive.

    Where a call divides the memory into ``blocks`` equal parts, mpi4py takes the count for that of one part.
    """
    return mpi().buffer.fromaddress(tensor.data_ptr(), tensor.nbytes), tensor.numel() // blocks, mpi_type


def move_buffer(tensor: torch.Tensor, blocks: int = 1) -> Buffer:
    """Describe a contiguous tensor to a data movement; otherwise as `reduce_buffer`."""
    datatype = getattr(mpi(), dtypes.MOVE_TYPE[tensor.element_size()])
    return reduce_buffer(tensor, datatype, blocks)


def vector_buffer(flat: torch.Tensor, counts: Sequence[int]) -> tuple[Any, list[int], Any]:
    """Describe a contiguous tensor as consecutive parts of ``counts`` elements."""
    address, _, datatype = move_buffer(flat)
    return address, list(counts), datatype


def plain(tensor: torch.Tensor) -> bool:
    """Say whether the memory of the tensor, read in order, is its values in order."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def flatten(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a new contiguous tensor with the elements of all, in order."""
    like = tensors[0]
    flat = torch.empty(sum(t.numel() for t in tensors), dtype=like.dtype)
    offset = 0
    for tensor in tensors:
        flat[offset : offset + tensor.numel()].view(tensor.shape).copy_(tensor)
        offset += tensor.numel()
    return flat


def unflatten(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Copy consecutive parts of ``flat`` into the tensors."""
    offset = 0
    for tensor in tensors:
        tensor.copy_(flat[offset : offset + tensor.numel()].view(tensor.shape))
        offset += tensor.numel()
