"""Issuing: which communicator a tensor belongs to, what becomes of an operation there, and blocks of calls."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import nullcontext
from time import monotonic
from typing import TYPE_CHECKING, Any

import torch

from hpc_inflight import _c10d_forms as forms
from hpc_inflight import _gate, flight_recorder, work_registry
from hpc_inflight import _torch_compat as compat
from hpc_inflight._c10d_identity import BACKEND, GroupIdentity
from hpc_inflight.errors import GroupDestroyedError, InflightError, InvalidArgumentError
from hpc_inflight.flight_recorder import FATE, Lane
from hpc_inflight.work import CoalescedCompletion, DoneWork, Work

if TYPE_CHECKING:
    from hpc_inflight.communicators.base import Communicator, Operation
    from hpc_inflight.communicators.mpi import MPICommunicator

_Tensors = Sequence[torch.Tensor]


def _cuda_index(device: Any) -> int | None:
    """Return the index of a CUDA device, of the current one where none is given; None for other devices."""
    if device is None or torch.device(device).type != "cuda":
        return None
    index: int | None = torch.device(device).index
    return torch.cuda.current_device() if index is None else index


def _spanned(name: str, operations: Sequence[Operation]) -> Operation:
    """Return the operations as one that the profiler shows from here to its end."""
    end = compat.begin_span(f"{name} (in flight)")

    def run() -> None:
        try:
            for operation in operations:
                operation()
        finally:
            end()  # before the work is complete: whoever waited for it may end the profiler next

    return run


class Issuer(GroupIdentity):
    """A group's communicators and the one way in which all its methods issue.

    CPU tensors go to MPI. CUDA tensors go to NCCL, on one device per group: the one that the group was made with, or
    that of the first CUDA tensor.
    """

    def __init__(self, store: Any, rank: int, size: int, communicator: MPICommunicator, timeout_s: float) -> None:
        super().__init__(store, rank, size, timeout_s)
        self._comm = communicator
        self._flight.ranks = communicator.global_ranks
        self._lane, self._nccl_lane = Lane(self._flight, "mpi"), Lane(self._flight, "nccl")
        self._nccl: Any = None  # the NCCLCommunicator, made at the first use of a CUDA tensor
        self._nccl_index: int | None = None  # its device
        self._nccl_failure: InflightError | None = None
        self._nccl_lock = threading.Lock()
        self._closed = ""  # why it cannot be used any more
        self._coalescing: list[Any] | None = None
        self._coalescing_thread = 0
        self._call_is_open = False  # in such a block: a call was begun and has issued nothing yet
        self._flushed: list[Any] = []  # works of a block that had to end early

    # communicators -------------------------------------------------------------------------------------------

    def _open_mpi(self, call: str) -> MPICommunicator:
        if self._closed:
            raise GroupDestroyedError(f"{call}: {self.describe()} {self._closed}")
        return self._comm

    def _open(self, call: str, tensor: torch.Tensor) -> Communicator:
        """Return the communicator for the tensor's device; the call has to check that its other tensors are there."""
        if self._closed:
            raise GroupDestroyedError(f"{call}: {self.describe()} {self._closed}")
        if self._coalescing is not None and self._coalesces():
            self._note_call()
        if not tensor.is_cuda:
            return self._comm
        index = tensor.get_device()
        if index == self._nccl_index:
            nccl: Communicator = self._nccl
            return nccl
        made: Communicator = self._open_nccl(call, index)
        return made

    def _open_any(self, call: str, tensors: _Tensors) -> Communicator:
        return self._open(call, tensors[0]) if tensors else self._open_mpi(call)

    def _open_nccl(self, call: str, index: int) -> Any:
        """Return the NCCL communicator, making it at the first use: all ranks come here then.

        A failure is final for this group: its ranks may be at different operations. CPU tensors are not affected.
        """
        from hpc_inflight.communicators.nccl import NCCLCommunicator

        if index == self._nccl_index:
            return self._nccl
        # behind the gate: NCCL's setup would end a capture
        _gate.gate.enter(self._nccl_lock, self._timeout_s, call, self._name)
        try:
            if self._nccl_failure is not None:
                raise self._nccl_failure.with_traceback(None)
            if self._nccl is None:
                try:
                    comm, seconds = self._comm, self._timeout_s
                    made = NCCLCommunicator(
                        comm.comm,
                        comm.spare_tag,
                        self._name,
                        index,
                        seconds,
                        lambda: bool(self._closed),
                        comm.key[1],
                    )
                except InvalidArgumentError:
                    raise  # before anything was tried
                except InflightError as error:
                    self._nccl_failure = error
                    raise
                self._nccl, self._nccl_index = made, index
            if index != self._nccl_index:
                msg = (
                    f"{call}: the tensor is on cuda:{index}; {self.describe()} uses cuda:{self._nccl_index}, as its "
                    "first operation on CUDA tensors did; move the tensor, or make another group"
                )
                raise InvalidArgumentError(msg)
            return self._nccl
        finally:
            self._nccl_lock.release()

    def eager_connect_single_device(self, device: Any) -> None:
        """Make the NCCL communicator now; c10d calls this where a group is made with ``device_id``.

        **Collective:** over the group.

        Raises:
            NCCLUnavailableError: A rank has no usable GPU, CuPy or NCCL, or two ranks have the same GPU.
            NCCLError: NCCL failed on a rank.
            CollectiveTimeout: A rank did not come.
        """
        index = _cuda_index(device)
        if index is not None:
            self._open_nccl("init_process_group", index)
            self.bound_device_id = torch.device("cuda", index)

    # issuing ------------------------------------------------------------------------------------------------

    def _issue(
        self,
        comm: Communicator,
        op: str,
        operations: Sequence[Operation],
        outputs: _Tensors,
        opts: Any,
        timeout: Any = None,
        *,
        inputs: _Tensors | None = None,
    ) -> Any:
        """Issue and record it; without ``inputs`` they are the outputs."""
        # one frame for the frequent cases: this runs for every collective
        lane = self._lane if comm is self._comm else self._nccl_lane
        row = lane.begin(op, outputs, inputs)
        try:
            is_async, limit = opts.asyncOp, opts.timeout
        except AttributeError:  # c10d's short forms, and older options
            opts = forms.options(opts)
            is_async, limit = opts is None or forms.is_async(opts), None if opts is None else opts.timeout
        if timeout is None:
            timeout = limit
        # a call with a timeout of its own needs a completion for the watchdog to look at
        timed = timeout is not None and timeout != compat.UNSET_TIMEOUT
        try:
            if self._coalescing is not None and self._coalesces():
                work = self._issue_in_block(comm, op, operations, outputs, inputs, is_async=is_async)
            elif compat.profiler_enabled():
                seconds = compat.timeout_s(timeout, self._timeout_s)
                work = self._issue_profiled(
                    comm, op, operations, outputs, inputs, seconds, is_async=is_async, at_once=not (is_async or timed)
                )
            elif is_async or timed or (work := comm.run_now(operations)) is None:
                seconds = compat.timeout_s(timeout, self._timeout_s) if timed else self._timeout_s
                work = comm.enqueue(op, operations, outputs, seconds, inputs)
                if is_async and compat.inflight_allowed():
                    self._register(work, outputs)
        except BaseException as error:
            row[FATE] = flight_recorder.failed(error)
            raise
        if lane.enabled:
            completion = work.completion
            row[FATE] = monotonic() if completion is None else flight_recorder.follow(completion)
        if timed and not is_async:
            work.wait()
        return work

    def _lane_of(self, comm: Communicator) -> Lane:
        return self._lane if comm is self._comm else self._nccl_lane

    def _issue_in_block(
        self,
        comm: Communicator,
        op: str,
        operations: Sequence[Operation],
        outputs: _Tensors,
        inputs: _Tensors | None,
        *,
        is_async: bool,
    ) -> Any:
        name, traced = f"{BACKEND}:{op}", compat.profiler_enabled()
        with compat.record_shapes(name, outputs) if traced else nullcontext():
            work = self._issued(comm.enqueue(op, operations, outputs, self._timeout_s, inputs), outputs)
        # c10d waits at once for what is synchronous, and an NCCL operation is launched at the end of the block only
        return work if is_async or comm is self._comm else DoneWork()

    def _issue_profiled(
        self,
        comm: Communicator,
        op: str,
        operations: Sequence[Operation],
        outputs: _Tensors,
        inputs: _Tensors | None,
        seconds: float,
        *,
        is_async: bool,
        at_once: bool,
    ) -> Any:
        name = f"{BACKEND}:{op}"
        with compat.record_shapes(name, outputs):
            if at_once and (done := comm.run_now(operations)) is not None:
                return done
            if comm is self._comm:  # a span for the time in its thread; CUDA's kernels show by themselves
                operations = [_spanned(name, operations)]
            work = comm.enqueue(op, operations, outputs, seconds, inputs)
        return self._issued(work, outputs) if is_async else work

    @staticmethod
    def _register(work: Any, outputs: _Tensors) -> None:
        for tensor in outputs:
            if compat.has_storage(tensor):  # else nothing could wait for it by tensor
                work_registry.register(tensor, work)

    def _issued(self, work: Any, outputs: _Tensors) -> Any:
        if compat.inflight_allowed():
            self._register(work, outputs)
        if self._coalescing is not None and self._coalesces():
            self._call_is_open = False
            self._coalescing.append(work)
            if work.completion.op == "coalesced":  # what the watchdog of another rank has pending, too
                self._nccl_lane.called = "coalesced"
        return work

    # blocks of calls ----------------------------------------------------------------------------------------

    def _coalesces(self) -> bool:
        return self._coalescing is not None and self._coalescing_thread == threading.get_ident()

    def _note_call(self) -> None:
        """End a block of coalesced calls in which one failed: nobody else may, and it would swallow what comes."""
        if self._call_is_open:
            self._call_is_open = False
            self._flushed, self._coalescing = self._coalescing or [], None
            self._end_nccl_block()
        else:
            self._call_is_open = True

    def _start_coalescing(self, device: Any) -> None:
        self._open_mpi("coalescing")
        index = _cuda_index(device)
        if index is not None:
            self._open_nccl("coalescing", index)
        self._coalescing, self._coalescing_thread = [], threading.get_ident()
        self._call_is_open, self._flushed = False, []
        if self._nccl is not None:
            self._nccl.begin_block()

    def _end_nccl_block(self) -> Work | None:
        return None if self._nccl is None else self._nccl.end_block()

    def _end_coalescing(self, _device: Any) -> Any:
        works, self._coalescing = self._coalescing or [], None
        flushed, self._flushed = self._flushed, []
        block = self._end_nccl_block()
        if block and all(work.completion is block.completion for work in (*flushed, *works)):
            return block
        works = [*flushed, *works]
        completion = CoalescedCompletion(self._name, [work.completion for work in works], self._timeout_s)
        return Work(completion, [tensor for work in works for tensor in work.result()])
