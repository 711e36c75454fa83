"""The backend for CPU tensors: blocking MPI collectives and non-blocking point-to-point, over mpi4py."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import torch

from hpc_inflight import _mpi
from hpc_inflight.communicators import _mpi_buffers as buf
from hpc_inflight.communicators._mpi_p2p import RequestCompletion, Requests
from hpc_inflight.communicators._mpi_reduce import Reducer
from hpc_inflight.communicators._mpi_worker import Worker
from hpc_inflight.config import config
from hpc_inflight.errors import DrainTimeout, InvalidArgumentError
from hpc_inflight.work import Completion, DoneWork, Work

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpi4py import MPI

    from hpc_inflight.communicators.base import Operation

_DONE = DoneWork()


class MPICommunicator(Reducer):
    """One group over its own duplicated MPI communicator; see `hpc_inflight.communicators.base.Communicator`.

    Attributes:
        name: The group's name, for messages.
        seq: Number of collectives issued so far; the same on every rank of a program that is right.
    """

    def __init__(self, comm: MPI.Intracomm, name: str) -> None:
        super().__init__(comm)
        self.name = name
        self._mpi = _mpi.mpi()
        self.seq = 0
        self._p2p_seq = 0
        self._issue_lock = threading.Lock()  # numbers and queue in the same order, whichever threads issue
        self._worker = Worker(name, config().max_pending)
        self._requests = Requests()
        # one rank has nobody to wait for; and without MPI_THREAD_MULTIPLE no second thread may call MPI
        self._inline_only = self.size == 1 or not _mpi.thread_multiple()

    # data movement ------------------------------------------------------------------------------------------

    def broadcast(self, tensor: torch.Tensor, root: int) -> Operation:
        """See `Communicator.broadcast`."""
        buf.check_tensor("broadcast", tensor)
        comm = self.comm
        if buf.plain(tensor):
            buffer = buf.move_buffer(tensor)

            def run(_keep: torch.Tensor = tensor) -> None:
                comm.Bcast(buffer, root)
        else:

            @torch.inference_mode()
            def run(_keep: torch.Tensor = tensor) -> None:
                flat = buf.flatten([tensor])
                comm.Bcast(buf.move_buffer(flat), root)
                if self.rank != root:
                    buf.unflatten(flat, [tensor])

        return run

    def all_gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> Operation:
        """See `Communicator.all_gather`."""
        call = "all_gather"
        buf.check_tensor(call, tensor)
        self._check_list(call, outputs, tensor, "outputs")
        self._check_numel(call, f"outputs[{self.rank}]", outputs[self.rank], tensor.numel(), "the input")
        comm, counts = self.comm, [t.numel() for t in outputs]

        @torch.inference_mode()
        def run() -> None:
            flat = torch.empty(sum(counts), dtype=tensor.dtype)
            comm.Allgatherv(
                buf.move_buffer(tensor if buf.plain(tensor) else buf.flatten([tensor])), buf.vector_buffer(flat, counts)
            )
            buf.unflatten(flat, outputs)

        return run

    def all_gather_into(self, output: torch.Tensor, tensor: torch.Tensor) -> Operation:
        """See `Communicator.all_gather_into`."""
        call = "all_gather_into_tensor"
        buf.check_tensor(call, tensor)
        buf.check_same(call, [output], tensor, "output")
        self._check_numel(call, "output", output, tensor.numel() * self.size, f"{self.size} x the input's")
        comm = self.comm

        @torch.inference_mode()
        def run() -> None:
            source = tensor if buf.plain(tensor) else buf.flatten([tensor])
            target = output if buf.plain(output) else torch.empty(output.numel(), dtype=output.dtype)
            comm.Allgather(buf.move_buffer(source), buf.move_buffer(target, self.size))
            if target is not output:
                buf.unflatten(target, [output])

        return run

    def gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, root: int) -> Operation:
        """See `Communicator.gather`."""
        call = "gather"
        buf.check_tensor(call, tensor)
        counts: list[int] = []
        if self.rank == root:
            self._check_list(call, outputs, tensor, "outputs")
            self._check_numel(call, f"outputs[{root}]", outputs[root], tensor.numel(), "the input")
            counts = [t.numel() for t in outputs]
        comm = self.comm

        @torch.inference_mode()
        def run() -> None:
            source = buf.move_buffer(tensor if buf.plain(tensor) else buf.flatten([tensor]))
            if self.rank != root:
                comm.Gatherv(source, None, root)
                return
            flat = torch.empty(sum(counts), dtype=tensor.dtype)
            comm.Gatherv(source, buf.vector_buffer(flat, counts), root)
            buf.unflatten(flat, outputs)

        return run

    def scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], root: int) -> Operation:
        """See `Communicator.scatter`."""
        call = "scatter"
        buf.check_tensor(call, output, "output")
        if self.rank == root:
            self._check_list(call, inputs, output, "inputs")
            self._check_numel(call, f"inputs[{root}]", inputs[root], output.numel(), "the output")
        comm = self.comm

        @torch.inference_mode()
        def run() -> None:
            target = output if buf.plain(output) else torch.empty(output.numel(), dtype=output.dtype)
            if self.rank == root:
                flat = buf.flatten(inputs)
                comm.Scatterv(buf.vector_buffer(flat, [t.numel() for t in inputs]), buf.move_buffer(target), root)
            else:
                comm.Scatterv(None, buf.move_buffer(target), root)
            if target is not output:
                buf.unflatten(target, [output])

        return run

    def all_to_all(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Operation:
        """See `Communicator.all_to_all`."""
        call = "all_to_all"
        self._check_length(call, inputs, "inputs")
        self._check_list(call, outputs, inputs[0], "outputs")
        buf.check_same(call, inputs, inputs[0], "inputs")
        own = inputs[self.rank].numel()
        self._check_numel(call, f"outputs[{self.rank}]", outputs[self.rank], own, f"inputs[{self.rank}]")
        comm = self.comm

        @torch.inference_mode()
        def run() -> None:
            source = buf.flatten(inputs)
            target = torch.empty(sum(t.numel() for t in outputs), dtype=source.dtype)
            comm.Alltoallv(
                buf.vector_buffer(source, [t.numel() for t in inputs]),
                buf.vector_buffer(target, [t.numel() for t in outputs]),
            )
            buf.unflatten(target, outputs)

        return run

    def all_to_all_single(
        self, output: torch.Tensor, tensor: torch.Tensor, output_splits: Sequence[int], input_splits: Sequence[int]
    ) -> Operation:
        """See `Communicator.all_to_all_single`."""
        call = "all_to_all_single"
        buf.check_tensor(call, tensor, "input")
        buf.check_same(call, [output], tensor, "output")
        out_counts = self._split_counts(call, output, output_splits, "output")
        in_counts = self._split_counts(call, tensor, input_splits, "input")
        if out_counts[self.rank] != in_counts[self.rank]:
            msg = (
                f"{call}: this rank sends {in_counts[self.rank]} elements to itself and expects "
                f"{out_counts[self.rank]}; the splits at index {self.rank} must agree"
            )
            raise InvalidArgumentError(msg)
        comm = self.comm

        @torch.inference_mode()
        def run() -> None:
            source = tensor if buf.plain(tensor) else buf.flatten([tensor])
            target = output if buf.plain(output) else torch.empty(output.numel(), dtype=output.dtype)
            comm.Alltoallv(buf.vector_buffer(source, in_counts), buf.vector_buffer(target, out_counts))
            if target is not output:
                buf.unflatten(target, [output])

        return run

    def barrier(self) -> Operation:
        """See `Communicator.barrier`."""
        run: Callable[[], None] = self.comm.Barrier
        return run

    # issuing ------------------------------------------------------------------------------------------------

    def issue(
        self,
        op: str,
        operations: Sequence[Operation],
        outputs: Sequence[torch.Tensor],
        *,
        async_op: bool,
        timeout_s: float,
    ) -> Work | DoneWork:
        """See `Communicator.issue`."""
        worker, inline_only = self._worker, self._inline_only
        if (inline_only or not async_op) and worker.run_inline(operations, wait_turn=inline_only):
            with self._issue_lock:
                self.seq += 1
            if not async_op:
                return _DONE
            completion = Completion(op, self.name, self.seq, timeout_s)
            completion.finish()
            return Work(completion, outputs)
        with self._issue_lock:
            self.seq += 1
            completion = Completion(op, self.name, self.seq, timeout_s)
            worker.submit(completion, operations)
        return Work(completion, outputs)

    def send(self, tensor: torch.Tensor, dst: int, tag: int, timeout_s: float) -> Work:
        """See `Communicator.send`."""
        self._check_p2p("send", tensor, dst, tag)
        source = tensor if buf.plain(tensor) else buf.flatten([tensor.detach()])
        completion = RequestCompletion("send", self.name, self._next_p2p(), timeout_s, source, None)
        request = self.comm.Isend(buf.move_buffer(source), dst, tag)
        return self._start(completion, request, [])

    def recv(self, tensor: torch.Tensor, src: int | None, tag: int, timeout_s: float) -> Work:
        """See `Communicator.recv`."""
        self._check_p2p("recv", tensor, src, tag)
        target, after = tensor, None
        if not buf.plain(tensor):
            target = torch.empty(tensor.numel(), dtype=tensor.dtype)

            @torch.inference_mode()
            def after() -> None:
                buf.unflatten(target, [tensor])

        completion = RequestCompletion("recv", self.name, self._next_p2p(), timeout_s, target, after)
        source = self._mpi.ANY_SOURCE if src is None else src
        request = self.comm.Irecv(buf.move_buffer(target), source, tag)
        return self._start(completion, request, [tensor])

    def _next_p2p(self) -> int:
        with self._issue_lock:
            self._p2p_seq += 1
            return self._p2p_seq

    def _start(self, completion: RequestCompletion, request: Any, outputs: list[torch.Tensor]) -> Work:
        completion.start(request, self._requests)
        self._requests.add(completion)
        return Work(completion, outputs)

    def pending_works(self) -> list[Completion]:
        """See `Communicator.pending_works`."""
        return sorted([*self._worker.pending(), *self._requests.pending()], key=lambda c: c.issued_at)

    def shutdown(self, timeout_s: float) -> None:
        """See `Communicator.shutdown`; raises `DrainTimeout` when works are still pending at the deadline."""
        deadline = time.monotonic() + timeout_s
        try:
            while pending := self.pending_works():
                pending[0].block(max(0.0, deadline - time.monotonic()))
        except TimeoutError as error:
            msg = f"destroying group {self.name}: {error}"
            raise DrainTimeout(msg) from None
        finally:
            self._worker.stop()
        self.comm.Free()

    # checks -------------------------------------------------------------------------------------------------

    def _check_p2p(self, call: str, tensor: torch.Tensor, peer: int | None, tag: int) -> None:
        buf.check_tensor(call, tensor)
        if peer is not None and not 0 <= peer < self.size:
            msg = f"{call}: peer rank {peer} is not in group {self.name}; expected 0 to {self.size - 1}"
            raise InvalidArgumentError(msg)
        limit = self.comm.Get_attr(self._mpi.TAG_UB) or 32767  # the least that MPI promises
        if not 0 <= tag <= limit:
            msg = f"{call}: tag {tag}; expected 0 to {limit}, which this MPI library can carry"
            raise InvalidArgumentError(msg)

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
        return [n * row for n in splits]
