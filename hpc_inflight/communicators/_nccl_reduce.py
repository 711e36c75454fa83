"""Reductions over NCCL; temporaries are made on the caller's stream, before the launch."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from hpc_inflight import dtypes
from hpc_inflight.communicators import _layout as layout
from hpc_inflight.communicators._checks import check_length, check_numel, check_same, check_writable, unusable
from hpc_inflight.communicators._nccl_stream import launch_group

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hpc_inflight._cupy import Runtime
    from hpc_inflight.communicators._nccl_stream import Launch
    from hpc_inflight.communicators.base import Reduction

    After = Callable[[], None] | None


_STRIDED = torch.strided


def nothing(_stream: int) -> None:
    """Launch nothing: an empty tensor needs no communication, and is empty on every rank."""


class Reducer:
    """The reducing half of the NCCL communicator.

    Each method returns a launch: a function of the raw stream to enqueue on, which returns what has to follow on the
    same stream once its NCCL group is closed. A launch keeps the temporaries that it needs; where NCCL reads and writes
    the caller's own tensors, which the communicator keeps, it is NCCL's function with its arguments and nothing more.
    """

    def __init__(self, runtime: Runtime, index: int, rank: int, size: int, nccl: Any, name: str) -> None:
        self.runtime = runtime
        self.name = name
        self.rank = rank
        self.size = size
        self._index = index
        self._nccl = nccl
        self._all_reduce = nccl.allReduce
        self._plans: dict[tuple[str, torch.dtype], dtypes.NcclSpec] = {}
        # of those, what NCCL does on a tensor's own memory: elements in one element, NCCL's type, and its operator
        self._at_once: dict[tuple[str, torch.dtype], tuple[int, int, int]] = {}

    def _simple(self, tensor: torch.Tensor) -> bool:
        """Say whether there is nothing to check or to copy: dense, on the device, its memory its values in order."""
        return (
            tensor.get_device() == self._index
            and tensor.layout is _STRIDED
            and tensor.is_contiguous()
            and not tensor.is_neg()
            and not tensor.is_conj()
        )

    def _simple_pair(self, part: torch.Tensor, whole: torch.Tensor) -> bool:
        """Say the same of a tensor and one of ``size`` such parts, which do not overlap or have this rank's in place.

        One expression for the frequent case, in place of the checks that would each pass.
        """
        if not (
            part.dtype is whole.dtype
            and self._simple(part)
            and self._simple(whole)
            and whole.numel() == part.numel() * self.size
        ):
            return False
        nbytes, first, second = part.nbytes, part.data_ptr(), whole.data_ptr()
        return first + nbytes <= second or second + self.size * nbytes <= first or first == second + self.rank * nbytes

    def _check_tensor(self, call: str, tensor: torch.Tensor, argument: str = "tensor") -> None:
        if tensor.layout is not torch.strided or tensor.get_device() != self._index:
            raise unusable(call, tensor, argument, f"cuda:{self._index}")

    def _check_output(self, call: str, tensor: torch.Tensor, argument: str) -> None:
        self._check_tensor(call, tensor, argument)
        check_writable(call, tensor, argument)

    def _plan(self, call: str, op: Reduction, dtype: torch.dtype) -> dtypes.NcclSpec:
        key = op.name, dtype
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = dtypes.nccl_spec(call, op.name, dtype)
            if plan.direct and op.factor is None:
                self._at_once[key] = plan.width, plan.nccl_type, plan.nccl_op
        return plan

    def all_reduce(self, tensor: torch.Tensor, op: Reduction) -> Launch:
        """See `Communicator.all_reduce`."""
        plan = self._at_once.get((op.name, tensor.dtype))
        if (
            plan is None
            # `_simple`, in this frame: the most frequent call of all
            or tensor.get_device() != self._index
            or tensor.layout is not _STRIDED
            or not tensor.is_contiguous()
            or tensor.is_neg()
            or (plan[0] > 1 and tensor.is_conj())  # complex
        ):
            return self._all_reduce_with_copy(tensor, op)
        width, nccl_type, nccl_op = plan
        if not (count := tensor.numel() * width):
            return nothing
        address = tensor.data_ptr()
        return partial(self._all_reduce, address, address, count, nccl_type, nccl_op)

    def _all_reduce_with_copy(self, tensor: torch.Tensor, op: Reduction) -> Launch:
        self._check_output("all_reduce", tensor, "tensor")
        plan = self._plan("all_reduce", op, tensor.dtype)
        if self._direct(plan, op, tensor):  # the first one of its kind
            return self.all_reduce(tensor, op)
        value = self._enter(plan, op, tensor)
        launch, address, count = self._all_reduce, value.data_ptr(), value.numel() * plan.width
        if not count:
            return nothing

        def run(stream: int) -> After:
            launch(address, address, count, plan.nccl_type, plan.nccl_op, stream)
            return partial(leave, value, tensor)

        return run

    def reduce(self, tensor: torch.Tensor, root: int, op: Reduction) -> Launch:
        """See `Communicator.reduce`."""
        is_root = self.rank == root
        (self._check_output if is_root else self._check_tensor)("reduce", tensor, "tensor")
        plan = self._plan("reduce", op, tensor.dtype)
        value = tensor if self._direct(plan, op, tensor) else self._enter(plan, op, tensor)
        launch, address, count = self._nccl.reduce, value.data_ptr(), value.numel() * plan.width
        if not count:
            return nothing

        def run(stream: int) -> After:
            launch(address, address, count, plan.nccl_type, plan.nccl_op, root, stream)
            return partial(leave, value, tensor) if is_root and value is not tensor else None

        return run

    def reduce_scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: Reduction) -> Launch:
        """See `Communicator.reduce_scatter`."""
        call, rank = "reduce_scatter", self.rank
        self._check_output(call, output, "output")
        check_length(call, inputs, self.size, "inputs")
        check_same(call, inputs, output, "inputs", self._check_tensor)
        check_numel(call, "output", output, inputs[rank].numel(), f"inputs[{rank}]")
        plan = self._plan(call, op, output.dtype)
        if all(t.numel() == output.numel() for t in inputs):  # then it is so on every rank
            return self._reduce_scatter(output, layout.flat_source(inputs), op, plan)
        values = [t if self._direct(plan, op, t) else self._enter(plan, op, t) for t in inputs]
        result = self._result(plan, output)
        if any(
            layout.touch(value, result)
            for i, value in enumerate(values)
            if i != rank or value.data_ptr() != result.data_ptr()  # its own may be in place
        ):
            result = torch.empty(output.numel(), dtype=plan.compute_dtype, device=output.device)
        reduce = self._nccl.reduce

        def part(root: int, stream: int) -> None:
            value = values[root]
            into = result if root == rank else value
            count = value.numel() * plan.width
            reduce(value.data_ptr(), into.data_ptr(), count, plan.nccl_type, plan.nccl_op, root, stream)

        parts: list[Launch] = [partial(part, root) for root in range(self.size) if inputs[root].numel()]

        def run(stream: int) -> After:
            launch_group(self.runtime, parts, stream)
            return None if result is output else partial(leave, result, output)

        return run

    def reduce_scatter_into(self, output: torch.Tensor, tensor: torch.Tensor, op: Reduction) -> Launch:
        """See `Communicator.reduce_scatter_into`."""
        call = "reduce_scatter_tensor"
        plan = self._at_once.get((op.name, output.dtype))
        if plan is not None and self._simple_pair(output, tensor):
            width, nccl_type, nccl_op = plan
            if not (count := output.numel() * width):
                return nothing
            source, target = tensor.data_ptr(), output.data_ptr()
            return partial(self._nccl.reduceScatter, source, target, count, nccl_type, nccl_op)
        self._check_tensor(call, tensor, "input")
        check_same(call, [output], tensor, "output", self._check_output)
        check_numel(call, "input", tensor, output.numel() * self.size, f"{self.size} x the output's")
        return self._reduce_scatter(output, tensor, op, self._plan(call, op, output.dtype))

    def _reduce_scatter(
        self, output: torch.Tensor, tensor: torch.Tensor, op: Reduction, plan: dtypes.NcclSpec
    ) -> Launch:
        """Reduce a tensor of even parts; the output may be this rank's part of it."""
        value = tensor if self._direct(plan, op, tensor) else self._enter(plan, op, tensor)
        result = self._result(plan, output)
        own_part = value.data_ptr() + self.rank * result.nbytes
        if result.data_ptr() != own_part and layout.overlap(value, result):
            value = layout.flatten([value])
        return self._launch_reduce_scatter(output, result, value, plan)

    def _launch_reduce_scatter(
        self, output: torch.Tensor, result: torch.Tensor, value: torch.Tensor, plan: dtypes.NcclSpec
    ) -> Launch:
        launch, count = self._nccl.reduceScatter, result.numel() * plan.width
        source, target, nccl_type, nccl_op = value.data_ptr(), result.data_ptr(), plan.nccl_type, plan.nccl_op
        if not count:
            return nothing

        def run(stream: int, _keep: torch.Tensor = value) -> After:
            launch(source, target, count, nccl_type, nccl_op, stream)
            return None if result is output else partial(leave, result, output)

        return run

    @staticmethod
    def _direct(plan: dtypes.NcclSpec, op: Reduction, tensor: torch.Tensor) -> bool:
        """Say whether NCCL can reduce the tensor's own memory."""
        return op.factor is None and plan.compute_dtype is tensor.dtype and layout.plain(tensor)

    @staticmethod
    def _result(plan: dtypes.NcclSpec, output: torch.Tensor) -> torch.Tensor:
        if plan.compute_dtype is output.dtype:
            return layout.target(output)
        return torch.empty(output.numel(), dtype=plan.compute_dtype, device=output.device)

    @staticmethod
    @torch.inference_mode()
    def _enter(plan: dtypes.NcclSpec, op: Reduction, tensor: torch.Tensor) -> torch.Tensor:
        """Return a new contiguous tensor with what goes into the reduction."""
        value = torch.empty(tensor.shape, dtype=plan.compute_dtype, device=tensor.device)
        value.copy_(tensor)
        if op.factor is not None:  # CuPy has no PREMUL_SUM
            value.mul_(op.factor)
        return value


@torch.inference_mode()
def leave(value: torch.Tensor, tensor: torch.Tensor) -> None:
    """Bring the result of a reduction into the caller's tensor, on the current stream."""
    tensor.copy_(value.view(tensor.shape))
