"""A communication stream: what is launched on it is ordered after its caller, and kept until it is complete."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, NoReturn

from hpc_inflight._cupy import apart_from_captures, raise_nccl_error
from hpc_inflight._gate import captures, gate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import torch

    from hpc_inflight._cupy import Runtime
    from hpc_inflight.communicators._nccl_completion import StreamCompletion

    Launch = Callable[[int], Callable[[], None] | None]

_SOON = 8  # issues after which old completions are looked at again, all but one of them without asking the device
LARGE = 1 << 20  # bytes: for such outputs it is worth asking each time, so that their memory comes back soon


class Stream:
    """One stream of a device with what was launched on it and is not known to be complete.

    Attributes:
        runtime: Of this process.
        index: The device.
        raw: The stream's handle.
        events: The device's pool of unused events.
        lock: Held from the event that orders a launch after its caller to the one that marks its end.
        pending: Oldest first.
        failed: Tensors of what was given up, with which the device may not be through before its communicator ends.
        in_order: What is complete speaks for all that is pending before it.
        look_at: How many of those there have to be before they are looked at again.
    """

    def __init__(self, runtime: Runtime, index: int, check: Callable[[], None], *, in_order: bool = True) -> None:
        self._own: list[int] = []
        self._own_streams: list[Any] = []
        self.events = runtime.events.setdefault(index, [])
        self._streams = runtime.streams.setdefault(index, [])
        self.runtime = runtime
        self.index = index
        self.check = check
        self.in_order = in_order
        self.lock = threading.Lock()
        self.pending: deque[StreamCompletion] = deque()
        self.failed: list[object] = []
        self._stream = self._own_stream()
        self.raw = runtime.raw_stream(self._stream)
        self._futures: Any = None  # a stream for completing futures, which orders them after their event and no other
        self._start = self.own_event()
        self._refuse: Callable[..., NoReturn] | None = None
        self.look_at = _SOON
        self._record, self._wait = runtime.event_record, runtime.stream_wait

    def new_event(self) -> int:
        """Take an event from the pool."""
        try:
            return self.events.pop()
        except IndexError:
            return self.runtime.event_create()

    def own_event(self) -> int:
        """Take an event for as long as this object lives: a launch that comes too late must not touch another's."""
        event = self.new_event()
        self._own.append(event)
        return event

    def _own_stream(self) -> Any:
        try:
            stream = self._streams.pop(0)  # the one that is unused for longest
        except IndexError:
            stream = self.runtime.new_stream(self.index)
        self._own_streams.append(stream)
        return stream

    def __del__(self) -> None:
        self.events += self._own
        self._streams += self._own_streams

    def follow(self, streams: Iterable[int]) -> None:
        """Order what is launched next after what these streams have so far."""
        with self.lock:
            for stream in streams:
                self._record(self._start, stream)
                self._wait(self.raw, self._start)

    def launch(self, completion: StreamCompletion, operations: Sequence[Launch], caller: int) -> bool:
        """Launch operations behind what the stream ``caller`` has so far; with the device current.

        The gate is looked at, and the completion kept, under the lock: see `hpc_inflight._gate.Gate`.

        Returns:
            False if nothing was launched, since the gate is closed; a capture is not asked for.

        Raises:
            NCCLError: NCCL refused one; its tensors are kept until the device is past it, as a part may be launched.
        """
        start, raw = self._start, self.raw
        with self.lock:
            pends = not completion.captured
            if pends and gate.closed and not gate.may_pass():
                return False
            self._record(start, caller)
            self._wait(raw, start)
            try:
                if captures and pends:
                    self._launch_beside_captures(operations, raw)
                elif len(operations) == 1:  # the frequent case, in this frame
                    after = operations[0](raw)
                    if after is not None:
                        self.runtime.run_on(self._stream, after)
                else:
                    self._launch(operations, raw)
            except Exception as error:  # noqa: BLE001  # CuPy raises what it likes
                raise_nccl_error(completion.op, error)
            finally:
                try:
                    self._record(completion.event, raw)
                except Exception:  # as of an abort that did not wait: nothing tells when the device is past it
                    self.failed.append(completion)
                    raise
                if pends:
                    self.pending.append(completion)
        return True

    def enter(self, completion: StreamCompletion) -> bool:
        """Keep a completion that is launched later, with `launch_behind`; False if the gate is closed."""
        with self.lock:
            if self._refuse is not None:
                self._refuse()
            if gate.closed and not gate.may_pass():
                return False
            self.pending.append(completion)
        return True

    def launch_behind(self, completion: StreamCompletion, operations: Sequence[Launch], event: int) -> None:
        """Launch operations behind an event that the caller recorded when it issued them."""
        with self.lock:
            self._wait(self.raw, event)
            try:
                (self._launch_beside_captures if captures else self._launch)(operations, self.raw)
            except Exception as error:  # noqa: BLE001  # CuPy raises what it likes
                raise_nccl_error(completion.op, error)
            finally:
                self._record(completion.event, self.raw)

    def _launch_beside_captures(self, operations: Sequence[Launch], raw: int) -> None:
        with apart_from_captures(self.runtime):
            self._launch(operations, raw)

    def _launch(self, operations: Sequence[Launch], raw: int) -> None:
        if len(operations) == 1:
            after = operations[0](raw)
            if after is not None:
                self.runtime.run_on(self._stream, after)
            return
        for after in launch_group(self.runtime, operations, raw):
            self.runtime.run_on(self._stream, after)

    def retire(self) -> None:
        """Drop the oldest completions that are complete, unless something is being launched at the moment.

        NCCL may block a launch until the other ranks come; the watchdog, which has to notice, must not block with it.
        """
        pending = self.pending
        if self.lock.acquire(blocking=False):
            try:
                while pending and pending[0].poll():
                    pending.popleft()
            finally:
                self.lock.release()

    def look_after(self, limit: int, timeout_s: float) -> None:
        """Drop old completions, and wait for the oldest while there are ``limit``.

        Events of one stream complete in order, so one that is complete speaks for all before it.
        """
        pending = self.pending
        if self.in_order:
            ended: list[StreamCompletion] = []
            with self.lock:
                for place in (len(pending) - 1, len(pending) // 2, 0):
                    if pending and pending[place].poll() and (not place or pending[place].exception is None):
                        ended = [pending.popleft() for _ in range(place + 1)]
                        break
            for completion in ended:  # may complete a future: not under the lock
                completion.finish()
        else:
            self.retire()
        while len(pending) >= limit:
            with contextlib.suppress(IndexError):  # another thread dropped it
                pending[0].block(timeout_s)
            self.retire()
        self.look_at = len(pending) + _SOON

    def resolve(self, future: torch.futures.Future[Any], outputs: list[torch.Tensor], event: int) -> None:
        """Complete a future behind an event: who waits for it or chains to it is ordered after that."""
        runtime = self.runtime
        with runtime.on_device(self.index), self.lock:
            if self._futures is None:
                self._futures = self._own_stream()
            runtime.stream_wait(runtime.raw_stream(self._futures), event)
        # callbacks run in here, and may issue: not under the lock
        runtime.run_on(self._futures, lambda: future.set_result(outputs))

    def refuse(self, error: Exception, timeout_s: float) -> bool:
        """Refuse to launch anything from here on, and wait for a launch that is under way.

        Returns:
            False if that one has not returned in time: NCCL may block it until other ranks come, or an abort does.
        """

        def refuse(*_: object) -> NoReturn:
            raise type(error)(str(error))

        there = self.lock.acquire(timeout=timeout_s)
        # in place of what a launch begins and ends with, which so need not look
        self._refuse = self._record = self._wait = refuse
        if there:
            self.lock.release()
        return there


def launch_group(runtime: Runtime, operations: Sequence[Launch], raw: int) -> list[Callable[[], None]]:
    """Launch operations as one NCCL group, which is closed whatever happens, and return what is to run afterwards."""
    after = []
    runtime.group_start()
    try:
        for operation in operations:
            then = operation(raw)
            if then is not None:
                after.append(then)
    finally:
        runtime.group_end()
    return after


def run_here(runtime: Runtime, operations: Sequence[Launch], stream: int) -> None:
    """Launch operations on the caller's current stream; the device is current.

    Raises:
        NCCLError: NCCL refused one.
    """
    try:
        if len(operations) == 1:
            after = operations[0](stream)
            if after is not None:
                after()
        else:
            for then in launch_group(runtime, operations, stream):
                then()
    except Exception as error:  # noqa: BLE001  # CuPy raises what it likes
        raise_nccl_error("a collective on the current stream", error)
