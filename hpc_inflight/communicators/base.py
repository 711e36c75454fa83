"""The contract between the process group and a backend.

A collective has two halves. The communicator's method checks the arguments and returns an `Operation`: a
callable that communicates, once, when its communicator calls it. `Communicator.run_now` and `Communicator.enqueue` run
operations and return the Work. So every error that depends on arguments comes before any communication, and
coalescing is issuing several operations as one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from hpc_inflight.errors import InflightError
    from hpc_inflight.work import Completion

# for MPI it takes nothing; for NCCL the raw stream, and it may return what has to follow on that stream
Operation = Callable[..., Any]


@dataclass(frozen=True)
class Reduction:
    """A reduction operator as c10d names it.

    Attributes:
        name: Such as ``"SUM"``.
        factor: What ``PREMUL_SUM`` multiplies by, else None.
    """

    name: str
    factor: float | torch.Tensor | None = None


class Communicator(Protocol):
    """One group's connection through one transport.

    Ranks are group ranks. ``root`` is the rank that sends (broadcast, scatter) or receives (reduce, gather).
    Every operation is collective over the group unless it says otherwise; all ranks must issue the same
    operations in the same order. Tensors are dense and on the communicator's device; any layout is allowed,
    and those that are not contiguous go through a copy. The caller leaves inputs alone until the Work is
    complete.
    """

    rank: int
    size: int
    seq: int

    def all_reduce(self, tensor: torch.Tensor, op: Reduction) -> Operation:
        """Reduce ``tensor`` over the ranks, in place on every rank."""

    def reduce(self, tensor: torch.Tensor, root: int, op: Reduction) -> Operation:
        """Reduce ``tensor`` over the ranks, in place on ``root``; the others' tensors stay as they are."""

    def broadcast(self, tensor: torch.Tensor, root: int) -> Operation:
        """Copy ``root``'s tensor into ``tensor`` on the others."""

    def all_gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> Operation:
        """Put rank r's ``tensor`` into ``outputs[r]``; sizes may differ between ranks."""

    def all_gather_into(self, output: torch.Tensor, tensor: torch.Tensor) -> Operation:
        """Concatenate every rank's ``tensor`` into ``output``, which has ``size`` times its elements."""

    def gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, root: int) -> Operation:
        """Put rank r's ``tensor`` into ``outputs[r]`` on ``root``; the others pass no outputs."""

    def scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], root: int) -> Operation:
        """Put ``root``'s ``inputs[r]`` into rank r's ``output``; the others pass no inputs."""

    def reduce_scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: Reduction) -> Operation:
        """Reduce ``inputs[r]`` over the ranks into rank r's ``output``."""

    def reduce_scatter_into(self, output: torch.Tensor, tensor: torch.Tensor, op: Reduction) -> Operation:
        """Reduce ``tensor`` over the ranks and keep this rank's ``size``-th part in ``output``."""

    def all_to_all(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Operation:
        """Put rank r's ``inputs[rank]`` into ``outputs[r]``."""

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
    ) -> Operation:
        """Send the r-th split of ``tensor`` to rank r; splits count rows of dimension 0, empty means even."""

    def barrier(self, timeout_s: float) -> Operation:
        """Return on no rank before all have entered; raises `CollectiveTimeout` at the deadline."""

    def monitored_barrier(self, timeout_s: float, *, all_ranks: bool) -> None:
        """Block until all ranks have entered; at the deadline rank 0's error names those that did not."""

    def run_now(self, operations: Sequence[Operation]) -> Any:
        """Run operations in the caller if nothing of this group is before them.

        Returns:
            A work on which nothing is left to wait for, or None: then they have to be enqueued.
        """

    def enqueue(
        self,
        op: str,
        operations: Sequence[Operation],
        outputs: Sequence[torch.Tensor],
        timeout_s: float,
        inputs: Sequence[torch.Tensor] | None = None,
    ) -> Any:
        """Run operations later, in order, behind what was issued before, and return their Work.

        Outputs and inputs are kept until they are complete, whether or not an operation refers to them.
        """

    def send(self, tensor: torch.Tensor, dst: int, tag: int, timeout_s: float) -> Any:
        """Start sending to ``dst`` and return the Work; matches one receive there with the same tag."""

    def recv(self, tensor: torch.Tensor, src: int | None, tag: int, timeout_s: float) -> Any:
        """Start receiving from ``src``, or from any rank with None, and return the Work."""

    def pending_works(self) -> Sequence[Completion]:
        """Return what was issued and is not complete, oldest first."""

    def split(self, ranks: Sequence[int], name: str, timeout_s: float) -> Communicator:
        """Make a communicator of some of the group's ranks; collective over those only."""

    def is_idle(self) -> bool:
        """Say whether nothing is pending, nobody is about to enqueue and nothing has failed.

        Cheap, and never wrong about what is idle: it may take something for pending that has just completed.
        """

    def quiesce(self, timeout_s: float) -> bool:
        """Wait for every thread that was enqueuing; False if one still is. Raise `CommunicatorAborted` after abort."""

    def abort(self, error: InflightError | None = None) -> None:
        """Fail what is pending, also with everyone who waits, and refuse the rest; local, releases nothing."""

    def shutdown(self, timeout_s: float) -> None:
        """Wait for pending works, then release what no CUDA graph holds; further calls raise `GroupDestroyedError`."""
