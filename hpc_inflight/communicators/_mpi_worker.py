"""The thread that runs one group's enqueued MPI calls, in the order they were issued."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections import deque
from queue import SimpleQueue
from typing import TYPE_CHECKING

from hpc_inflight._gate import gate

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hpc_inflight.communicators.base import Operation
    from hpc_inflight.work import Completion

    _Job = tuple[Completion, Sequence[Operation]]


_workers: weakref.WeakSet[Worker] = weakref.WeakSet()  # those with a thread


def inside_mpi() -> list[str]:
    """Return the names of the groups whose thread is in an MPI call at the moment.

    **Local:** at the end of the process: MPI_Finalize crashes beside a call that has not returned.
    """
    return [worker.name for worker in list(_workers) if worker.runs()]


class Worker:
    """Runs blocking MPI calls, in the caller where nothing is before them and in one thread otherwise.

    Blocking calls, never ``MPI_I*``: on Open MPI a 4 MiB Iallreduce and Wait takes 3.5 times an Allreduce, and
    the two kinds do not match across ranks, while ``async_op`` may differ between ranks. mpi4py releases the
    GIL during the call, so the thread makes progress while Python computes.

    What a future's callback issues runs at once in this thread, ahead of the queue: it may wait for it there, and
    on every rank it comes between the operation that was called back and the next one.
    """

    def __init__(self, name: str, max_pending: int) -> None:
        self.name = name
        self._max_pending = max_pending
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
        self.queued: deque[Completion] = deque()  # and what runs, which is the first
        self._executing = threading.Lock()  # held while an MPI collective of this group runs
        self._thread: threading.Thread | None = None
        self._start_lock = threading.Lock()
        self.failed: tuple[Completion, float] | None = None  # the first whose operation failed, and when
        self._aborted: BaseException | None = None

    def runs(self) -> bool:
        """Say whether an operation of this group runs at the moment."""
        return self._executing.locked()

    def is_current(self) -> bool:
        """Say whether the caller is the worker thread itself, in a callback."""
        return threading.current_thread() is self._thread

    def run_inline(self, operations: Sequence[Operation], *, wait_turn: bool) -> bool:
        """Run operations in the calling thread if nothing of this group is enqueued or running.

        Args:
            operations: Run in order.
            wait_turn: Wait until nothing runs instead of returning False; for groups that never enqueue.

        Returns:
            False when they must be enqueued behind what is.
        """
        if not self.take_turn(wait=wait_turn):
            return False
        try:
            for operation in operations:
                operation()
        finally:
            self.end_turn()
        return True

    def take_turn(self, *, wait: bool) -> bool:
        """Keep every other operation of this group from running until `end_turn`; False if one is before the caller."""
        return not (self.queued and not self.is_current()) and self._executing.acquire(blocking=wait)

    def end_turn(self) -> None:
        """Undo `take_turn`."""
        self._executing.release()

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Keep every operation of this group from running meanwhile."""
        with self._executing:
            yield

    def wait_for_room(self, timeout_s: float) -> None:
        """Wait for the oldest while ``max_pending`` are enqueued: tensors held stay bounded when the host is ahead."""
        while len(self.queued) >= self._max_pending:
            with contextlib.suppress(IndexError):  # it may be gone by now
                self.queued[0].block(timeout_s)

    def submit(self, completion: Completion, operations: Sequence[Operation]) -> None:
        """Enqueue operations.

        The order of submissions is the order of execution; a caller that issues from several threads
        serialises them.
        """
        if self._thread is None:
            self._start()
        self.queued.append(completion)
        self._queue.put((completion, operations))

    def _start(self) -> None:
        with self._start_lock:
            if self._thread is None:
                # daemon: an MPI call that never returns must not keep the interpreter from ending
                thread = threading.Thread(target=self._main, name=f"hpc_inflight-{self.name}", daemon=True)
                self._thread = thread
                thread.start()
                _workers.add(self)

    def _main(self) -> None:
        with gate.runs_callbacks():
            self._loop()

    def _loop(self) -> None:
        while (job := self._queue.get()) is not None:
            completion, operations = job
            completion.start()
            error = self._run(operations)
            if error is not None and self.failed is None:
                self.failed = completion, time.monotonic()
            # nothing here may outlive the job: these hold the tensors
            del job, operations
            completion.finish(error, self._leave)
            del completion, error

    def _leave(self) -> None:
        self.queued.popleft()

    def _run(self, operations: Sequence[Operation]) -> BaseException | None:
        # a frame of its own: in the loop's, the last operation would hold its tensors until the next job
        if self._aborted is not None:
            return self._aborted
        with self._executing:
            try:
                for operation in operations:
                    operation()
            except BaseException as caught:  # noqa: BLE001  # belongs to whoever waits, not to this thread
                return caught
        return None

    def pending(self) -> list[Completion]:
        """Return what is enqueued or running, oldest first; not what was failed and only MPI is not done with."""
        return [completion for completion in list(self.queued) if not completion.completed]

    def stop(self) -> None:
        """End the thread once it has run what is enqueued; does not wait for it."""
        if self._thread is not None:
            self._queue.put(None)

    def abort(self, error: BaseException) -> None:
        """End the thread after what is running, which MPI cannot cancel; all that is enqueued or runs fails."""
        self._aborted = error
        self.stop()
        for completion in list(self.queued):
            completion.fail(error)
