"""Reductions over MPI, and the checks that they share with data movement."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hpc_inflight import _mpi, dtypes
from hpc_inflight.communicators import _mpi_buffers as buf
from hpc_inflight.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpi4py import MPI

    from hpc_inflight.communicators.base import Operation, Reduction


class Reducer:
    """The reducing half of the MPI communicator.

    Half precision is reduced in float32 and rounded once; AVG divides by the group's size after the sum;
    PREMUL_SUM scales before it.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm
        self.rank: int = comm.rank
        self.size: int = comm.size
        self._plans: dict[tuple[str, torch.dtype], tuple[dtypes.ReduceSpec, Any, Any]] = {}

    def _plan(self, call: str, op: Reduction, dtype: torch.dtype) -> tuple[dtypes.ReduceSpec, Any, Any]:
        key = (op.name, dtype)
        plan = self._plans.get(key)
        if plan is None:
            module = _mpi.mpi()
            spec = dtypes.reduce_spec(call, op.name, dtype)
            plan = spec, getattr(module, spec.mpi_type), getattr(module, spec.mpi_op)
            self._plans[key] = plan
        return plan

    def all_reduce(self, tensor: torch.Tensor, op: Reduction) -> Operation:
        """See `Communicator.all_reduce`."""
        buf.check_tensor("all_reduce", tensor)
        spec, mpi_type, mpi_op = self._plan("all_reduce", op, tensor.dtype)
        comm, in_place = self.comm, _mpi.mpi().IN_PLACE
        direct = self._direct(spec, op, tensor)
        if direct and not spec.average:
            buffer = buf.reduce_buffer(tensor, mpi_type)

            def run(_keep: torch.Tensor = tensor) -> None:
                comm.Allreduce(in_place, buffer, mpi_op)

            return run

        @torch.inference_mode()
        def run_staged() -> None:
            value = tensor if direct else self._enter(spec, op, tensor)
            comm.Allreduce(in_place, buf.reduce_buffer(value, mpi_type), mpi_op)
            self._leave(spec, value, tensor)

        return run_staged

    def reduce(self, tensor: torch.Tensor, root: int, op: Reduction) -> Operation:
        """See `Communicator.reduce`."""
        buf.check_tensor("reduce", tensor)
        spec, mpi_type, mpi_op = self._plan("reduce", op, tensor.dtype)
        comm, in_place = self.comm, _mpi.mpi().IN_PLACE

        @torch.inference_mode()
        def run() -> None:
            value = tensor if self._direct(spec, op, tensor) else self._enter(spec, op, tensor)
            buffer = buf.reduce_buffer(value, mpi_type)
            if self.rank == root:
                comm.Reduce(in_place, buffer, mpi_op, root)
                self._leave(spec, value, tensor)
            else:
                comm.Reduce(buffer, None, mpi_op, root)

        return run

    def reduce_scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: Reduction) -> Operation:
        """See `Communicator.reduce_scatter`."""
        call = "reduce_scatter"
        buf.check_tensor(call, output, "output")
        self._check_list(call, inputs, output, "inputs")
        self._check_numel(call, "output", output, inputs[self.rank].numel(), f"inputs[{self.rank}]")
        spec, mpi_type, mpi_op = self._plan(call, op, output.dtype)
        comm, counts = self.comm, [t.numel() for t in inputs]

        @torch.inference_mode()
        def run() -> None:
            source = self._enter(spec, op, buf.flatten(inputs))
            self._scatter(
                spec,
                output,
                lambda target: comm.Reduce_scatter(
                    buf.reduce_buffer(source, mpi_type), buf.reduce_buffer(target, mpi_type), counts, mpi_op
                ),
            )

        return run

    def reduce_scatter_into(self, output: torch.Tensor, tensor: torch.Tensor, op: Reduction) -> Operation:
        """See `Communicator.reduce_scatter_into`."""
        call = "reduce_scatter_tensor"
        buf.check_tensor(call, tensor, "input")
        buf.check_same(call, [output], tensor, "output")
        self._check_numel(call, "input", tensor, output.numel() * self.size, f"{self.size} x the output's")
        spec, mpi_type, mpi_op = self._plan(call, op, output.dtype)
        comm = self.comm

        @torch.inference_mode()
        def run() -> None:
            source = tensor if self._direct(spec, op, tensor) else self._enter(spec, op, tensor)
            self._scatter(
                spec,
                output,
                lambda target: comm.Reduce_scatter_block(
                    buf.reduce_buffer(source, mpi_type, self.size), buf.reduce_buffer(target, mpi_type), mpi_op
                ),
            )

        return run

    def _scatter(self, spec: dtypes.ReduceSpec, output: torch.Tensor, call: Callable[[torch.Tensor], None]) -> None:
        direct = buf.plain(output) and spec.compute_dtype is output.dtype
        target = output if direct else torch.empty(output.numel(), dtype=spec.compute_dtype)
        call(target)
        self._leave(spec, target, output)

    @staticmethod
    def _direct(spec: dtypes.ReduceSpec, op: Reduction, tensor: torch.Tensor) -> bool:
        """Say whether MPI can reduce the tensor's own memory, but for a division afterwards."""
        return op.factor is None and spec.compute_dtype is tensor.dtype and buf.plain(tensor)

    @staticmethod
    def _enter(spec: dtypes.ReduceSpec, op: Reduction, tensor: torch.Tensor) -> torch.Tensor:
        """Return a new contiguous tensor with what goes into the reduction."""
        value = torch.empty(tensor.shape, dtype=spec.compute_dtype)
        value.copy_(tensor)
        if op.factor is not None:
            value.mul_(op.factor)
        return value

    def _leave(self, spec: dtypes.ReduceSpec, value: torch.Tensor, tensor: torch.Tensor) -> None:
        """Bring the result of a reduction into the caller's tensor."""
        if spec.average:
            value.div_(self.size)
        if value is not tensor:
            tensor.copy_(value.view(tensor.shape))

    # checks -------------------------------------------------------------------------------------------------

    def _check_length(self, call: str, tensors: Sequence[torch.Tensor], argument: str) -> None:
        if len(tensors) != self.size:
            msg = f"{call}: {argument} has {len(tensors)} tensors; expected {self.size}, one per rank of the group"
            raise InvalidArgumentError(msg)

    def _check_list(self, call: str, tensors: Sequence[torch.Tensor], like: torch.Tensor, argument: str) -> None:
        self._check_length(call, tensors, argument)
        buf.check_same(call, tensors, like, argument)

    @staticmethod
    def _check_numel(call: str, argument: str, tensor: torch.Tensor, expected: int, of: str) -> None:
        if tensor.numel() != expected:
            msg = f"{call}: {argument} has {tensor.numel()} elements; expected {expected} ({of}); check the shapes"
            raise InvalidArgumentError(msg)
