"""The thread that runs one group's enqueued MPI calls, in the order they were issued."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from queue import SimpleQueue

from hpc_inflight.communicators.base import Operation
from hpc_inflight.work import Completion

_Job = tuple[Completion, Sequence[Operation]]


class Worker:
    """Runs blocking MPI calls, in the caller where nothing is before them and in one thread otherwise.

    Blocking calls, never ``MPI_I*``: on Open MPI a 4 MiB Iallreduce and Wait takes 3.5 times an Allreduce, and
    the two kinds do not match across ranks, while ``async_op`` may differ between ranks. mpi4py releases the
    GIL during the call, so the thread makes progress while Python computes.
    """

    def __init__(self, name: str, max_pending: int) -> None:
        self._name = name
        self._max_pending = max_pending
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
        self._pending: deque[Completion] = deque()
        self._finishing: Completion | None = None
        self._executing = threading.Lock()  # held while an MPI collective of this group runs
        self._thread: threading.Thread | None = None
        self._start_lock = threading.Lock()

    def run_inline(self, operations: Sequence[Operation], *, wait_turn: bool) -> bool:
        """Run operations in the calling thread if nothing of this group is enqueued or running.

        Args:
            operations: Run in order.
            wait_turn: Wait until nothing runs instead of returning False; for groups that never enqueue.

        Returns:
            False when they must be enqueued behind what is.
        """
        if self._pending or not self._executing.acquire(blocking=wait_turn):
            return False
        try:
            for operation in operations:
                operation()
        finally:
            self._executing.release()
        return True

    def submit(self, completion: Completion, operations: Sequence[Operation]) -> None:
        """Enqueue operations; waits for the oldest when ``max_pending`` are enqueued already.

        The order of submissions is the order of execution; a caller that issues from several threads
        serialises them.
        """
        if self._thread is None:
            self._start()
        while len(self._pending) >= self._max_pending and threading.current_thread() is not self._thread:
            # the host is ahead of the network: let it come near, so that tensors held stay bounded
            self._pending[0].block(completion.timeout_s)
        self._pending.append(completion)
        self._queue.put((completion, operations))

    def _start(self) -> None:
        with self._start_lock:
            if self._thread is None:
                # daemon: an MPI call that never returns must not keep the interpreter from ending
                thread = threading.Thread(target=self._loop, name=f"hpc_inflight-{self._name}", daemon=True)
                thread.start()
                self._thread = thread

    def _loop(self) -> None:
        while (job := self._queue.get()) is not None:
            completion, operations = job
            error = self._run(operations)
            # first gone from the queue, then complete: whoever waited, or is called back in this thread, may then
            # run the next one inline; meanwhile a drain still sees it
            self._finishing = completion
            self._pending.popleft()
            # nothing here may outlive the job: these hold the tensors
            del job, operations
            completion.finish(error)
            self._finishing = None
            del completion, error

    def _run(self, operations: Sequence[Operation]) -> BaseException | None:
        # a frame of its own: in the loop's, the last operation would hold its tensors until the next job
        with self._executing:
            try:
                for operation in operations:
                    operation()
            except BaseException as caught:  # noqa: BLE001  # belongs to whoever waits, not to this thread
                return caught
        return None

    def pending(self) -> list[Completion]:
        """Return what is enqueued or running, oldest first."""
        finishing = self._finishing
        return [*([] if finishing is None or finishing.completed else [finishing]), *self._pending]

    def stop(self) -> None:
        """End the thread once it has run what is enqueued; does not wait for it."""
        if self._thread is not None:
            self._queue.put(None)
