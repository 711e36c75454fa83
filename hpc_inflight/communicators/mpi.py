"""The backend for CPU tensors: blocking MPI collectives and non-blocking point-to-point, over mpi4py."""

from __future__ import annotations

import itertools
import threading
import time
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from hpc_inflight import _mpi
from hpc_inflight.communicators import _mpi_barrier
from hpc_inflight.communicators import _mpi_buffers as buf
from hpc_inflight.communicators._mpi_move import Mover
from hpc_inflight.communicators._mpi_p2p import RequestCompletion, Requests
from hpc_inflight.communicators._mpi_worker import Worker
from hpc_inflight.config import config
from hpc_inflight.errors import DrainTimeout, GroupDestroyedError, InvalidArgumentError
from hpc_inflight.work import Completion, DoneWork, Work

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpi4py import MPI

    from hpc_inflight.communicators.base import Operation

DESTROYED = "was destroyed; make a new group, or issue before destroying it"
_DONE = DoneWork()


class MPICommunicator(Mover):
    """One group over its own duplicated MPI communicator; see `hpc_inflight.communicators.base.Communicator`.

    Attributes:
        name: The group's name, for messages.
        seq: Number of collectives issued so far; the same on every rank of a program that is right.
    """

    def __init__(self, comm: MPI.Intracomm, name: str) -> None:
        super().__init__(comm, name)
        self._mpi = _mpi.mpi()
        self.seq = 0
        self._numbers = itertools.count(1)  # next() of it is atomic
        self._p2p_numbers = itertools.count(1)
        self._issue_lock = threading.Lock()  # numbers and queue in the same order, whichever threads issue
        self._worker = Worker(name, config().max_pending)
        self._requests = Requests()
        # one rank has nobody to wait for; and without MPI_THREAD_MULTIPLE no second thread may call MPI
        self._inline_only = self.size == 1 or not _mpi.thread_multiple()

    # issuing ------------------------------------------------------------------------------------------------

    def run_now(self, operations: Sequence[Operation]) -> DoneWork | None:
        """See `Communicator.run_now`."""
        if self._unusable:
            self._refuse()
        if not self._worker.run_inline(operations, wait_turn=self._inline_only):
            return None
        self.seq = next(self._numbers)
        return _DONE

    def enqueue(
        self, op: str, operations: Sequence[Operation], outputs: Sequence[torch.Tensor], timeout_s: float
    ) -> Work:
        """See `Communicator.enqueue`."""
        if self._inline_only or self._worker.is_current():
            return Work(self._run_at_once(op, operations, timeout_s), outputs)
        self._worker.wait_for_room(timeout_s)
        with self._issue_lock:
            if self._unusable:
                self._refuse()
            self.seq = next(self._numbers)
            completion = Completion(op, self.name, self.seq, timeout_s)
            self._worker.submit(completion, operations)
        return Work(completion, outputs)

    def _run_at_once(self, op: str, operations: Sequence[Operation], timeout_s: float) -> Completion:
        if self._unusable:
            self._refuse()
        self.seq = next(self._numbers)
        completion = Completion(op, self.name, self.seq, timeout_s)
        completion.start()
        error: BaseException | None = None
        try:
            self._worker.run_inline(operations, wait_turn=True)
        except Exception as caught:  # noqa: BLE001  # an asynchronous operation fails when it is waited for
            error = caught
        completion.finish(error)
        return completion

    def _refuse(self) -> NoReturn:
        raise GroupDestroyedError(f"group {self.name} {self._unusable}")

    def monitored_barrier(self, timeout_s: float, *, all_ranks: bool) -> None:
        """Block until all ranks have come, or name who has not; see `_mpi_barrier.monitored`."""
        run = _mpi_barrier.monitored(self, self.own_tag + 1, timeout_s, all_ranks=all_ranks)
        if self.run_now([run]) is None:
            self.enqueue("monitored_barrier", [run], (), float("inf")).wait()  # it has a deadline of its own

    def send(self, tensor: torch.Tensor, dst: int, tag: int, timeout_s: float) -> Work:
        """See `Communicator.send`."""
        self._check_p2p("send", tensor, dst, tag)
        with torch.inference_mode():
            source = buf.source(tensor)
        completion = RequestCompletion("send", self.name, next(self._p2p_numbers), timeout_s, source, None)
        request = self.comm.Isend(buf.move_buffer(source), dst, tag)
        return self._start(completion, request, [])

    def recv(self, tensor: torch.Tensor, src: int | None, tag: int, timeout_s: float) -> Work:
        """See `Communicator.recv`."""
        self._check_p2p("recv", tensor, src, tag)
        buf.check_output("recv", tensor, "tensor")
        target, after = buf.target(tensor), None
        if target is not tensor:

            @torch.inference_mode()
            def after() -> None:
                buf.unflatten(target, [tensor])

        completion = RequestCompletion("recv", self.name, next(self._p2p_numbers), timeout_s, target, after)
        source = self._mpi.ANY_SOURCE if src is None else src
        request = self.comm.Irecv(buf.move_buffer(target), source, tag)
        return self._start(completion, request, [tensor])

    def _start(self, completion: RequestCompletion, request: Any, outputs: list[torch.Tensor]) -> Work:
        completion.attach(request, self._requests)
        self._requests.add(completion)
        return Work(completion, outputs)

    def pending_works(self) -> list[Completion]:
        """See `Communicator.pending_works`."""
        return sorted([*self._worker.pending(), *self._requests.pending()], key=lambda c: c.issued_at)

    def split(self, ranks: Sequence[int], name: str, timeout_s: float) -> MPICommunicator:
        """See `Communicator.split`."""
        return MPICommunicator(_mpi.subset(self.comm, ranks, timeout_s, f"split_group({list(ranks)})"), name)

    def shutdown(self, timeout_s: float) -> None:
        """See `Communicator.shutdown`; raises `DrainTimeout` when works are still pending at the deadline."""
        deadline = time.monotonic() + timeout_s
        with self._issue_lock:
            in_step = not self._unusable
            self.give_up(DESTROYED)
        try:
            while pending := self.pending_works():
                pending[0].block(max(0.0, deadline - time.monotonic()))
        except TimeoutError as error:
            self._requests.give_up()
            msg = f"destroying group {self.name}: {error}"
            raise DrainTimeout(msg) from None
        finally:
            self._worker.stop()
        with self._worker.turn():  # another thread may be in a call that began before
            if self._checker is not None:
                self._checker.free()
            if in_step:
                self.comm.Free()

    def abort(self) -> None:
        """See `Communicator.abort`."""
        self.give_up("was aborted; make a new group")
        self._worker.abort(f"group {self.name} was aborted before this ran")
        self._requests.give_up()

    # checks -------------------------------------------------------------------------------------------------

    def _check_p2p(self, call: str, tensor: torch.Tensor, peer: int | None, tag: int) -> None:
        if self._unusable:
            self._refuse()
        buf.check_tensor(call, tensor)
        if peer is not None and not 0 <= peer < self.size:
            msg = f"{call}: peer rank {peer} is not in group {self.name}; expected 0 to {self.size - 1}"
            raise InvalidArgumentError(msg)
        if not 0 <= tag < self.own_tag:
            msg = f"{call}: tag {tag}; expected 0 to {self.own_tag - 1}, which this MPI library can carry"
            raise InvalidArgumentError(msg)
