"""The handle that an asynchronous operation returns, and the completion that its backend keeps.

They are two objects so that a work which its user dropped takes its output tensors with it, while the backend
and the in-flight registry go on holding what completes it.
"""

from __future__ import annotations

import _thread
import threading
import time
from typing import TYPE_CHECKING, Any, Protocol

import torch

from hpc_inflight import _on_failure
from hpc_inflight._torch_compat import NO_TIMEOUT, BaseWork, timeout_s
from hpc_inflight.errors import CollectiveTimeout

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import timedelta

    from hpc_inflight.flight_recorder import Progress

_init_work = BaseWork.__init__
_future_lock = threading.Lock()  # taken only around the few instructions that attach or read a future


class Patience:
    """How much longer a wait without a timeout of its own takes than its operation may.

    Attributes:
        seconds: What the watchdog needs to find out which ranks are missing; its error says more than the wait's own.
    """

    seconds = 0.0


patience = Patience()


class Registration(Protocol):
    """What the in-flight registry attaches to a work."""

    def waited(self) -> None:
        """Remove the work's entries; called once the work was waited."""


class Completion:
    """Whether one operation is complete, and how it ended.

    Attributes:
        op: Name of the operation, such as ``"all_reduce"``.
        group: Name of the group.
        seq: Number of the operation in its group, from 1.
        timeout_s: Seconds that a wait without a timeout of its own may take.
        issued_at: ``time.monotonic()`` when it was issued.
        completed: True once the operation has ended, well or not.
        exception: Why it failed; None when it did not.
        raised: Somebody was told so, by ``wait`` or by a future.
        watched: The watchdog looks at it; a wait without a timeout of its own leaves it the time to say who is missing.
        device_type: Of the tensors; each type of device has sequence numbers of its own.
        started_at: ``time.monotonic()`` when its thread began with it; None before.
        progress: What the flight recorder attached.
        captured: It went into a CUDA graph and is no work in flight.
    """

    device_type = "cpu"
    captured = False
    __slots__ = (
        "_done",
        "_future",
        "completed",
        "exception",
        "group",
        "issued_at",
        "op",
        "progress",
        "raised",
        "seq",
        "started_at",
        "timeout_s",
        "watched",
    )

    def __init__(self, op: str, group: str, seq: int, timeout_s: float) -> None:
        self.op = op
        self.group = group
        self.seq = seq
        self.timeout_s = timeout_s
        self.issued_at = time.monotonic()
        self.completed = False
        self.exception: BaseException | None = None
        self.raised = False
        self.watched = False
        self.started_at: float | None = None
        self.progress: Progress | None = None
        self._future: tuple[torch.futures.Future[Any], list[torch.Tensor]] | None = None
        # a bare lock, held until completion: a tenth of the cost of an Event, and this is made for every operation
        self._done = _thread.allocate_lock()
        self._done.acquire()

    def track(self, progress: Progress) -> None:
        """Tell ``progress`` how far the operation comes, from here on; what has happened already, at once.

        Each side writes its own field first and reads the other's then, so nothing is lost between two threads.
        """
        progress.timeout_s = self.timeout_s
        if self.progress is not None:
            progress.also = self.progress
        if self.captured:
            progress.captured = True
        self.progress = progress
        if self.started_at is not None:
            progress.started = self.started_at
        if self.completed:
            progress.end(self.exception)

    def start(self) -> None:
        """Note that the thread which runs the operation begins with it."""
        self.started_at = time.monotonic()
        if self.progress is not None:
            self.progress.started = self.started_at

    def finish(self, exception: BaseException | None = None, leave: Callable[[], None] | None = None) -> None:
        """Mark the operation as ended and wake everyone who waits.

        **Local:** once, by the thread that ran the operation. Callbacks of a future run in that thread, before
        waiters wake.

        Args:
            exception: Why it failed, if it did.
            leave: Takes the operation off its queue: before waiters wake, so that they may run the next one
                themselves, but after the callbacks, whose operations come before everything that is queued.
        """
        if self._end(exception):
            if leave is not None:
                leave()
            self._done.release()
        elif leave is not None:  # it was failed meanwhile, and whoever waited has been told
            leave()

    def fail(self, exception: BaseException) -> None:
        """Let everyone who waits raise ``exception``, though the operation itself may never end.

        **Local:** any thread; nothing happens when the operation has ended.
        """
        if self._end(exception):
            self._done.release()

    def _end(self, exception: BaseException | None) -> bool:
        """Mark the operation as ended, once, and run the callbacks of its future."""
        with _future_lock:
            if self.completed:
                return False
            # without the traceback: its frames hold the tensors, and the error outlives them
            self.exception = None if exception is None else exception.with_traceback(None)
            self.completed = True
            attached, self._future = self._future, None
        if self.progress is not None:
            self.progress.end(self.exception)
        if attached is not None:
            self._resolve(*attached)
            attached = None  # it holds the tensors, and whoever waits may look at once whether anybody does
        return True

    def _resolve(self, future: torch.futures.Future[Any], outputs: list[torch.Tensor]) -> None:
        if self.exception is None:
            future.set_result(outputs)
        else:
            self.raised = True
            future.set_exception(self.exception)

    def poll(self) -> bool:
        """Say whether the operation has ended, making progress where it needs a call for that."""
        return self.completed

    def block(self, seconds: float) -> None:
        """Block the host until the operation has ended.

        Raises:
            CollectiveTimeout: It did not within ``seconds``.
        """
        if not self._done.acquire(timeout=min(seconds, threading.TIMEOUT_MAX)):
            raise self.timed_out(seconds)
        self._done.release()

    def wait(self, timeout: timedelta) -> None:
        """Order the caller after the operation; what failed is in ``exception`` then, and not raised.

        Args:
            timeout: At most this long; zero means ``timeout_s``.

        Raises:
            CollectiveTimeout: The operation has not ended by then.
        """
        if not self.completed:
            self.block(timeout_s(timeout, self.timeout_s + (patience.seconds if self.watched else 0.0)))

    def timed_out(self, seconds: float, more: str = "") -> CollectiveTimeout:
        """Return the error for a wait whose deadline passed.

        It is a failure, of which the flight recorder is written, once the operation is past its own deadline,
        ``timeout_s`` after it was issued. A wait that gives up earlier only looked.
        """
        age = time.monotonic() - self.issued_at
        if age >= self.timeout_s:
            _on_failure.tell((self.op, self.group, self.seq))
        return CollectiveTimeout(
            f"{self.op} (seq {self.seq}) on group {self.group}: not complete {seconds:g} s into the wait, "
            f"{age:.1f} s after it was issued; a rank has not issued it, or is stuck{more}"
        )

    def future(self, outputs: list[torch.Tensor]) -> torch.futures.Future[Any]:
        """Return a future of this operation, whose value is the list of its output tensors."""
        with _future_lock:
            if self._future is not None:
                return self._future[0]
            future = torch.futures.Future[Any]()
            if not self.completed:
                self._future = future, outputs
                return future
        self._resolve(future, outputs)
        return future


class CoalescedCompletion(Completion):
    """Completion of several operations that count as one."""

    __slots__ = ("_parts",)

    def __init__(self, group: str, parts: Sequence[Completion], timeout_s: float) -> None:
        super().__init__("coalesced", group, parts[-1].seq if parts else 0, timeout_s)
        self._parts = parts

    def poll(self) -> bool:
        """Say whether all have ended."""
        if not self.completed and all(part.poll() for part in self._parts):
            self._end_all()
        return self.completed

    def wait(self, timeout: timedelta) -> None:
        """Order the caller after all of them; see `Completion.wait`."""
        for part in self._parts:
            part.wait(timeout)
        self.poll()

    def block(self, seconds: float) -> None:
        """Block the host until all have ended; see `Completion.block`."""
        deadline = time.monotonic() + min(seconds, threading.TIMEOUT_MAX)
        for part in self._parts:
            if not part.poll():
                part.block(max(0.0, deadline - time.monotonic()))
        self._end_all()

    def _end_all(self) -> None:
        self._end(next((part.exception for part in self._parts if part.exception is not None), None))

    def future(self, outputs: list[torch.Tensor]) -> torch.futures.Future[Any]:
        """Return a future that completes with the last of them; its value is the list of all outputs."""
        gathered = torch.futures.collect_all([part.future([]) for part in self._parts])
        return gathered.then(lambda done: (done.wait(), outputs)[1])


class Work(BaseWork):  # type: ignore[misc]  # torch's stubs leave it Any
    """A collective or point-to-point operation that was issued; what c10d calls a Work.

    ``wait`` may be called any number of times and from any thread. Dropping the last reference neither cancels
    the operation nor keeps its tensors: its backend holds them until it is complete.
    """

    __slots__ = ("_outputs", "completion", "registration")

    def __init__(self, completion: Completion, outputs: Sequence[torch.Tensor]) -> None:
        _init_work(self)  # super() costs every operation more
        self.completion = completion
        self.registration: Registration | None = None
        self._outputs = outputs

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Order the caller after the operation: what it does next finds the result.

        On CPU tensors the host blocks until the operation is complete. On CUDA tensors the current stream waits for
        it and the host goes on, unless a timeout is given: then the host blocks until it is complete.

        **Local:** any thread, any number of times; not from a callback of a future of the same group.

        Args:
            timeout: Block the host for at most this long. Zero means the group's timeout on CPU tensors, and not to
                block at all on CUDA tensors.

        Returns:
            True.

        Raises:
            CollectiveTimeout: The deadline passed; the operation stays in flight. It is a failure, of which the flight
                recorder is written, if the operation's own deadline (its group's timeout, or that of its call) has
                passed as well; a shorter ``timeout`` is a look, and writes nothing.
            InflightError: The operation failed; whatever it raised is raised here, on every wait.
        """
        completion = self.completion
        if not completion.completed:
            completion.wait(timeout)
        registration, self.registration = self.registration, None
        if registration is not None:
            registration.waited()
        if completion.exception is not None:
            completion.raised = True
            raise completion.exception.with_traceback(None)  # else every wait would add its frames
        return True

    def is_completed(self) -> bool:
        """Say whether the operation has ended, well or not; never blocks."""
        return self.completion.poll()

    def is_success(self) -> bool:
        """Say whether the operation has ended and did not fail; never blocks."""
        return self.completion.poll() and self.exception() is None

    def exception(self) -> BaseException | None:
        """Return why the operation failed, or None; whoever asks has been told of it, as by a wait."""
        error = self.completion.exception
        if error is not None:
            self.completion.raised = True  # the caller is told
        return error

    def synchronize(self) -> None:
        """Do what ``wait`` without a timeout does."""
        self.wait()

    def block_current_stream(self) -> None:
        """Do what ``wait`` without a timeout does: on CPU, where there is no stream, that blocks the host."""
        self.wait()

    def result(self) -> list[torch.Tensor]:
        """Return the output tensors."""
        return list(self._outputs)

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future that completes with the operation; its value is the list of output tensors."""
        return self.completion.future(list(self._outputs))

    def source_rank(self) -> int:
        """Return the group rank that a receive from any source received from.

        Raises:
            CollectiveTimeout: As `wait`, which it calls.
        """
        self.wait()
        return getattr(self.completion, "source", -1)

    _source_rank = source_rank


class DoneWork(BaseWork):  # type: ignore[misc]  # torch's stubs leave it Any
    """What a synchronous operation returns: c10d still calls ``wait`` on it, and nothing is left to do."""

    completion = None  # there is nothing to follow

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:  # noqa: ARG002  # c10d's signature
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """Return True."""
        return True

    def is_success(self) -> bool:
        """Return True."""
        return True

    def result(self) -> list[torch.Tensor]:
        """Return no tensors: the caller of a synchronous operation has them."""
        return []

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a completed future without tensors."""
        future = torch.futures.Future[Any]()
        future.set_result([])
        return future
