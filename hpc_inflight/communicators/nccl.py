"""The backend for CUDA tensors: NCCL through CuPy, by raw handles, on a communication stream or the caller's own."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import time
from typing import TYPE_CHECKING, Any

from hpc_inflight import _cupy, _gate, _mpi
from hpc_inflight._cupy import apart_from_captures
from hpc_inflight._gate import captures, gate
from hpc_inflight._poll import poll
from hpc_inflight.communicators import _layout as layout
from hpc_inflight.communicators._checks import check_peer
from hpc_inflight.communicators._nccl_completion import CHECK_S, StreamCompletion, may_ask_and_is_done
from hpc_inflight.communicators._nccl_connect import TAGS, Meeting, connect
from hpc_inflight.communicators._nccl_enqueue import Enqueuer
from hpc_inflight.communicators._nccl_p2p import Loopback, Message, Pair
from hpc_inflight.communicators._nccl_stream import Stream, run_here
from hpc_inflight.communicators.base import Reduction
from hpc_inflight.errors import (
    CollectiveTimeout,
    InflightError,
    InvalidArgumentError,
    NCCLError,
    NCCLUnavailableError,
    UnsupportedError,
)
from hpc_inflight.work import Completion, DoneWork, Work

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from mpi4py import MPI

    from hpc_inflight.communicators._nccl_stream import Launch
    from hpc_inflight.communicators.base import Operation

OWN_TAGS = 2 * TAGS  # that the group's MPI communicator keeps for this module
_DONE = DoneWork()


class _Seen(Completion):
    """A synchronous operation that the watchdog has found on its stream."""

    device_type = "cuda"
    __slots__ = ()


def _equip(runtime: _cupy.Runtime, index: int) -> tuple[Stream, int, torch.Tensor]:
    """Return a stream, an event to record behind synchronous operations, and a tensor for a barrier in a capture.

    The memory of one made in the capture would belong to the graph.

    Raises:
        NCCLUnavailableError: Anything failed; before the ranks connect, so that all learn of it.
    """
    try:
        runtime.uuid(index)  # CuPy says in a line that there is no such device, torch in a paragraph
        with runtime.on_device(index), apart_from_captures(runtime):
            stream = Stream(runtime, index, lambda: None)
            return stream, stream.own_event(), runtime.zeros(index)
    except Exception as error:
        raise NCCLUnavailableError(str(error) or type(error).__name__) from error


class NCCLCommunicator(Enqueuer):
    """One group's NCCL communicator on one device; see `hpc_inflight.communicators.base.Communicator`.

    Operations are launched in the caller: an asynchronous one on the communication stream, behind what the current
    stream has so far, a synchronous one on the current stream itself. Both return at once. `Work.wait` makes the
    current stream wait and never blocks the host, unless it is given a timeout.

    **Collective:** over the group's ranks, at the group's first operation on CUDA tensors; see
    `_nccl_connect.connect` for what it raises.

    Args:
        comm: The group's MPI communicator, over which the ranks find each other.
        tag: The first of `OWN_TAGS` tags on it that nothing else uses.
        name: The group's name, for messages.
        index: This rank's device.
        timeout_s: Seconds for all ranks to come here.
        stopped: Says whether nobody wants it any more, so that its ranks need not be waited for.
        life: See `_nccl_connect.Meeting`.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        tag: int,
        name: str,
        index: int,
        timeout_s: float,
        stopped: Callable[[], bool] = lambda: False,
        life: int = 0,
    ) -> None:
        runtime: _cupy.Runtime | InflightError
        try:
            runtime = _cupy.runtime()
            if runtime.capturing():
                msg = (
                    f"group {name} has no NCCL communicator yet, and none can be made while a CUDA graph is captured; "
                    "issue a collective on a CUDA tensor of the group before the capture, or make it with device_id"
                )
                raise InvalidArgumentError(msg)
            stream, self._here, self._token = _equip(runtime, index)
        except NCCLUnavailableError as error:
            runtime = error
        ranks = range(comm.size)
        meeting = Meeting(comm, ranks, tag, f"NCCL for group {name}", time.monotonic() + timeout_s, stopped, life)
        nccl = connect(meeting, runtime, index)
        super().__init__(_cupy.runtime(), index, comm.rank, comm.size, nccl, name, stream, timeout_s)
        self._record = self.runtime.event_record
        self._comm = comm
        self._life = life
        self._tag = tag
        self._p2p_numbers = itertools.count(1)
        self._left = self._past = 0  # the last synchronous operation, and the last that is known to be complete
        self._seen: _Seen | None = None

    # issuing ------------------------------------------------------------------------------------------------

    def run_now(self, operations: Sequence[Launch]) -> DoneWork:
        """Launch operations on the current stream; see `Communicator.run_now`."""
        index = self._index
        if self._current_device() != index:
            with self.runtime.on_device(index):
                return self.run_now(operations)
        caller = self._current_stream(index)
        if caller and self._stream.pending and self._capturing():  # the legacy default stream cannot be captured
            self._enter_capture("a synchronous collective")
        while True:
            with self._stream.lock:
                if not gate.closed or gate.may_pass() or (caller and self._capturing()):
                    self._run_here(operations, caller)
                    return _DONE
            gate.wait(self._timeout_s, f"a synchronous collective on group {self.name}")

    def _run_here(self, operations: Sequence[Launch], caller: int) -> None:
        if self._unusable:  # asked under the lock: what ends a communicator takes it in between
            self._refuse()
        self.seq = seq = next(self._numbers)
        alone = self.size == 1  # nobody waits for anybody, and NCCL's communicator has no part in a graph
        captured = not alone and caller and self._capturing()
        if captured:  # noted before: what fails behind the launch leaves it in the graph
            self._graphs.update(_gate.graphs())
        try:
            if captures and not captured and not self._capturing():  # another thread captures
                with apart_from_captures(self.runtime):
                    run_here(self.runtime, operations, caller)
            else:
                run_here(self.runtime, operations, caller)
        except NCCLError:
            if self._unusable:  # an abort ended it
                self._refuse()
            raise
        if not alone and not captured:
            self._record(self._here, caller)
            self._left = seq

    def synchronous(self, op: str, timeout_s: float) -> Completion | None:
        """Return what stands for the synchronous operations so far, unless they are complete; for the watchdog.

        All record the same event, which so speaks for the last of them: NCCL runs them in order. Their time counts from
        when that one was first seen here.
        """
        left, seen = self._left, self._seen
        if left == self._past or self._unusable is not None:
            return None
        with contextlib.suppress(NCCLError):  # whoever uses the device next is told
            if not may_ask_and_is_done(self.runtime, self._here):
                if seen is None or seen.seq != left:
                    self._seen = seen = _Seen(op, self.name, left, timeout_s)
                return seen
        self._past, self._seen = left, None
        return None

    def block_synchronous(self, deadline: float) -> None:
        """See `Life.block_synchronous`."""

        def done() -> bool:
            if self._left == self._past or self._stopping or _gate.capturing() or self._capturing():
                return True
            return may_ask_and_is_done(self.runtime, self._here)

        while not poll(done, max(0.0, min(CHECK_S, deadline - time.monotonic()))):
            self._stream.check()
            if time.monotonic() >= deadline:
                msg = f"the synchronous collectives up to seq {self._left} on group {self.name}: not complete in time"
                raise CollectiveTimeout(f"{msg}; a rank has not issued one, or is stuck")

    # point to point -----------------------------------------------------------------------------------------

    def send(self, tensor: torch.Tensor, dst: int, tag: int, timeout_s: float) -> Work:  # noqa: ARG002  # NCCL has none
        """See `Communicator.send`; NCCL has no tags: the messages of a pair match in their order."""
        if self._unusable:
            self._refuse()
        if self._block is not None and self._block_thread == threading.get_ident():
            return self._collect([self.send_in_group(tensor, dst)], (), (tensor,))
        self._check_tensor("send", tensor)
        check_peer("send", dst, self.size, self.name)
        value = layout.source(tensor)
        completion = self._message("send", dst, timeout_s, value, None, (tensor, value))
        return Work(completion, [])

    def recv(self, tensor: torch.Tensor, src: int | None, tag: int, timeout_s: float) -> Work:  # noqa: ARG002  # as above
        """See `Communicator.recv`; NCCL has no tags and cannot receive from any rank."""
        if self._unusable:
            self._refuse()
        if src is None:
            msg = "recv: NCCL cannot receive from any rank; name the source, or receive a CPU tensor"
            raise UnsupportedError(msg)
        if self._block is not None and self._block_thread == threading.get_ident():
            return self._collect([self.recv_in_group(tensor, src)], [tensor], None)
        self._check_output("recv", tensor, "tensor")
        check_peer("recv", src, self.size, self.name)
        landing = layout.target(tensor)
        after = None if landing is tensor else functools.partial(layout.unflatten, landing, [tensor])
        completion = self._message("recv", src, timeout_s, landing, after, (tensor, landing))
        completion.source = src
        return Work(completion, [tensor])

    def _message(
        self, op: str, peer: int, timeout_s: float, value: torch.Tensor, after: Callable[[], None] | None, keep: object
    ) -> StreamCompletion:
        runtime, index, seq = self.runtime, self._index, next(self._p2p_numbers)
        with runtime.on_device(index):
            pair = self._pair(op, peer)
            if len(pair.stream.pending) >= pair.stream.look_at:
                pair.stream.look_after(self._max_pending, timeout_s)
            caller = runtime.current_stream(index)
            message = Message(op, self.name, seq, timeout_s, value.data_ptr(), value.nbytes, after, keep, caller)
            if caller and self._capturing():
                pair.may_capture(message)
                self._enter_capture(op)
            else:
                while (issued := pair.issue(message)) is None:
                    gate.wait(timeout_s, f"{op} on group {self.name}")
                return issued
            captured = pair.issue(message, captured=True)
            assert captured is not None  # noqa: S101  # for mypy: a capture passes the gate
            return captured

    def _pair(self, op: str, peer: int) -> Pair | Loopback:
        key = (self.rank, peer) if op == "send" else (peer, self.rank)
        pair = self._pairs.get(key)
        if pair is None:
            with self._lock:
                pair = self._pairs.get(key)
                if pair is None:
                    if self._stopping:
                        self._refuse()
                    pair = self._pairs[key] = self._new_pair(key)
        return pair

    def _new_pair(self, key: tuple[int, int]) -> Pair | Loopback:
        src, dst = key
        if src == dst:
            stream = Stream(self.runtime, self._index, self._stream.check, in_order=False)
            return Loopback(stream, f"rank {src} to issue the other end")
        what = f"NCCL for messages from rank {src} to {dst} of group {self.name}"

        def meet() -> Any:
            deadline = time.monotonic() + self._timeout_s
            meeting = Meeting(self._comm, key, self._tag + TAGS, what, deadline, lambda: self._stopping, self._life)
            return connect(meeting, self.runtime, self._index)

        def check() -> None:
            if pair.nccl is not None:
                self.runtime.check(pair.nccl)

        pair = Pair(
            Stream(self.runtime, self._index, check),
            meet,
            is_sender=src == self.rank,
            until=f"rank {dst if src == self.rank else src} to issue its end of the first message",
            in_thread=_mpi.thread_multiple(),
        )
        return pair

    # captures and barriers ----------------------------------------------------------------------------------

    def capturing(self) -> bool:
        """Say whether the current stream is being captured into a CUDA graph."""
        return bool(self._capturing())

    def captured_barrier(self) -> DoneWork:
        """Capture a collective of one element on the current stream, which no replay passes before all have come."""
        return self.run_now([self.all_reduce(self._token, Reduction("SUM"))])

    def fence(self, timeout_s: float) -> Operation:
        """Return what blocks the host until all that was issued so far is complete, and the current stream's work.

        A barrier promises that to users of c10d.
        """
        works = self.pending_works()
        with self.runtime.on_device(self._index):
            caller = self.runtime.current_stream(self._index)
            here = StreamCompletion("barrier", self.name, self.seq, timeout_s, self._stream, caller, None)
            self.runtime.event_record(here.event, caller)
        deadline = time.monotonic() + timeout_s

        def run() -> None:
            for work in (*works, here):
                work.block(max(0.0, deadline - time.monotonic()))

        return run
