"""All-reduce of sparse COO tensors: the entries of all ranks are gathered and summed."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from hpc_inflight.communicators import _mpi_buffers as buf
from hpc_inflight.errors import InvalidArgumentError, UnsupportedError

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpc_inflight.communicators.base import Operation, Reduction


def all_reduce(comm: MPI.Intracomm, tensor: torch.Tensor, op: Reduction) -> Operation:
    """Sum a sparse COO tensor over the ranks, in place; the numbers of entries may differ.

    Raises:
        UnsupportedError: Another operator than SUM, or not in CPU memory.
        InvalidArgumentError: When it runs, on every rank: shapes or dtypes differ between ranks.
    """
    if op.name != "SUM":
        msg = f"all_reduce: ReduceOp.{op.name} of a sparse tensor; expected SUM; call to_dense() for other operators"
        raise UnsupportedError(msg)
    if not tensor.is_cpu:
        buf.check_tensor("all_reduce", tensor.to_dense())

    @torch.inference_mode()
    def run() -> None:
        mine = tensor.detach().coalesce()
        indices, values = mine.indices(), mine.values().contiguous()
        facts = comm.allgather((tuple(mine.shape), indices.shape[0], str(values.dtype), indices.shape[1]))
        if len({fact[:3] for fact in facts}) > 1:
            found = "; ".join(f"rank {r}: {shape}, {dims} sparse, {dt}" for r, (shape, dims, dt, _) in enumerate(facts))
            msg = f"all_reduce: sparse tensors of one shape and dtype expected on all ranks, found {found}"
            raise InvalidArgumentError(msg)
        entries = [fact[3] for fact in facts]
        dims, width = indices.shape[0], math.prod(values.shape[1:])
        # one entry's indices in a row, so that the ranks' entries are consecutive
        all_indices = torch.empty((sum(entries), dims), dtype=indices.dtype)
        all_values = torch.empty((sum(entries), *values.shape[1:]), dtype=values.dtype)
        rows = indices.t().contiguous()
        comm.Allgatherv(buf.move_buffer(rows), buf.vector_buffer(all_indices, [n * dims for n in entries]))
        comm.Allgatherv(buf.move_buffer(values), buf.vector_buffer(all_values, [n * width for n in entries]))
        total = torch.sparse_coo_tensor(all_indices.t(), all_values, mine.shape, check_invariants=False)
        tensor.copy_(total.coalesce())

    return run
