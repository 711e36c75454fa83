"""Point-to-point operations: non-blocking MPI requests, so that two ranks which both send first do not deadlock."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from hpc_inflight._mpi import abandon, mpi, thread_multiple
from hpc_inflight._poll import poll
from hpc_inflight.flight_recorder import Message
from hpc_inflight.work import Completion

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

_PROGRESS_SLEEP_S = 200e-6


class RequestCompletion(Completion):
    """Completion of one MPI request, driven by whoever asks.

    Attributes:
        source: The rank a receive got its message from; -1 until it is complete, and for a send.
    """

    __slots__ = ("_after", "_buffer", "_lock", "_request", "_requests", "source")

    def __init__(
        self, op: str, group: str, seq: int, timeout_s: float, buffer: object, after: Callable[[], None] | None
    ) -> None:
        super().__init__(op, group, seq, timeout_s)
        self.source = -1
        self._buffer = buffer  # MPI reads or writes it until the request is complete
        self._after = after
        self._lock = threading.Lock()  # MPI forbids two threads to test one request at once
        self._request: Any = None
        self._requests: Requests | None = None

    def attach(self, request: Any, requests: Requests) -> None:
        """Attach the MPI request and the list that keeps it until it is complete."""
        self.started_at = self.issued_at
        self._request = request
        self._requests = requests

    def poll(self) -> bool:
        """Test the request and say whether it is complete."""
        if self.completed or not self._lock.acquire(blocking=False):
            return self.completed
        try:
            if not self.completed:
                self._test()
        finally:
            self._lock.release()
        return self.completed

    def _test(self) -> None:
        error: BaseException | None = None
        status = mpi().Status()
        try:
            if not self._request.Test(status):
                return
            if self.op == "recv":
                self.source = status.Get_source()
                if isinstance(self.progress, Message):
                    self.progress.received_from(self.source)
            if self._after is not None:
                self._after()
        except Exception as caught:  # noqa: BLE001  # MPI's error belongs to whoever waits
            error = caught
        requests = self._requests
        self._request = self._buffer = self._after = self._requests = None
        if requests is not None:
            requests.discard(self)
        self.finish(error)

    def give_up(self, error: BaseException | None) -> None:
        """Leave the request to MPI: nobody will wait for it, or those who do raise ``error``."""
        with self._lock:
            if not self.completed and self._request is not None:
                if self.op == "recv":
                    self._request.Cancel()
                abandon(self._request, self._buffer)
            if error is not None:
                self._request = self._buffer = self._after = self._requests = None
        if error is not None:
            self.fail(error)

    def block(self, seconds: float) -> None:
        """Make progress until the request is complete.

        Raises:
            CollectiveTimeout: It is not within ``seconds``.
        """
        if not poll(self.poll, seconds):
            raise self.timed_out(seconds)

    def future(self, outputs: list[torch.Tensor]) -> torch.futures.Future[Any]:
        """Return the future; a thread then makes the progress that nobody's ``wait`` makes."""
        future = super().future(outputs)
        requests = self._requests
        if requests is not None and thread_multiple():
            requests.progress()
        return future


class Requests:
    """The requests of one group that MPI is not done with, whatever their users dropped."""

    def __init__(self) -> None:
        self.live: dict[RequestCompletion, None] = {}  # a set that keeps the order of issue
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def add(self, completion: RequestCompletion) -> None:
        """Keep a request until it is complete."""
        self.live[completion] = None

    def discard(self, completion: RequestCompletion) -> None:
        """Let go of a complete request."""
        self.live.pop(completion, None)

    def sweep(self) -> None:
        """Test every request once, oldest first, up to the first few that are still in flight.

        Called before each one is added, so that dropped ones do not pile up.
        """
        still = 0
        for completion in list(self.live):
            still += not completion.poll()
            if still > 4:  # noqa: PLR2004  # bounds the cost of issuing; the rest come next time
                return

    def pending(self) -> list[Completion]:
        """Return what is not complete, oldest first."""
        if self.live:
            self.sweep()
        return list(self.live)

    def give_up(self, error: BaseException | None = None) -> None:
        """Cancel what can be, and keep the rest and its buffers until MPI is done with them, beyond the group."""
        for completion in list(self.live):
            completion.give_up(error)
            if error is not None:
                self.discard(completion)

    def progress(self) -> None:
        """Start a thread that tests the requests until none is left, unless one runs."""
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="hpc_inflight-p2p", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while True:
            for completion in list(self.live):
                completion.poll()
            with self._lock:  # with the lock: `progress` must not take a thread that is ending for a running one
                if not self.live:
                    self._thread = None
                    return
            time.sleep(_PROGRESS_SLEEP_S)
