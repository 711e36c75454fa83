"""Completion of what runs on a communication stream: an event, and the tensors that it still needs."""

from __future__ import annotations

import threading
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol

from hpc_inflight import _gate
from hpc_inflight._poll import poll
from hpc_inflight._torch_compat import NO_TIMEOUT, timeout_s
from hpc_inflight.errors import InflightError
from hpc_inflight.work import Completion

if TYPE_CHECKING:
    from datetime import timedelta

    import torch

    from hpc_inflight._cupy import Runtime

CHECK_S = 0.1  # how often a host that waits asks NCCL whether anything failed

_future_lock = threading.Lock()


def may_ask_and_is_done(runtime: Runtime, event: int) -> bool:
    """Say whether an event is complete; False while a capture forbids to ask.

    An event query from any thread ends a capture in global mode; so none begins between looking for one and asking.

    Raises:
        NCCLError: Something failed on the device before it.
    """
    with _gate.polling:
        return not (_gate.capturing() or runtime.capturing()) and runtime.event_done(event)


class Stream(Protocol):
    """What a completion needs of its communication stream; see `hpc_inflight.communicators._nccl_stream.Stream`."""

    runtime: Runtime
    index: int
    raw: int
    events: list[int]
    failed: list[object]

    def check(self) -> None:
        """Raise what NCCL has found wrong since."""

    def resolve(self, future: torch.futures.Future[Any], outputs: list[torch.Tensor], event: int) -> None:
        """Complete a future behind an event."""


class StreamCompletion(Completion):
    """Completion of one launch on a communication stream.

    It keeps the inputs, outputs and temporaries until the event is complete, or until the stream that issued the
    operation has waited for it: from then on they are as safe as those of that stream's own kernels. Nothing is told
    to the allocator (``record_stream``), so no block is held back longer.

    Attributes:
        event: The event's handle: this object's own while anything refers to it, so nobody waits for another's.
        captured: It was issued under a CUDA graph capture, and is no work in flight.
        source: The rank that a receive is from; set for those alone.
    """

    device_type = "cuda"
    # what most have to the end is on the class: one is made for every operation
    completed = False
    exception = None
    raised = False
    started_at = None
    progress = None
    _future = None
    source: int

    def __init__(  # the base's arguments and these
        self, op: str, group: str, seq: int, timeout_s: float, stream: Stream, issuer: int, keep: object
    ) -> None:
        # not the base's: its lock would be for nobody
        self.op = op
        self.group = group
        self.seq = seq
        self.timeout_s = timeout_s
        self.issued_at = monotonic()
        self._stream = stream
        self._issuer = issuer
        self._keep = keep
        try:
            self.event: int = stream.events.pop()
        except IndexError:
            self.event = stream.runtime.event_create()

    def __del__(self) -> None:
        self._stream.events.append(self.event)

    def finish(self, exception: BaseException | None = None, leave: Any = None) -> None:
        """Mark it as ended and let go of its tensors."""
        if exception is not None and not self.completed:
            self.exception = exception.with_traceback(None)
        self.completed = True
        self._keep = self._future = None
        if self.progress is not None:
            self.progress.end(self.exception)
        if leave is not None:
            leave()

    def capture(self) -> None:
        """Note that a CUDA graph takes it, here and in the flight recorder."""
        self.captured = True
        _gate.keep_while_capturing(self)
        progress = self.progress
        while progress is not None:
            progress.captured = True
            progress = progress.also

    def fail(self, exception: BaseException) -> None:
        """Let everyone who waits raise ``exception``; its tensors stay, since the device may not be through with it."""
        if not self.completed:
            self._stream.failed.append(self._keep)
            self.finish(exception)

    def poll(self) -> bool:
        """Say whether the device is through with it; False while a capture forbids to ask."""
        if self.completed:
            return True
        if self.captured:
            return True
        try:
            done = may_ask_and_is_done(self._stream.runtime, self.event)
        except InflightError as error:
            self.finish(error)
        else:
            if done:
                self.finish()  # it may run callbacks: not while captures have to wait
        return self.completed

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> None:
        """Make the current stream wait for it; with a timeout, block the host until it is complete."""
        if self.completed:
            return
        if timeout and not self.captured:
            self.block(timeout_s(timeout, self.timeout_s))
            return
        stream = self._stream
        runtime, index = stream.runtime, stream.index
        current = runtime.current_stream(index)
        if self.captured and not runtime.capturing():
            return  # it ran in the graph's replays only, and those order themselves
        if current != stream.raw:
            if not current and runtime.current_device() != index:
                with runtime.on_device(index):
                    runtime.stream_wait(current, self.event)
            else:
                runtime.stream_wait(current, self.event)
        if current == self._issuer:
            self._keep = None

    def block(self, seconds: float) -> None:
        """Block the host until it is complete; what NCCL finds wrong meanwhile ends it, too.

        Raises:
            CollectiveTimeout: It is not within ``seconds``.
        """
        deadline = monotonic() + seconds
        while not poll(self.poll, max(0.0, min(CHECK_S, deadline - monotonic()))):
            try:
                self._stream.check()
            except InflightError as error:
                self.fail(error)  # the kernel runs on until an abort
                return
            if monotonic() >= deadline:
                raise self.timed_out(seconds)

    def future(self, outputs: list[torch.Tensor]) -> torch.futures.Future[Any]:
        """Return a future that is complete at once for the host; its ``wait`` and ``then`` order their streams."""
        with _future_lock:
            attached = self._future  # once: whoever polls may end it meanwhile
            if attached is not None:
                return attached[0]
            future = self._stream.runtime.future(self._stream.index)
            if not self.completed:
                self._future = future, outputs
            launched = self._is_launched()
        if launched:
            self._settle(future, outputs)
        return future

    def _is_launched(self) -> bool:
        return True

    def _settle(self, future: torch.futures.Future[Any], outputs: list[torch.Tensor]) -> None:
        if self.exception is not None:
            self.raised = True
            future.set_exception(self.exception)
        else:
            self._stream.resolve(future, outputs, self.event)


class LateCompletion(StreamCompletion):
    """Completion of an operation that is launched later: when its peer has come, or its block of calls ends.

    Attributes:
        until: What it waits for, for messages.
        blocks: ``wait`` may block the host until then: another thread launches it.
    """

    def __init__(  # as the base's
        self,
        op: str,
        group: str,
        seq: int,
        timeout_s: float,
        stream: Stream,
        issuer: int,
        keep: object,
        *,
        until: str,
        blocks: bool,
    ) -> None:
        super().__init__(op, group, seq, timeout_s, stream, issuer, keep)
        self._launched = threading.Event()
        self.until = until
        self.blocks = blocks

    def _is_launched(self) -> bool:
        return self._launched.is_set()

    def hold(self, keep: object, issuer: int) -> None:
        """Set what is kept and whose stream it is ordered after, which only the end of a block knows."""
        self._keep = keep
        self._issuer = issuer

    def launched(self) -> None:
        """Note that the event is recorded, and complete the future that was asked for before."""
        with _future_lock:
            self._launched.set()
            attached = self._future
        if attached is not None:
            self._settle(*attached)

    def finish(self, exception: BaseException | None = None, leave: Any = None) -> None:
        """Mark it as ended; one that fails before it is launched wakes those who wait for that."""
        with _future_lock:
            attached = None if self._launched.is_set() else self._future
            super().finish(exception, leave)
            self._launched.set()
        if attached is not None:
            self._settle(*attached)

    def refused(self, exception: BaseException) -> None:
        """Note that its launch failed; its tensors stay until the device is past it, as a part may be launched."""
        if not self.completed:
            self.exception = exception.with_traceback(None)
        self.launched()

    def poll(self) -> bool:
        """Say whether it was launched and is complete."""
        return super().poll() if self._launched.is_set() else self.completed

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> None:
        """Block the host until it is launched, then do what `StreamCompletion.wait` does.

        Raises:
            CollectiveTimeout: It is not launched in time.
            InflightError: Only this thread would launch it, later.
        """
        if not self._launched.is_set():
            if not self.blocks:
                msg = f"wait: {self.op} on group {self.group} is not issued before {self.until}; wait for it after that"
                raise InflightError(msg)
            seconds = timeout_s(timeout, self.timeout_s)
            if not self._launched.wait(min(seconds, threading.TIMEOUT_MAX)):
                raise self.timed_out(seconds, f"; it waits for {self.until}")
        super().wait(timeout)
