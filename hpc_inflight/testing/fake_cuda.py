"""A stand-in for CUDA on a machine without a GPU: streams that run in order, and events.

Streams are threads that run what is enqueued in order; handle 0, the current stream, is the calling thread itself.
Events are flags that a stream sets when it gets there.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import threading
import time
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import torch

from hpc_inflight._poll import poll
from hpc_inflight.errors import NCCLError

if TYPE_CHECKING:
    from collections.abc import Callable

_PATIENCE_S = 60.0


class FakeStream:
    """A thread that runs functions in order."""

    def __init__(self, handle: int, late_s: float) -> None:
        self.handle = handle
        self.late_s = late_s
        self._queue: SimpleQueue[Callable[[], object]] = SimpleQueue()
        threading.Thread(target=self._run, name=f"fake-stream-{handle}", daemon=True).start()

    def put(self, function: Callable[[], object]) -> None:
        """Run a function behind what is there."""
        self._queue.put(function)

    def _run(self) -> None:
        while True:
            function = self._queue.get()
            time.sleep(self.late_s)
            function()
            del function


class FakeCuda:
    """The half of `FakeRuntime` that is CUDA's.

    Attributes:
        log: What was called, in order: tuples of a name and arguments, for calls that touch a stream or a group.
        fail: Called with each of those names and each NCCL call's; raises what that call is to raise.
        late_s: Seconds that a stream made from here on takes before each step, so that whoever does not wait is early.
    """

    def __init__(self, late_s: float = 0.0) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.fail: Callable[[str], None] = lambda _name: None
        self.late_s = late_s
        self.events: dict[int, list[int]] = {}
        self.streams: dict[int, list[Any]] = {}
        self.is_capturing = False
        self._streams: dict[int, FakeStream] = {}
        self._handles = itertools.count(100)
        self._marks: dict[int, threading.Event] = {}
        self._thread = threading.local()

    def note(self, name: str, *arguments: Any) -> None:
        """Add to the log, and raise what `fail` wants."""
        self.log.append((name, *arguments))
        self.fail(name)

    def use_stream(self, stream: FakeStream | None) -> None:
        """Make a stream the current one of this thread; None is the thread itself."""
        self._thread.current = 0 if stream is None else stream.handle

    def current_stream(self, _index: int) -> int:
        """Return the current stream's handle."""
        return getattr(self._thread, "current", 0)

    def current_device(self) -> int:
        """Return the one device there is."""
        return -1

    def capturing(self) -> bool:
        """Say whether a test pretends to capture."""
        return self.is_capturing

    def enqueue(self, stream: int, function: Callable[[], object]) -> None:
        """Run a function on a stream."""
        if stream == 0:
            function()
        else:
            self._streams[stream].put(function)

    def event_create(self) -> int:
        """Make an event."""
        return next(self._handles)

    def event_record(self, event: int, stream: int) -> None:
        """Have the stream set a new flag of this event."""
        self.note("record", event, stream)
        mark = self._marks[event] = threading.Event()
        self.enqueue(stream, mark.set)

    def stream_wait(self, stream: int, event: int) -> None:
        """Have the stream wait for the event's flag of now."""
        self.note("wait", stream, event)
        mark = self._marks.get(event)
        if mark is not None:
            self.enqueue(stream, lambda: until(mark.is_set))

    def event_done(self, event: int) -> bool:
        """Say whether the flag is set."""
        mark = self._marks.get(event)
        return mark is None or mark.is_set()

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Copy memory on a stream."""
        self.note("copy", stream)
        self.enqueue(stream, lambda: ctypes.memmove(target, source, nbytes))

    def zeros(self, _index: int) -> torch.Tensor:
        """Return a tensor of one element."""
        self.fail("zeros")
        return torch.zeros(1)

    def new_stream(self, _index: int) -> FakeStream:
        """Make a stream."""
        stream = FakeStream(next(self._handles), self.late_s)
        self._streams[stream.handle] = stream
        return stream

    def raw_stream(self, stream: FakeStream) -> int:
        """Return a stream's handle."""
        return stream.handle

    def run_on(self, stream: FakeStream, function: Callable[[], None]) -> None:
        """Run a function on a stream."""
        self.log.append(("run_on", stream.handle))
        stream.put(function)

    def on_device(self, _index: int) -> contextlib.AbstractContextManager[None]:
        """Do nothing: there is one device."""
        return contextlib.nullcontext()

    def future(self, _index: int) -> torch.futures.Future[Any]:
        """Return a future."""
        return torch.futures.Future()

    def settle_device(self, _index: int) -> None:
        """Do nothing: there is one device."""

    def exchange_capture_mode(self, mode: int) -> int:
        """Note what a thread may ask beside captures."""
        before: int = getattr(self._thread, "mode", 0)
        self._thread.mode = mode
        return before

    def capture_mode(self) -> int:
        """Return what was noted for this thread; 0 if nothing was."""
        return self.exchange_capture_mode(getattr(self._thread, "mode", 0))


def until(done: Callable[[], bool]) -> None:
    """Wait for something that other ranks or streams do."""
    if not poll(done, _PATIENCE_S):
        raise NCCLError(f"fake NCCL: nothing came within {_PATIENCE_S:g} s")
