"""Data movement over MPI: every dtype as elements of its width, in place wherever the layout allows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpc_inflight.communicators import _mpi_barrier
from hpc_inflight.communicators import _mpi_buffers as buf
from hpc_inflight.communicators._mpi_exchange import exchange
from hpc_inflight.communicators._mpi_reduce import Reducer
from hpc_inflight.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from hpc_inflight.communicators.base import Operation


# above it, a ring or tree of MPI's own is worth the copies that it needs
_PAIRWISE_RANKS = 16


class Mover(Reducer):
    """The moving half of the MPI communicator."""

    def broadcast(self, tensor: torch.Tensor, root: int) -> Operation:
        """See `Communicator.broadcast`."""
        call, comm = "broadcast", self.comm
        (buf.check_tensor if self.rank == root else buf.check_output)(call, tensor, "tensor")
        if buf.plain(tensor):
            buffer = buf.move_buffer(tensor)

            def run(_keep: torch.Tensor = tensor) -> None:
                comm.Bcast(buffer, root)

        else:

            def run(_keep: torch.Tensor = tensor) -> None:
                flat = buf.flatten([tensor])
                comm.Bcast(buf.move_buffer(flat), root)
                if self.rank != root:
                    buf.unflatten(flat, [tensor])

        if self._checker is None:
            return run
        return self._checked(run, call, shape=tuple(tensor.shape), dtype=tensor.dtype, root=root)

    def all_gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> Operation:
        """See `Communicator.all_gather`."""
        call = "all_gather"
        buf.check_tensor(call, tensor)
        self._check_list(call, outputs, tensor, "outputs", output=True)
        self._check_numel(call, f"outputs[{self.rank}]", outputs[self.rank], tensor.numel(), "the input")
        comm, counts = self.comm, [t.numel() for t in outputs]
        pairwise = self.size <= _PAIRWISE_RANKS
        if not pairwise:
            buf.vector_unit(call, counts)

        def run() -> None:
            if pairwise:
                exchange(comm, self.own_tag, dict.fromkeys(range(self.size), tensor), dict(enumerate(outputs)))
                return
            flat, deliver = buf.flat_target(outputs)
            value = buf.source(tensor, flat)
            comm.Allgatherv(buf.move_buffer(value), buf.vector_buffer(flat, counts))
            if deliver:
                buf.unflatten(flat, outputs)

        return self._checked(run, call, counts=counts, dtype=tensor.dtype)

    def all_gather_into(self, output: torch.Tensor, tensor: torch.Tensor) -> Operation:
        """See `Communicator.all_gather_into`."""
        call = "all_gather_into_tensor"
        buf.check_tensor(call, tensor, "input")
        buf.check_same(call, [output], tensor, "output", output=True)
        self._check_numel(call, "output", output, tensor.numel() * self.size, f"{self.size} x the input's")
        comm = self.comm

        def run() -> None:
            received = buf.target(output)
            own_place = received.data_ptr() + self.rank * tensor.nbytes
            if received is output and buf.plain(tensor) and tensor.data_ptr() == own_place:
                comm.Allgather(self._in_place, buf.move_buffer(received, self.size))
            else:
                value = buf.source(tensor, received)
                comm.Allgather(buf.move_buffer(value), buf.move_buffer(received, self.size))
            buf.deliver(received, output)

        return self._checked(run, call, shape=tuple(tensor.shape), dtype=tensor.dtype)

    def gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, root: int) -> Operation:
        """See `Communicator.gather`."""
        call = "gather"
        buf.check_tensor(call, tensor)
        if self.rank == root:
            self._check_list(call, outputs, tensor, "outputs", output=True)
            for i, output in enumerate(outputs):
                self._check_numel(call, f"outputs[{i}]", output, tensor.numel(), "the input")
        receives = dict(enumerate(outputs)) if self.rank == root else {}

        def run() -> None:
            exchange(self.comm, self.own_tag, {root: tensor}, receives)

        return self._checked(run, call, numel=tensor.numel(), dtype=tensor.dtype, root=root)

    def scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], root: int) -> Operation:
        """See `Communicator.scatter`."""
        call = "scatter"
        buf.check_output(call, output, "output")
        if self.rank == root:
            self._check_list(call, inputs, output, "inputs")
            for i, tensor in enumerate(inputs):
                self._check_numel(call, f"inputs[{i}]", tensor, output.numel(), "the output")
        sends = dict(enumerate(inputs)) if self.rank == root else {}

        def run() -> None:
            exchange(self.comm, self.own_tag, sends, {root: output})

        return self._checked(run, call, numel=output.numel(), dtype=output.dtype, root=root)

    def all_to_all(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Operation:
        """See `Communicator.all_to_all`."""
        call = "all_to_all"
        self._check_length(call, inputs, "inputs")
        self._check_list(call, outputs, inputs[0], "outputs", output=True)
        buf.check_same(call, inputs, inputs[0], "inputs")
        own = inputs[self.rank].numel()
        self._check_numel(call, f"outputs[{self.rank}]", outputs[self.rank], own, f"inputs[{self.rank}]")
        sent, expected = [t.numel() for t in inputs], [t.numel() for t in outputs]

        def run() -> None:
            exchange(self.comm, self.own_tag, dict(enumerate(inputs)), dict(enumerate(outputs)))

        return self._checked(run, call, sends=sent, receives=expected, dtype=inputs[0].dtype)

    def all_to_all_single(
        self, output: torch.Tensor, tensor: torch.Tensor, output_splits: Sequence[int], input_splits: Sequence[int]
    ) -> Operation:
        """See `Communicator.all_to_all_single`."""
        call = "all_to_all_single"
        buf.check_tensor(call, tensor, "input")
        buf.check_same(call, [output], tensor, "output", output=True)
        expected = self._split_counts(call, output, output_splits, "output")
        sent = self._split_counts(call, tensor, input_splits, "input")
        if expected[self.rank] != sent[self.rank]:
            msg = (
                f"{call}: this rank sends {sent[self.rank]} elements to itself and expects "
                f"{expected[self.rank]}; the splits at index {self.rank} must agree"
            )
            raise InvalidArgumentError(msg)
        comm = self.comm

        def run() -> None:
            received = buf.target(output)
            value = buf.source(tensor, received)
            comm.Alltoallv(buf.vector_buffer(value, sent), buf.vector_buffer(received, expected))
            buf.deliver(received, output)

        return self._checked(run, call, sends=sent, receives=expected, dtype=tensor.dtype)

    def barrier(self, timeout_s: float) -> Operation:
        """See `Communicator.barrier`."""
        return self._checked(_mpi_barrier.barrier(self, timeout_s), "barrier")

    def _split_counts(self, call: str, tensor: torch.Tensor, splits: Sequence[int], which: str) -> list[int]:
        rows = tensor.shape[0] if tensor.dim() else 1
        if not splits:
            if rows % self.size:
                msg = (
                    f"{call}: {which} has {rows} rows, which do not divide by {self.size} ranks; "
                    f"pad it, or pass {which}_split_sizes"
                )
                raise InvalidArgumentError(msg)
            splits = [rows // self.size] * self.size
        if len(splits) != self.size or sum(splits) != rows or min(splits) < 0:
            msg = (
                f"{call}: {which}_split_sizes {list(splits)} must be {self.size} non-negative numbers "
                f"whose sum is {rows}, the rows of {which}"
            )
            raise InvalidArgumentError(msg)
        row = tensor.numel() // rows if rows else 0
        counts = [n * row for n in splits]
        buf.vector_unit(call, counts)
        return counts
