"""Messages outside of a block of calls: each directed pair of ranks has a communicator and a stream of its own.

On one stream, two ranks that both send first would wait for each other for ever: each receive would come behind a
send. And a communicator comes into being only when both ends ask for it, so the first message of a pair cannot
make its caller wait for that: a thread connects the pair and launches what was issued meanwhile, in order.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpc_inflight.communicators._nccl_completion import LateCompletion, StreamCompletion
from hpc_inflight.dtypes import NCCL_UINT8
from hpc_inflight.errors import CaptureError, InflightError, InvalidArgumentError, NCCLError

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpc_inflight.communicators._nccl_stream import Stream


@dataclass
class Message:
    """One send or receive.

    Attributes:
        op: ``"send"`` or ``"recv"``.
        group: Name of the group.
        seq: Number in the group.
        timeout_s: Seconds that a wait may take.
        address: Of contiguous memory.
        nbytes: How much.
        after: What follows on the stream: bringing what was received into the caller's tensor.
        keep: The tensors.
        caller: The raw stream that issued it.
    """

    op: str
    group: str
    seq: int
    timeout_s: float
    address: int
    nbytes: int
    after: Callable[[], None] | None
    keep: object
    caller: int

    def completion(self, stream: Stream) -> StreamCompletion:
        """Return the completion of a message that is launched now."""
        return StreamCompletion(self.op, self.group, self.seq, self.timeout_s, stream, self.caller, self.keep)

    def late(self, stream: Stream, until: str) -> LateCompletion:
        """Return the completion of a message that is launched later."""
        fields = self.op, self.group, self.seq, self.timeout_s, stream, self.caller, self.keep
        return LateCompletion(*fields, until=until, blocks=True)


class Pair:
    """The messages from one rank to another, at one of the two.

    Args:
        stream: Of this pair alone.
        connect: Makes the communicator, in which the sender is rank 0 and the receiver rank 1; blocks.
        is_sender: This rank sends.
        until: What a message waits for while the pair is not connected, for errors.
        in_thread: Connect in a thread; False where only one thread may call MPI.
    """

    def __init__(
        self, stream: Stream, connect: Callable[[], Any], *, is_sender: bool, until: str, in_thread: bool
    ) -> None:
        self.stream = stream
        self.nccl: Any = None
        self._connect = connect
        self._is_sender = is_sender
        self._until = until
        self._in_thread = in_thread
        self._lock = threading.Lock()
        self._queue: list[tuple[LateCompletion, Message, int]] | None = []  # None from when all is launched at once
        self._failure: InflightError | None = None
        self._started = False
        self._has_met = False  # NCCL's first call, which blocks until the peer makes its own, is over
        self._thread: threading.Thread | None = None

    def stop(self, timeout_s: float) -> None:
        """Wait until nothing connects any more, once `Meeting.stopped` says so: then MPI's part may go."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def may_capture(self, message: Message) -> None:
        """Refuse what no graph can take, before anything is noted of one.

        Raises:
            InflightError: The pair could not be connected before.
            CaptureError: It is not connected.
        """
        with self._lock:
            if self._failure is not None:
                raise self._failure.with_traceback(None)
            if self._queue is None:
                return
        msg = (
            f"{message.op} on group {message.group}: captured, but the two ranks are not connected, which no "
            "graph can do; exchange one message that is not empty between them before the capture"
        )
        raise CaptureError(msg)

    def issue(self, message: Message, *, captured: bool = False) -> StreamCompletion | None:
        """Launch a message behind the caller's stream, or have it launched when the pair is connected.

        ``captured`` says that a graph takes it, which `may_capture` has allowed.

        Returns:
            Its completion; None if nothing was done, since the gate is closed (`_gate.Gate`).

        Raises:
            InflightError: The pair could not be connected before.
        """
        with self._lock:
            if self._failure is not None:
                raise self._failure.with_traceback(None)
            if self._queue is None:
                completion = message.completion(self.stream)
                if captured:
                    completion.capture()
                launched = self.stream.launch(completion, [self._launch(message)], message.caller)
                return completion if launched else None
            late = message.late(self.stream, self._until)
            if not self.stream.enter(late):
                return None
            event = self.stream.new_event()
            self.stream.runtime.event_record(event, message.caller)
            self._queue.append((late, message, event))
            start, self._started = not self._started, True
        if start and self._in_thread:
            name = f"hpc_inflight-pair-{message.group}"
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()
        elif start:
            self._run()
        return late

    def _launch(self, message: Message) -> Callable[[int], Callable[[], None] | None]:
        call, peer = (self.nccl.send, 1) if self._is_sender else (self.nccl.recv, 0)

        def run(stream: int) -> Callable[[], None] | None:
            if message.nbytes:
                call(message.address, message.nbytes, NCCL_UINT8, peer, stream)
            return message.after

        return run

    def _run(self) -> None:
        runtime, index = self.stream.runtime, self.stream.index
        try:
            if self._in_thread:
                runtime.settle_device(index)
            if self.nccl is None:
                self.nccl = self._connect()
        except Exception as error:  # noqa: BLE001  # belongs to whoever waits, and to those who issue more
            self._fail(error)
            return
        while (waiting := self._next()) is not None:
            late, message, event = waiting
            try:
                # not under the lock: NCCL's first call on a communicator blocks until the peer makes its own
                self.stream.launch_behind(late, [self._launch(message)], event)
            except Exception as error:  # noqa: BLE001  # as above
                late.refused(error)
            else:
                late.launched()
                self._has_met = self._has_met or message.nbytes > 0  # of an empty one NCCL is told nothing
            self.stream.events.append(event)

    def _next(self) -> tuple[LateCompletion, Message, int] | None:
        with self._lock:
            if self._queue:
                return self._queue.pop(0)
            if self._has_met:
                self._queue = None
            else:
                self._started = False  # the next message begins another thread
            return None

    def _fail(self, error: Exception) -> None:
        with self._lock:
            self._failure = error if isinstance(error, InflightError) else NCCLError(f"connecting a pair: {error}")
            queue, self._queue = self._queue or [], []
        for late, _, _ in queue:
            late.finish(self._failure)


class Loopback:
    """The messages from a rank to itself: NCCL would want both ends in one group, so they are copied when both came."""

    def __init__(self, stream: Stream, until: str) -> None:
        self.stream = stream
        self.nccl = None
        self._until = until
        self._lock = threading.Lock()
        self._waiting: dict[str, list[tuple[LateCompletion, Message, int]]] = {"send": [], "recv": []}

    def stop(self, timeout_s: float) -> None:
        """Do nothing: there is nothing to connect."""

    def may_capture(self, message: Message) -> None:
        """Refuse a capture.

        Raises:
            CaptureError: Always.
        """
        msg = f"{message.op} on group {message.group}: a message to oneself cannot be captured; copy the tensor"
        raise CaptureError(msg)

    def issue(self, message: Message, *, captured: bool = False) -> StreamCompletion | None:  # noqa: ARG002  # never is
        """Copy, if the other end was issued before, or have it copied then; None as of `Pair.issue`.

        Raises:
            InvalidArgumentError: The two ends differ in size.
        """
        runtime, stream = self.stream.runtime, self.stream
        other = "recv" if message.op == "send" else "send"
        with self._lock:
            late = message.late(stream, self._until)
            if not stream.enter(late):
                return None
            event = stream.new_event()
            runtime.event_record(event, message.caller)
            if not self._waiting[other]:
                self._waiting[message.op].append((late, message, event))
                return late
            first, earlier, before = self._waiting[other].pop(0)
            sent, received = (message, earlier) if message.op == "send" else (earlier, message)

            def copy(raw: int) -> Callable[[], None] | None:
                runtime.stream_wait(raw, before)
                if sent.nbytes:
                    runtime.copy(received.address, sent.address, sent.nbytes, raw)
                return received.after

            failure: Exception | None = None
            try:
                if sent.nbytes != received.nbytes:
                    msg = (
                        f"{message.op}: a send of {sent.nbytes} bytes to this rank itself on group {message.group} "
                        f"meets a receive of {received.nbytes}; give both ends one size"
                    )
                    raise InvalidArgumentError(msg)  # noqa: TRY301  # both ends are told, as of whatever fails
                try:
                    stream.launch_behind(late, [copy], event)
                finally:
                    runtime.event_record(first.event, stream.raw)
            except Exception as error:  # noqa: BLE001  # as above
                failure = error
            stream.events += [event, before]
        if failure is not None:  # callbacks run in here, and may issue: not under the lock
            first.refused(failure)
            late.refused(failure)
            raise failure
        first.launched()
        late.launched()
        return late
