"""Tensors as MPI sees them: address, count and type, with a copy only where the layout needs one."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import torch

from hpc_inflight import dtypes
from hpc_inflight._mpi import mpi
from hpc_inflight.config import config
from hpc_inflight.errors import InvalidArgumentError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Buffer = tuple[Any, int, Any]

# checks -----------------------------------------------------------------------------------------------------


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


def check_output(call: str, tensor: torch.Tensor, argument: str) -> None:
    """Refuse an output that cannot be written element by element; otherwise as `check_tensor`.

    Raises:
        UnsupportedError: As `check_tensor`.
        InvalidArgumentError: Several elements share one place in memory, as in an expanded tensor.
    """
    check_tensor(call, tensor, argument)
    if not tensor.is_contiguous() and any(
        stride == 0 and length > 1 for stride, length in zip(tensor.stride(), tensor.shape, strict=True)
    ):
        msg = (
            f"{call}: {argument} of shape {tuple(tensor.shape)} and strides {tensor.stride()} has several elements in "
            "one place of memory; expected one that can be written; call contiguous() or clone() first"
        )
        raise InvalidArgumentError(msg)


def check_same(
    call: str, tensors: Sequence[torch.Tensor], like: torch.Tensor, argument: str, *, output: bool = False
) -> None:
    """Refuse a list with a tensor that MPI cannot address, or with a dtype other than ``like``'s.

    Raises:
        UnsupportedError: As `check_tensor`.
        InvalidArgumentError: A dtype differs, or an output cannot be written.
    """
    check = check_output if output else check_tensor
    for i, tensor in enumerate(tensors):
        name = argument if len(tensors) == 1 else f"{argument}[{i}]"
        check(call, tensor, name)
        if tensor.dtype is not like.dtype:
            msg = f"{call}: {name} is {tensor.dtype}; expected {like.dtype} as the input; convert one of them"
            raise InvalidArgumentError(msg)


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


# copies: in inference mode, since they belong to no graph and may write to leaves and inference tensors ---------


def plain(tensor: torch.Tensor) -> bool:
    """Say whether the memory of the tensor, read in order, is its values in order."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Say whether two contiguous tensors share memory, which MPI forbids for a send and a receive buffer."""
    first, second = one.data_ptr(), other.data_ptr()
    return first < second + other.nbytes and second < first + one.nbytes


def touch(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Say whether two tensors of any layout may share memory."""
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() and (
        not (plain(one) and plain(other)) or overlap(one, other)
    )


def source(tensor: torch.Tensor, target: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``tensor``, or a contiguous copy where its layout needs one or it shares memory with ``target``."""
    if plain(tensor) and (target is None or not overlap(tensor, target)):
        return tensor
    return flatten([tensor])


def target(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor``, or a new contiguous tensor of its size where its layout needs one."""
    return tensor if plain(tensor) else torch.empty(tensor.numel(), dtype=tensor.dtype)


def deliver(received: torch.Tensor, tensor: torch.Tensor) -> None:
    """Bring what `target` received into the caller's tensor."""
    if received is not tensor:
        unflatten(received, [tensor])


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return one tensor over all of them where they lie one behind the other in memory, as the chunks of one do."""
    end = tensors[0].data_ptr()
    for tensor in tensors:
        if tensor.data_ptr() != end or not plain(tensor):
            return None
        end += tensor.nbytes
    first, total = tensors[0].detach(), sum(t.numel() for t in tensors)
    if first.storage_offset() + total > first.untyped_storage().nbytes() // first.element_size():
        return None  # neighbours by chance: another storage begins where this one ends
    return first.as_strided((total,), (1,))


def flat_source(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the elements of all in order, without a copy where they lie so already."""
    whole = joined(tensors)
    return flatten(tensors) if whole is None else whole


def flat_target(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, bool]:
    """Return where to receive the elements of all, and whether `unflatten` must bring them to the tensors."""
    whole = joined(tensors)
    if whole is not None:
        return whole, False
    return torch.empty(sum(t.numel() for t in tensors), dtype=tensors[0].dtype), True


@torch.inference_mode()
def copy(value: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy elements in order, whatever the layouts; nothing happens where they are in place already."""
    if value.data_ptr() != tensor.data_ptr() or not plain(tensor) or not plain(value):
        tensor.copy_(value.view(tensor.shape) if value.is_contiguous() else value)


@torch.inference_mode()
def flatten(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a new contiguous tensor with the elements of all, in order."""
    like = tensors[0]
    flat = torch.empty(sum(t.numel() for t in tensors), dtype=like.dtype)
    offset = 0
    for tensor in tensors:
        flat[offset : offset + tensor.numel()].view(tensor.shape).copy_(tensor)
        offset += tensor.numel()
    return flat


@torch.inference_mode()
def unflatten(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Copy consecutive parts of ``flat`` into the tensors."""
    offset = 0
    for tensor in tensors:
        tensor.copy_(flat[offset : offset + tensor.numel()].view(tensor.shape))
        offset += tensor.numel()
