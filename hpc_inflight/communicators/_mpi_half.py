"""All-reduce of half precision: 16 bits travel, 32 bits add, and the result is rounded once.

Reducing float32 copies with MPI would move twice the bytes. Instead every rank receives one part of the tensor from
all ranks as it is, reduces it in float32, rounds it, and the parts are gathered; all ranks get the same bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hpc_inflight.communicators import _mpi_buffers as buf
from hpc_inflight.config import config

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpi4py import MPI

_PAIRWISE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {"SUM": torch.add, "PRODUCT": torch.mul}

MIN_ELEMENTS = 4096  # below it, the latency of two calls costs more than the bytes of one


def part_counts(count: int, size: int) -> list[int]:
    """Divide ``count`` elements over the ranks, the first ones getting one more."""
    each, more = divmod(count, size)
    return [each + (rank < more) for rank in range(size)]


def reduce_parts(parts: torch.Tensor, op: str) -> torch.Tensor:
    """Reduce the rows of ``parts`` in float32; half-precision results are already rounded.

    Args:
        parts: Half precision, shape (ranks, elements).
        op: ``"SUM"``, ``"AVG"``, ``"PRODUCT"``, ``"MIN"`` or ``"MAX"``.

    Returns:
        Shape (elements,); float32, or half precision where one operation that rounds once gives the result.
    """
    if parts.shape[0] == 2 and op in _PAIRWISE:  # noqa: PLR2004  # torch's own kernel: float32 inside, one rounding
        return _PAIRWISE[op](parts[0], parts[1])
    if op == "MIN":
        return parts.amin(0)
    if op == "MAX":
        return parts.amax(0)
    total = parts[0].float()
    for part in parts[1:]:
        if op == "PRODUCT":
            total.mul_(part)
        else:
            total.add_(part)
    return total.div_(parts.shape[0]) if op == "AVG" else total


def all_reduce(comm: MPI.Intracomm, value: torch.Tensor, op: str) -> None:
    """Reduce a contiguous half-precision tensor over the ranks of ``comm``, in place."""
    for part in value.view(-1).split(config().max_count):
        _all_reduce_counted(comm, part, op)


def _all_reduce_counted(comm: MPI.Intracomm, flat: torch.Tensor, op: str) -> None:
    counts = part_counts(flat.numel(), comm.size)
    own = counts[comm.rank]
    parts = torch.empty((comm.size, own), dtype=flat.dtype)
    comm.Alltoallv(buf.vector_buffer(flat, counts), buf.vector_buffer(parts, [own] * comm.size))
    rounded = reduce_parts(parts, op).to(flat.dtype)
    comm.Allgatherv(buf.move_buffer(rounded), buf.vector_buffer(flat, counts))


def reduce_scatter(comm: MPI.Intracomm, output: torch.Tensor, value: torch.Tensor, op: str) -> None:
    """Reduce a contiguous half-precision tensor over the ranks of ``comm`` and keep this rank's equal part."""
    parts = torch.empty((comm.size, output.numel()), dtype=value.dtype)
    comm.Alltoall(buf.move_buffer(value, comm.size), buf.move_buffer(parts, comm.size))
    output.copy_(reduce_parts(parts, op).view(output.shape))
