"""The memory of tensors, on any device: what lies in order, what overlaps, and copies where a call needs them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

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
    return tensor if plain(tensor) else torch.empty(tensor.numel(), dtype=tensor.dtype, device=tensor.device)


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
    return _flat(tensors), True


@torch.inference_mode()
def copy(value: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy elements in order, whatever the layouts; nothing happens where they are in place already."""
    if value.data_ptr() != tensor.data_ptr() or not plain(tensor) or not plain(value):
        tensor.copy_(value.view(tensor.shape) if value.is_contiguous() else value)


@torch.inference_mode()
def flatten(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a new contiguous tensor with the elements of all, in order."""
    flat = _flat(tensors)
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


def _flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    like = tensors[0]
    return torch.empty(sum(t.numel() for t in tensors), dtype=like.dtype, device=like.device)
