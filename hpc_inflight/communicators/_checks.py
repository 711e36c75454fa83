"""What both transports refuse before any communication, in the same words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpc_inflight.errors import InflightError, InvalidArgumentError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    Check = Callable[[str, torch.Tensor, str], None]


def unusable(call: str, tensor: torch.Tensor, argument: str, place: str) -> InflightError:
    """Return the error for a tensor that is not dense, or not on the device of the call's first tensor."""
    if str(tensor.layout) != "torch.strided":
        return UnsupportedError(
            f"{call}: {argument} has layout {tensor.layout}; expected a dense (torch.strided) tensor; "
            "call to_dense() first"
        )
    move = ".cpu()" if place == "CPU" else f".to({place!r})"
    return UnsupportedError(
        f"{call}: {argument} is on {tensor.device}; this call moves {place} tensors; move it with {move}, as all "
        "tensors of a call are on one device"
    )


def check_writable(call: str, tensor: torch.Tensor, argument: str) -> None:
    """Refuse a dense output that cannot be written element by element.

    Raises:
        InvalidArgumentError: Several elements share one place in memory, as in an expanded tensor.
    """
    if not tensor.is_contiguous() and any(
        stride == 0 and length > 1 for stride, length in zip(tensor.stride(), tensor.shape, strict=True)
    ):
        msg = (
            f"{call}: {argument} of shape {tuple(tensor.shape)} and strides {tensor.stride()} has several elements in "
            "one place of memory; expected one that can be written; call contiguous() or clone() first"
        )
        raise InvalidArgumentError(msg)


def check_same(call: str, tensors: Sequence[torch.Tensor], like: torch.Tensor, argument: str, check: Check) -> None:
    """Refuse a list with a tensor that ``check`` refuses, or with a dtype other than ``like``'s.

    Raises:
        UnsupportedError: As ``check``.
        InvalidArgumentError: A dtype differs, or as ``check``.
    """
    for i, tensor in enumerate(tensors):
        name = argument if len(tensors) == 1 else f"{argument}[{i}]"
        check(call, tensor, name)
        if tensor.dtype is not like.dtype:
            msg = f"{call}: {name} is {tensor.dtype}; expected {like.dtype} as the input; convert one of them"
            raise InvalidArgumentError(msg)


def check_numel(call: str, argument: str, tensor: torch.Tensor, expected: int, of: str) -> None:
    """Refuse a tensor of another number of elements.

    Raises:
        InvalidArgumentError: It has not ``expected`` elements.
    """
    if tensor.numel() != expected:
        msg = f"{call}: {argument} has {tensor.numel()} elements; expected {expected} ({of}); check the shapes"
        raise InvalidArgumentError(msg)


def check_length(call: str, tensors: Sequence[torch.Tensor], size: int, argument: str) -> None:
    """Refuse a list that has not one tensor per rank.

    Raises:
        InvalidArgumentError: It has not ``size`` tensors.
    """
    if len(tensors) != size:
        msg = f"{call}: {argument} has {len(tensors)} tensors; expected {size}, one per rank of the group"
        raise InvalidArgumentError(msg)


def check_peer(call: str, peer: int | None, size: int, group: str) -> None:
    """Refuse a peer outside of the group; None is any rank.

    Raises:
        InvalidArgumentError: It is no rank of the group.
    """
    if peer is not None and not 0 <= peer < size:
        msg = f"{call}: peer rank {peer} is not in group {group}; expected 0 to {size - 1}"
        raise InvalidArgumentError(msg)


def split_counts(call: str, tensor: torch.Tensor, splits: Sequence[int], size: int, which: str) -> list[int]:
    """Return how many elements of ``tensor`` each rank gets: ``splits`` in rows of dimension 0, or even parts.

    Raises:
        InvalidArgumentError: The rows do not divide, or the splits do not add up to them.
    """
    rows = tensor.shape[0] if tensor.dim() else 1
    if not splits:
        if rows % size:
            msg = (
                f"{call}: {which} has {rows} rows, which do not divide by {size} ranks; "
                f"pad it, or pass {which}_split_sizes"
            )
            raise InvalidArgumentError(msg)
        return [tensor.numel() // size] * size
    if len(splits) != size or sum(splits) != rows or min(splits) < 0:
        msg = (
            f"{call}: {which}_split_sizes {list(splits)} must be {size} non-negative numbers "
            f"whose sum is {rows}, the rows of {which}"
        )
        raise InvalidArgumentError(msg)
    row = tensor.numel() // rows if rows else 0
    return [n * row for n in splits]


def check_own_split(call: str, sent: Sequence[int], expected: Sequence[int], rank: int) -> None:
    """Refuse an exchange in which this rank sends itself another number of elements than it expects.

    Raises:
        InvalidArgumentError: The two differ.
    """
    if expected[rank] != sent[rank]:
        msg = (
            f"{call}: this rank sends {sent[rank]} elements to itself and expects "
            f"{expected[rank]}; the splits at index {rank} must agree"
        )
        raise InvalidArgumentError(msg)
