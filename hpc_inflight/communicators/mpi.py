"""The backend for CPU tensors: blocking MPI collectives and non-blocking point-to-point, over mpi4py."""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from hpc_inflight import _gate, _mpi
from hpc_inflight._mpi_agree import subset
from hpc_inflight.communicators import _layout as layout
from hpc_inflight.communicators import _mpi_barrier
from hpc_inflight.communicators import _mpi_buffers as buf
from hpc_inflight.communicators._checks import check_peer
from hpc_inflight.communicators._mpi_move import Mover
from hpc_inflight.communicators._mpi_p2p import RequestCompletion, Requests
from hpc_inflight.communicators._mpi_worker import Worker
from hpc_inflight.config import config
from hpc_inflight.errors import (
    CommunicatorAborted,
    DrainTimeout,
    GroupDestroyedError,
    InflightError,
    InvalidArgumentError,
)
from hpc_inflight.work import Completion, DoneWork, Work

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpi4py import MPI

    from hpc_inflight.communicators.base import Operation

_DONE = DoneWork()
_made: Counter[tuple[int, ...]] = Counter()  # groups by their ranks


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
        self._queued, self._live = self._worker.queued, self._requests.live  # both stay the same objects
        self._nth = _made[self.global_ranks]
        _made[self.global_ranks] += 1
        self.called_at = 0.0  # when an operation began that runs in its caller; 0 when none does
        self.called_seq = 0  # its number
        self._at_once: Completion | None = None  # what a callback has issued, and runs in it
        # one rank has nobody to wait for; and without MPI_THREAD_MULTIPLE no second thread may call MPI
        self._inline_only = self.size == 1 or not _mpi.thread_multiple()
        # nothing can make a thread raise that is inside MPI, so a program that lives on after a deadline waits outside
        self._never_in_caller = config().on_timeout == "raise" and not self._inline_only

    @functools.cached_property
    def global_ranks(self) -> tuple[int, ...]:
        """The world ranks of the group's ranks, in its order."""
        group, world = self.comm.group, self._mpi.COMM_WORLD.group
        ranks = tuple(group.Translate_ranks(list(range(self.size)), world))
        group.Free()
        return ranks

    @functools.cached_property
    def key(self) -> tuple[tuple[int, ...], int]:
        """The group's world ranks, and how many groups with those were made before it: the same on every member."""
        return self.global_ranks, self._nth

    @property
    def failed(self) -> tuple[Completion, float] | None:
        """The first enqueued operation that has failed, if any has, and when (``time.monotonic()``)."""
        return self._worker.failed

    # issuing ------------------------------------------------------------------------------------------------

    def run_now(self, operations: Sequence[Operation]) -> DoneWork | None:
        """See `Communicator.run_now`."""
        if self._unusable:
            self._refuse()
        if self._never_in_caller and not self._worker.is_current():
            return None
        worker = self._worker
        if not worker.take_turn(wait=self._inline_only):
            return None
        try:
            self.seq = self.called_seq = next(self._numbers)  # here, as the watchdogs of other ranks ask meanwhile
            self.called_at = time.monotonic()
            for operation in operations:
                operation()
        finally:
            self.called_at = 0.0
            worker.end_turn()
        return _DONE

    def enqueue(
        self,
        op: str,
        operations: Sequence[Operation],
        outputs: Sequence[torch.Tensor],
        timeout_s: float,
        inputs: Sequence[torch.Tensor] | None = None,  # noqa: ARG002  # every operation over MPI refers to its tensors
    ) -> Work:
        """See `Communicator.enqueue`."""
        if self._inline_only or self._worker.is_current():
            return Work(self._run_at_once(op, operations, timeout_s), outputs)
        self._worker.wait_for_room(timeout_s)
        self._begin_enqueuing(op, timeout_s)
        try:
            if self._unusable:
                self._refuse()
            self.seq = next(self._numbers)
            completion = Completion(op, self.name, self.seq, timeout_s)
            completion.watched = True
            self._worker.submit(completion, operations)
        finally:
            self._issue_lock.release()
        return Work(completion, outputs)

    def _begin_enqueuing(self, op: str, timeout_s: float) -> None:
        """Take the issue lock, once no other thread drains; see `_gate.Gate`."""
        _gate.gate.enter(self._issue_lock, timeout_s, op, self.name)

    def is_idle(self) -> bool:
        """See `Communicator.is_idle`."""
        # the lock first: who holds it may be about to enqueue; who takes it later finds the gate closed
        return not (self._issue_lock.locked() or self._queued or self._live or self._unusable)

    def quiesce(self, timeout_s: float) -> bool:
        """See `Communicator.quiesce`."""
        quiet = self._issue_lock.acquire(timeout=min(timeout_s, threading.TIMEOUT_MAX))
        if quiet:
            self._issue_lock.release()
        if self._unusable is not None:
            raise CommunicatorAborted(str(self._unusable)) from self._unusable
        return quiet

    def _run_at_once(self, op: str, operations: Sequence[Operation], timeout_s: float) -> Completion:
        if self._unusable:
            self._refuse()
        self.seq = next(self._numbers)
        completion = Completion(op, self.name, self.seq, timeout_s)
        completion.start()
        self._at_once = completion
        error: BaseException | None = None
        try:
            self._worker.run_inline(operations, wait_turn=True)
        except Exception as caught:  # noqa: BLE001  # an asynchronous operation fails when it is waited for
            error = caught
        finally:
            self._at_once = None
        completion.finish(error)
        return completion

    def _refuse(self) -> NoReturn:
        assert self._unusable is not None  # noqa: S101  # for mypy: its callers have looked
        raise type(self._unusable)(str(self._unusable))

    def monitored_barrier(self, timeout_s: float, *, all_ranks: bool) -> None:
        """Block until all ranks have come, or name who has not; see `_mpi_barrier.monitored`."""
        run = _mpi_barrier.monitored(self, self.own_tag + 1, timeout_s, all_ranks=all_ranks)
        if self.run_now([run]) is None:
            self.enqueue("monitored_barrier", [run], (), float("inf")).wait()  # it has a deadline of its own

    def send(self, tensor: torch.Tensor, dst: int, tag: int, timeout_s: float) -> Work:
        """See `Communicator.send`."""
        self._check_p2p("send", tensor, dst, tag)
        with torch.inference_mode():
            source = layout.source(tensor)
        completion = RequestCompletion("send", self.name, next(self._p2p_numbers), timeout_s, source, None)
        buffer = buf.move_buffer(source)
        return self._start(completion, lambda: self.comm.Isend(buffer, dst, tag), [])

    def recv(self, tensor: torch.Tensor, src: int | None, tag: int, timeout_s: float) -> Work:
        """See `Communicator.recv`."""
        self._check_p2p("recv", tensor, src, tag)
        buf.check_output("recv", tensor, "tensor")
        target, after = layout.target(tensor), None
        if target is not tensor:

            @torch.inference_mode()
            def after() -> None:
                layout.unflatten(target, [tensor])

        completion = RequestCompletion("recv", self.name, next(self._p2p_numbers), timeout_s, target, after)
        source, buffer = self._mpi.ANY_SOURCE if src is None else src, buf.move_buffer(target)
        return self._start(completion, lambda: self.comm.Irecv(buffer, source, tag), [tensor])

    def _start(self, completion: RequestCompletion, call: Callable[[], Any], outputs: list[torch.Tensor]) -> Work:
        self._requests.sweep()
        self._begin_enqueuing(completion.op, completion.timeout_s)
        try:
            completion.attach(call(), self._requests)
            self._requests.add(completion)
        finally:
            self._issue_lock.release()
        return Work(completion, outputs)

    @property
    def spare_tag(self) -> int:
        """The first of four tags on ``comm`` that nothing here uses."""
        return self.own_tag + 3

    def pending_works(self) -> list[Completion]:
        """See `Communicator.pending_works`."""
        at_once = self._at_once
        here = [] if at_once is None or at_once.completed else [at_once]
        return sorted([*here, *self._worker.pending(), *self._requests.pending()], key=lambda c: c.issued_at)

    def split(self, ranks: Sequence[int], name: str, timeout_s: float) -> MPICommunicator:
        """See `Communicator.split`."""
        return MPICommunicator(subset(self.comm, ranks, timeout_s, f"split_group({list(ranks)})"), name)

    def shutdown(self, timeout_s: float) -> None:
        """See `Communicator.shutdown`; raises `DrainTimeout` when works are still pending at the deadline."""
        deadline = time.monotonic() + timeout_s
        with self._issue_lock:
            in_step = self._unusable is None
            text = f"group {self.name} was destroyed; make a new group, or issue before destroying it"
            self.give_up(GroupDestroyedError(text))
        try:
            while pending := self.pending_works():
                pending[0].block(max(0.0, deadline - time.monotonic()))
        except TimeoutError as error:
            self._requests.give_up()
            msg = f"destroying group {self.name}: {error}"
            raise DrainTimeout(msg) from None
        finally:
            self._worker.stop()
        if not in_step:
            return  # MPI may still be in one of its calls; what it holds goes with the process
        with self._worker.turn():  # another thread may be in a call that began before
            if self._checker is not None:
                self._checker.free()
            self.comm.Free()

    def abort(self, error: InflightError | None = None) -> None:
        """See `Communicator.abort`."""
        error = error or CommunicatorAborted(f"group {self.name} was aborted; make a new group")
        self.give_up(error)
        self._worker.abort(error)
        if (at_once := self._at_once) is not None:
            at_once.fail(error)
        self._requests.give_up(error)

    # checks -------------------------------------------------------------------------------------------------

    def _check_p2p(self, call: str, tensor: torch.Tensor, peer: int | None, tag: int) -> None:
        if self._unusable:
            self._refuse()
        buf.check_tensor(call, tensor)
        check_peer(call, peer, self.size, self.name)
        if not 0 <= tag < self.own_tag:
            msg = f"{call}: tag {tag}; expected 0 to {self.own_tag - 1}, which this MPI library can carry"
            raise InvalidArgumentError(msg)
