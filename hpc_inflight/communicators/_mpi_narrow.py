"""Reductions of narrow types: 8 or 16 bits travel, 32 add, and the result is rounded or wrapped once.

Reducing wider copies with MPI would move two or four times the bytes. Instead every rank receives one part of the
tensor from all ranks as it is, reduces it in the wider type, narrows it, and the parts are gathered; all ranks get
the same bits. For half precision that is one rounding. For small integers it is the wrap-around of C, which MPI's
own sum does not give: Open MPI's vectorised loops saturate, and their remainder wraps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hpc_inflight.communicators import _mpi_buffers as buf
from hpc_inflight.config import config

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpi4py import MPI

MIN_ELEMENTS = 4096  # below it, the latency of two calls costs more than the bytes of one
_CHUNK = 2**22  # elements at a time: bounds the memory beside the tensor

_PAIRWISE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {"SUM": torch.add, "PRODUCT": torch.mul}


def part_counts(count: int, size: int) -> list[int]:
    """Divide ``count`` elements over the ranks, the first ones getting one more."""
    each, more = divmod(count, size)
    return [each + (rank < more) for rank in range(size)]


def reduce_parts(parts: Sequence[torch.Tensor], op: str, wide: torch.dtype) -> torch.Tensor:
    """Reduce contiguous tensors element by element.

    Args:
        parts: One for each rank, of one shape and narrow dtype.
        op: ``"SUM"``, ``"AVG"``, ``"PRODUCT"``, ``"MIN"`` or ``"MAX"``.
        wide: The dtype to compute in.

    Returns:
        The result, of dtype ``wide`` or, where one operation of torch rounds once, of the parts' own.
    """
    if len(parts) == 2 and op in _PAIRWISE and wide.is_floating_point:  # noqa: PLR2004  # float32 inside torch's kernel
        return _PAIRWISE[op](parts[0], parts[1])
    total = parts[0].to(wide)
    for part in parts[1:]:
        value = part.to(wide)
        if op == "PRODUCT":
            total.mul_(value)
        elif op == "MIN":
            torch.minimum(total, value, out=total)
        elif op == "MAX":
            torch.maximum(total, value, out=total)
        else:
            total.add_(value)
    return total.div_(len(parts)) if op == "AVG" else total


@torch.inference_mode()
def all_reduce(comm: MPI.Intracomm, value: torch.Tensor, op: str, wide: torch.dtype) -> None:
    """Reduce a contiguous tensor of a narrow dtype over the ranks of ``comm``, in place."""
    for flat in value.view(-1).split(min(_CHUNK, config().max_count)):
        counts = part_counts(flat.numel(), comm.size)
        own = counts[comm.rank]
        received = torch.empty((comm.size, own), dtype=flat.dtype)
        comm.Alltoallv(buf.vector_buffer(flat, counts), buf.vector_buffer(received, [own] * comm.size))
        narrow = reduce_parts(received.unbind(), op, wide).to(flat.dtype)
        comm.Allgatherv(buf.move_buffer(narrow), buf.vector_buffer(flat, counts))


def reduce_scatter(comm: MPI.Intracomm, output: torch.Tensor, value: torch.Tensor, op: str, wide: torch.dtype) -> None:
    """Reduce a contiguous tensor of a narrow dtype over the ranks of ``comm`` and keep this rank's equal part."""
    received = torch.empty((comm.size, output.numel()), dtype=value.dtype)
    comm.Alltoall(buf.move_buffer(value, comm.size), buf.move_buffer(received, comm.size))
    output.copy_(reduce_parts(received.unbind(), op, wide).view(output.shape))
