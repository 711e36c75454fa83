"""Reductions over MPI, and the checks that they share with data movement."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hpc_inflight import _mpi, dtypes
from hpc_inflight.communicators import _layout as layout
from hpc_inflight.communicators import _mpi_buffers as buf
from hpc_inflight.communicators import _mpi_narrow, _mpi_sparse
from hpc_inflight.communicators._checks import check_length, check_numel, check_same
from hpc_inflight.communicators._mpi_check import Checker
from hpc_inflight.config import config

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpi4py import MPI

    from hpc_inflight.communicators.base import Operation, Reduction
    from hpc_inflight.errors import InflightError

SPARE_TAGS = 4

_Plan = tuple[dtypes.ReduceSpec, Any, Any]


class Reducer:
    """The reducing half of the MPI communicator.

    Half precision is reduced in float32 and rounded once, small integers wrap around; AVG divides by the group's size
    after the sum; PREMUL_SUM scales before it.
    """

    def __init__(self, comm: MPI.Intracomm, name: str) -> None:
        self.comm = comm
        self.name = name
        self.rank: int = comm.rank
        self.size: int = comm.size
        # above every tag of the user's messages; MPI promises 32767 at least. Two more are for the barriers, and the
        # rest for the NCCL communicator of the same group
        self.own_tag: int = (comm.Get_attr(_mpi.mpi().TAG_UB) or 32767) - 2 - SPARE_TAGS
        self._narrower = _mpi_narrow.Narrow(comm, self.own_tag)
        self._unusable: InflightError | None = None  # why, once it is
        self._in_place = _mpi.mpi().IN_PLACE
        self._plans: dict[tuple[str, torch.dtype], _Plan] = {}
        self._checker = Checker(comm, name) if config().debug else None

    def give_up(self, reason: InflightError) -> None:
        """Refuse every later operation: after a deadline the ranks may be at different operations."""
        self._unusable = self._unusable or reason

    def _plan(self, call: str, op: Reduction, dtype: torch.dtype) -> _Plan:
        key = (op.name, dtype)
        plan = self._plans.get(key)
        if plan is None:
            module = _mpi.mpi()
            spec = dtypes.reduce_spec(call, op.name, dtype)
            plan = spec, getattr(module, spec.mpi_type), getattr(module, spec.mpi_op)
            self._plans[key] = plan
        return plan

    def _checked(self, run: Operation, call: str, **facts: Any) -> Operation:
        """Put a comparison of ``facts`` over the ranks before ``run``, in debug mode."""
        return run if self._checker is None else self._checker.before(run, call, facts)

    def all_reduce(self, tensor: torch.Tensor, op: Reduction) -> Operation:
        """See `Communicator.all_reduce`."""
        call = "all_reduce"
        if tensor.layout is torch.sparse_coo:
            return _mpi_sparse.all_reduce(self.comm, tensor, op)
        buf.check_output(call, tensor, "tensor")
        spec, mpi_type, mpi_op = self._plan(call, op, tensor.dtype)
        comm, in_place = self.comm, self._in_place
        direct = self._direct(spec, op, tensor)
        if direct and not spec.average and tensor.numel() <= config().max_count:
            buffer = buf.reduce_buffer(tensor, mpi_type)

            def run(_keep: torch.Tensor = tensor) -> None:
                comm.Allreduce(in_place, buffer, mpi_op)

        else:

            def run(_keep: torch.Tensor = tensor) -> None:
                if self._narrow(spec, op, tensor):
                    value = layout.source(tensor)
                    self._narrower.all_reduce(value, op.name, spec.compute_dtype)
                    layout.deliver(value, tensor)
                    return
                value = tensor if direct else self._enter(spec, op, tensor)
                for part in buf.chunks(value, mpi_type):
                    comm.Allreduce(in_place, part, mpi_op)
                self._leave(spec, value, tensor)

        if self._checker is None:
            return run
        return self._checked(run, call, shape=tuple(tensor.shape), dtype=tensor.dtype, op=op.name)

    def reduce(self, tensor: torch.Tensor, root: int, op: Reduction) -> Operation:
        """See `Communicator.reduce`."""
        call = "reduce"
        (buf.check_output if self.rank == root else buf.check_tensor)(call, tensor, "tensor")
        spec, mpi_type, mpi_op = self._plan(call, op, tensor.dtype)
        comm, in_place = self.comm, self._in_place

        def run() -> None:
            value = tensor if self._direct(spec, op, tensor) else self._enter(spec, op, tensor)
            for part in buf.chunks(value, mpi_type):
                if self.rank == root:
                    comm.Reduce(in_place, part, mpi_op, root)
                else:
                    comm.Reduce(part, None, mpi_op, root)
            if self.rank == root and (spec.average or value is not tensor):
                self._leave(spec, value, tensor)

        return self._checked(run, call, shape=tuple(tensor.shape), dtype=tensor.dtype, op=op.name, root=root)

    def reduce_scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: Reduction) -> Operation:
        """See `Communicator.reduce_scatter`."""
        call = "reduce_scatter"
        buf.check_output(call, output, "output")
        check_length(call, inputs, self.size, "inputs")
        check_same(call, inputs, output, "inputs", buf.check_tensor)
        check_numel(call, "output", output, inputs[self.rank].numel(), f"inputs[{self.rank}]")
        spec, mpi_type, mpi_op = self._plan(call, op, output.dtype)
        counts = [t.numel() for t in inputs]

        def run() -> None:
            value = layout.flat_source(inputs)
            if not self._direct(spec, op, value) or layout.overlap(value, output):
                value = self._enter(spec, op, value)
            result = torch.empty(output.numel(), dtype=spec.compute_dtype)
            self._reduce_parts(value, result, counts, mpi_type, mpi_op)
            self._leave(spec, result, output)

        return self._checked(run, call, shapes=[tuple(t.shape) for t in inputs], dtype=output.dtype, op=op.name)

    def reduce_scatter_into(self, output: torch.Tensor, tensor: torch.Tensor, op: Reduction) -> Operation:
        """See `Communicator.reduce_scatter_into`."""
        call = "reduce_scatter_tensor"
        buf.check_tensor(call, tensor, "input")
        check_same(call, [output], tensor, "output", buf.check_output)
        check_numel(call, "input", tensor, output.numel() * self.size, f"{self.size} x the output's")
        spec, mpi_type, mpi_op = self._plan(call, op, output.dtype)
        counts = [output.numel()] * self.size

        def run() -> None:
            if self._narrow(spec, op, tensor):
                self._narrower.reduce_scatter(output, layout.source(tensor), op.name, spec.compute_dtype)
                return
            direct = self._direct(spec, op, tensor)
            value = layout.source(tensor, output) if direct else self._enter(spec, op, tensor)
            in_output = layout.plain(output) and spec.compute_dtype is output.dtype
            result = output if in_output else torch.empty(output.numel(), dtype=spec.compute_dtype)
            self._reduce_parts(value, result, counts, mpi_type, mpi_op)
            if spec.average or result is not output:
                self._leave(spec, result, output)

        return self._checked(run, call, shape=tuple(output.shape), dtype=output.dtype, op=op.name)

    def _reduce_parts(
        self, value: torch.Tensor, result: torch.Tensor, counts: Sequence[int], mpi_type: Any, mpi_op: Any
    ) -> None:
        """Reduce contiguous ``value`` over the ranks and keep this rank's part in ``result``."""
        if value.numel() <= config().max_count:
            kept = buf.reduce_buffer(result, mpi_type)
            if counts.count(counts[0]) == self.size:
                self.comm.Reduce_scatter_block(buf.reduce_buffer(value, mpi_type, self.size), kept, mpi_op)
            else:
                self.comm.Reduce_scatter(buf.reduce_buffer(value, mpi_type), kept, list(counts), mpi_op)
            return
        self._reduce_each(value, result, counts, mpi_type, mpi_op)

    @torch.inference_mode()
    def _reduce_each(
        self, value: torch.Tensor, result: torch.Tensor, counts: Sequence[int], mpi_type: Any, mpi_op: Any
    ) -> None:
        """Do what `_reduce_parts` does where MPI cannot count the whole: one part after the other to its rank."""
        for root, part in enumerate(value.view(-1).split(list(counts))):
            for chunk in buf.chunks(part, mpi_type):
                if self.rank == root:
                    self.comm.Reduce(self._in_place, chunk, mpi_op, root)
                else:
                    self.comm.Reduce(chunk, None, mpi_op, root)
            if self.rank == root:
                result.view(-1).copy_(part)

    def _narrow(self, spec: dtypes.ReduceSpec, op: Reduction, tensor: torch.Tensor) -> bool:
        """Say whether the narrow type travels and a wide one adds; all ranks say the same, for their sizes are."""
        return (
            spec.compute_dtype is not tensor.dtype
            and op.factor is None
            and tensor.numel() >= max(_mpi_narrow.MIN_ELEMENTS, self.size)
        )

    @staticmethod
    def _direct(spec: dtypes.ReduceSpec, op: Reduction, tensor: torch.Tensor) -> bool:
        """Say whether MPI can reduce the tensor's own memory, but for a division afterwards."""
        return op.factor is None and spec.compute_dtype is tensor.dtype and layout.plain(tensor)

    @staticmethod
    @torch.inference_mode()
    def _enter(spec: dtypes.ReduceSpec, op: Reduction, tensor: torch.Tensor) -> torch.Tensor:
        """Return a new contiguous tensor with what goes into the reduction."""
        value = torch.empty(tensor.shape, dtype=spec.compute_dtype)
        value.copy_(tensor)
        if op.factor is not None:
            value.mul_(op.factor)
        return value

    @torch.inference_mode()
    def _leave(self, spec: dtypes.ReduceSpec, value: torch.Tensor, tensor: torch.Tensor) -> None:
        """Bring the result of a reduction into the caller's tensor."""
        if spec.average:
            value.div_(self.size)
        if value is not tensor:
            tensor.copy_(value.view(tensor.shape))
