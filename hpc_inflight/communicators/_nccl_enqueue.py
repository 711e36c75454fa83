"""Issuing on the communication stream: an operation by itself, or what a thread collects in a block of calls."""

from __future__ import annotations

import itertools
import threading
import time
from typing import TYPE_CHECKING, Any

from hpc_inflight import _gate
from hpc_inflight.communicators._nccl_completion import LateCompletion, StreamCompletion
from hpc_inflight.communicators._nccl_life import Life
from hpc_inflight.communicators._nccl_stream import LARGE
from hpc_inflight.config import config
from hpc_inflight.errors import CaptureError
from hpc_inflight.work import Completion, Work

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from hpc_inflight._cupy import Runtime
    from hpc_inflight.communicators._nccl_stream import Launch, Stream

_NO_STREAM = -1


class Enqueuer(Life):
    """The asynchronous operations of a communicator, and the order in which all are numbered.

    Attributes:
        seq: Number of collectives issued so far.
        launching: The block of calls that is being launched at the moment, in which NCCL may wait for other ranks.
    """

    def __init__(
        self,
        runtime: Runtime,
        index: int,
        rank: int,
        size: int,
        nccl: Any,
        name: str,
        stream: Stream,
        timeout_s: float,
    ) -> None:
        super().__init__(runtime, index, rank, size, nccl, name, stream)
        self.seq = 0
        self.launching: Completion | None = None
        self._current_stream, self._current_device = runtime.current_stream, runtime.current_device
        self._capturing = runtime.capturing
        self._timeout_s = timeout_s
        self._numbers = itertools.count(1)  # next() of it is atomic
        self._max_pending = config().max_pending
        self._block: list[Launch] | None = None  # of the block of calls that is being collected, see begin_block
        self._block_work: LateCompletion | None = None
        self._block_thread = 0
        self._block_outputs: list[torch.Tensor] = []
        self._block_inputs: list[torch.Tensor] = []
        self._block_streams: set[int] = set()

    def enqueue(
        self,
        op: str,
        operations: Sequence[Launch],
        outputs: Sequence[torch.Tensor],
        timeout_s: float,
        inputs: Sequence[torch.Tensor] | None = None,
    ) -> Work:
        """Launch operations on the communication stream, as one NCCL group; see `Communicator.enqueue`.

        While this thread collects a block of calls, they are kept for its end.
        """
        if self._unusable or self._block is not None:
            if self._unusable:
                self._refuse()
            if self._block_thread == threading.get_ident():
                return self._collect(operations, outputs, inputs)
        index, stream = self._index, self._stream
        if self._current_device() != index:
            with self.runtime.on_device(index):
                return self.enqueue(op, operations, outputs, timeout_s, inputs)
        pending = stream.pending
        if pending and (len(pending) >= stream.look_at or (outputs and outputs[0].nbytes >= LARGE)):
            stream.look_after(self._max_pending, timeout_s)
        caller = self._current_stream(index)
        self.seq = seq = next(self._numbers)
        keep = operations, outputs, inputs
        completion = StreamCompletion(op, self.name, seq, timeout_s, stream, caller, keep)
        # the legacy default stream, of handle 0, cannot be captured
        if (caller and self._capturing()) or not stream.launch(completion, operations, caller):
            self._launch(completion, operations, caller)
        return Work(completion, outputs)

    def _launch(self, completion: StreamCompletion, operations: Sequence[Launch], caller: int) -> None:
        if caller and self._capturing():
            self._enter_capture(completion.op)
            completion.capture()
        while not self._stream.launch(completion, operations, caller):
            _gate.gate.wait(completion.timeout_s, f"{completion.op} on group {self.name}")

    def _enter_capture(self, op: str) -> None:
        """Note the graph; refuse it beside what is in flight on this group, which it would not be ordered after."""
        # without asking the device, which a capture forbids; the drain at its beginning has asked
        if count := sum(not work.completed for stream in self._streams() for work in list(stream.pending)):
            msg = (
                f"{op} on group {self.name}: captured while {count} of its operations are enqueued; begin the capture "
                "with torch.cuda.graph or hpc_inflight.graph, which wait for them first, and issue nothing on this "
                "group from elsewhere until it has ended"
            )
            raise CaptureError(msg)
        if self.size > 1:  # alone, NCCL copies, and its communicator has no part in the graph
            self._graphs.update(_gate.graphs())

    # blocks of calls ----------------------------------------------------------------------------------------

    def begin_block(self) -> None:
        """Collect what this thread issues from here on, for one NCCL group; `end_block` launches it."""
        self._block_thread = threading.get_ident()
        self._block, self._block_work, self._block_outputs, self._block_inputs = [], None, [], []
        self._block_streams = set()

    def _collect(
        self, operations: Sequence[Launch], outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor] | None
    ) -> Work:
        if self._block_work is None:
            self.seq = next(self._numbers)
            stream, until = self._stream, "its block of coalesced calls ends"
            fields = "coalesced", self.name, self.seq, self._timeout_s, stream, 0, None
            with self.runtime.on_device(self._index):  # it may make an event
                self._block_work = LateCompletion(*fields, until=until, blocks=False)
        self._block_streams.add(self._current_stream(self._index))  # where its inputs and temporaries are made
        assert self._block is not None  # noqa: S101  # for mypy: the caller has looked
        self._block += operations
        self._block_outputs += outputs
        self._block_inputs += inputs or ()
        return Work(self._block_work, outputs)

    def end_block(self) -> Work | None:
        """Launch what was collected; None if that is nothing."""
        operations, outputs, late = self._block or [], self._block_outputs, self._block_work
        keep = operations, outputs, self._block_inputs
        self._block, self._block_work, self._block_outputs, self._block_inputs = None, None, [], []
        if late is None:
            return None
        with self.runtime.on_device(self._index):
            caller = self.runtime.current_stream(self._index)
            others = self._block_streams - {caller}
            # no one stream's wait makes the memory of several streams safe
            late.hold(keep, _NO_STREAM if others else caller)
            late.issued_at = time.monotonic()  # not when its first call was collected
            self.launching = late
            try:
                self._stream.look_after(self._max_pending, self._timeout_s)
                if others:
                    self._stream.follow(others)
                self._launch(late, operations, caller)
            except Exception as error:
                if late in self._stream.pending or late in self._stream.failed:
                    late.refused(error)
                else:
                    late.finish(error)  # nothing of it was launched
                raise
            finally:
                self.launching = None
        late.launched()
        return Work(late, outputs)
