"""Reductions of narrow types: 8 or 16 bits travel, 32 add, and the result is rounded or wrapped once.

Reducing wider copies with MPI would move two or four times the bytes. Instead every rank receives one part of the
tensor from all ranks as it is, reduces it in the wider type, narrows it, and the parts are gathered; all ranks get
the same bits. For half precision that is one rounding. For small integers it is the wrap-around of C, which MPI's
own sum does not give: Open MPI's vectorised loops saturate, and their remainder wraps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hpc_inflight._mpi import mpi
from hpc_inflight.communicators import _mpi_buffers as buf
from hpc_inflight.config import config

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpi4py import MPI

MIN_ELEMENTS = 4096  # below it, the latency of two calls costs more than the bytes of one
_CHUNK = 2**20  # elements at a time: what is received and reduced stays in the cache, and memory is bounded

_PAIRWISE: dict[str, Callable[..., torch.Tensor]] = {"SUM": torch.add, "PRODUCT": torch.mul}
_EXACT: dict[str, Callable[..., torch.Tensor]] = {"MIN": torch.minimum, "MAX": torch.maximum}


def part_counts(count: int, size: int) -> list[int]:
    """Divide ``count`` elements over the ranks, the first ones getting one more."""
    each, more = divmod(count, size)
    return [each + (rank < more) for rank in range(size)]


def reduce_parts(parts: Sequence[torch.Tensor], op: str, wide: torch.dtype) -> torch.Tensor:
    """Reduce contiguous tensors element by element; the first one is overwritten.

    Args:
        parts: One for each rank, of one shape and narrow dtype.
        op: ``"SUM"``, ``"AVG"``, ``"PRODUCT"``, ``"MIN"`` or ``"MAX"``.
        wide: The dtype to compute in.

    Returns:
        The first one, with the result.
    """
    first = parts[0]
    if op in _EXACT:  # rounds nothing, so it needs no wider type
        for part in parts[1:]:
            _EXACT[op](first, part, out=first)
        return first
    if len(parts) == 2 and op in _PAIRWISE and wide.is_floating_point:  # noqa: PLR2004  # float32 inside torch's kernel
        return _PAIRWISE[op](first, parts[1], out=first)
    total = first.to(wide)
    for part in parts[1:]:
        value = part.to(wide)
        if op == "PRODUCT":
            total.mul_(value)
        else:
            total.add_(value)
    if op == "AVG":
        total.div_(len(parts))
    return first.copy_(total)


class Narrow:
    """The reductions of one communicator, with the memory that they share; one of them runs at a time."""

    def __init__(self, comm: MPI.Intracomm, tag: int) -> None:
        self._comm = comm
        self._tag = tag
        self._memory = torch.empty(0, dtype=torch.uint8)

    def _scratch(self, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        needed = rows * columns * dtype.itemsize
        if self._memory.numel() < needed:  # kept: new memory costs a page fault for every 4 KiB
            self._memory = torch.empty(needed, dtype=torch.uint8)
        return self._memory[:needed].view(dtype).view(rows, columns)

    @torch.inference_mode()
    def all_reduce(self, value: torch.Tensor, op: str, wide: torch.dtype) -> None:
        """Reduce a contiguous tensor of a narrow dtype over the ranks, in place."""
        comm, rank, size = self._comm, self._comm.rank, self._comm.size
        for flat in value.view(-1).split(min(_CHUNK, config().max_count)):
            counts = part_counts(flat.numel(), size)
            parts = flat.split(counts)
            received = self._scratch(size - 1, counts[rank], flat.dtype).unbind()
            # not MPI_Alltoallv: it would copy this rank's own part, too
            for step, landing in enumerate(received, 1):
                to, source = (rank + step) % size, (rank - step) % size
                comm.Sendrecv(buf.move_buffer(parts[to]), to, self._tag, buf.move_buffer(landing), source, self._tag)
            reduce_parts([parts[rank], *received], op, wide)
            if counts[0] == counts[-1]:
                comm.Allgather(mpi().IN_PLACE, buf.move_buffer(flat, size))
            else:
                comm.Allgatherv(mpi().IN_PLACE, buf.vector_buffer(flat, counts))

    @torch.inference_mode()
    def reduce_scatter(self, output: torch.Tensor, value: torch.Tensor, op: str, wide: torch.dtype) -> None:
        """Reduce a contiguous tensor of a narrow dtype over the ranks and keep this rank's equal part."""
        comm = self._comm
        received = torch.empty((comm.size, output.numel()), dtype=value.dtype)
        comm.Alltoall(buf.move_buffer(value, comm.size), buf.move_buffer(received, comm.size))
        output.copy_(reduce_parts(received.unbind(), op, wide).view(output.shape))
