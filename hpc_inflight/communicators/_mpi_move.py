"""Data movement over MPI: every dtype as elements of its width, in place wherever the layout allows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpc_inflight.communicators import _layout as layout
from hpc_inflight.communicators import _mpi_barrier
from hpc_inflight.communicators import _mpi_buffers as buf
from hpc_inflight.communicators._checks import check_length, check_numel, check_own_split, check_same, split_counts
from hpc_inflight.communicators._mpi_exchange import exchange
from hpc_inflight.communicators._mpi_reduce import Reducer

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
        if layout.plain(tensor):
            buffer = buf.move_buffer(tensor)

            def run(_keep: torch.Tensor = tensor) -> None:
                comm.Bcast(buffer, root)

        else:

            def run(_keep: torch.Tensor = tensor) -> None:
                flat = layout.flatten([tensor])
                comm.Bcast(buf.move_buffer(flat), root)
                if self.rank != root:
                    layout.unflatten(flat, [tensor])

        if self._checker is None:
            return run
        return self._checked(run, call, shape=tuple(tensor.shape), dtype=tensor.dtype, root=root)

    def all_gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> Operation:
        """See `Communicator.all_gather`."""
        call = "all_gather"
        buf.check_tensor(call, tensor)
        check_length(call, outputs, self.size, "outputs")
        check_same(call, outputs, tensor, "outputs", buf.check_output)
        check_numel(call, f"outputs[{self.rank}]", outputs[self.rank], tensor.numel(), "the input")
        comm, counts = self.comm, [t.numel() for t in outputs]
        pairwise = self.size <= _PAIRWISE_RANKS
        if not pairwise:
            buf.vector_unit(call, counts)

        def run() -> None:
            if pairwise:
                exchange(comm, self.own_tag, dict.fromkeys(range(self.size), tensor), dict(enumerate(outputs)))
                return
            flat, deliver = layout.flat_target(outputs)
            value = layout.source(tensor, flat)
            comm.Allgatherv(buf.move_buffer(value), buf.vector_buffer(flat, counts))
            if deliver:
                layout.unflatten(flat, outputs)

        return self._checked(run, call, counts=counts, dtype=tensor.dtype)

    def all_gather_into(self, output: torch.Tensor, tensor: torch.Tensor) -> Operation:
        """See `Communicator.all_gather_into`."""
        call = "all_gather_into_tensor"
        buf.check_tensor(call, tensor, "input")
        check_same(call, [output], tensor, "output", buf.check_output)
        check_numel(call, "output", output, tensor.numel() * self.size, f"{self.size} x the input's")
        comm = self.comm

        def run() -> None:
            received = layout.target(output)
            own_place = received.data_ptr() + self.rank * tensor.nbytes
            if received is output and layout.plain(tensor) and tensor.data_ptr() == own_place:
                comm.Allgather(self._in_place, buf.move_buffer(received, self.size))
            else:
                value = layout.source(tensor, received)
                comm.Allgather(buf.move_buffer(value), buf.move_buffer(received, self.size))
            layout.deliver(received, output)

        return self._checked(run, call, shape=tuple(tensor.shape), dtype=tensor.dtype)

    def gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, root: int) -> Operation:
        """See `Communicator.gather`."""
        call = "gather"
        buf.check_tensor(call, tensor)
        if self.rank == root:
            check_length(call, outputs, self.size, "outputs")
            check_same(call, outputs, tensor, "outputs", buf.check_output)
            for i, output in enumerate(outputs):
                check_numel(call, f"outputs[{i}]", output, tensor.numel(), "the input")
        receives = dict(enumerate(outputs)) if self.rank == root else {}

        def run() -> None:
            exchange(self.comm, self.own_tag, {root: tensor}, receives)

        return self._checked(run, call, numel=tensor.numel(), dtype=tensor.dtype, root=root)

    def scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], root: int) -> Operation:
        """See `Communicator.scatter`."""
        call = "scatter"
        buf.check_output(call, output, "output")
        if self.rank == root:
            check_length(call, inputs, self.size, "inputs")
            check_same(call, inputs, output, "inputs", buf.check_tensor)
            for i, tensor in enumerate(inputs):
                check_numel(call, f"inputs[{i}]", tensor, output.numel(), "the output")
        sends = dict(enumerate(inputs)) if self.rank == root else {}

        def run() -> None:
            exchange(self.comm, self.own_tag, sends, {root: output})

        return self._checked(run, call, numel=output.numel(), dtype=output.dtype, root=root)

    def all_to_all(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Operation:
        """See `Communicator.all_to_all`."""
        call = "all_to_all"
        check_length(call, inputs, self.size, "inputs")
        check_length(call, outputs, self.size, "outputs")
        check_same(call, outputs, inputs[0], "outputs", buf.check_output)
        check_same(call, inputs, inputs[0], "inputs", buf.check_tensor)
        own = inputs[self.rank].numel()
        check_numel(call, f"outputs[{self.rank}]", outputs[self.rank], own, f"inputs[{self.rank}]")
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
        check_same(call, [output], tensor, "output", buf.check_output)
        expected = split_counts(call, output, output_splits, self.size, "output")
        sent = split_counts(call, tensor, input_splits, self.size, "input")
        check_own_split(call, sent, expected, self.rank)
        buf.vector_unit(call, expected)
        buf.vector_unit(call, sent)
        comm = self.comm

        def run() -> None:
            received = layout.target(output)
            value = layout.source(tensor, received)
            comm.Alltoallv(buf.vector_buffer(value, sent), buf.vector_buffer(received, expected))
            layout.deliver(received, output)

        return self._checked(run, call, sends=sent, receives=expected, dtype=tensor.dtype)

    def barrier(self, timeout_s: float) -> Operation:
        """See `Communicator.barrier`."""
        return self._checked(_mpi_barrier.barrier(self, timeout_s), "barrier")
