"""How the NCCL communicator lives and ends: what is pending, how it is destroyed or aborted, and what remains."""

from __future__ import annotations

import functools
import gc
import logging
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, NoReturn

from hpc_inflight import _gate
from hpc_inflight.communicators._nccl_move import Mover
from hpc_inflight.errors import (
    CollectiveTimeout,
    CommunicatorAborted,
    DrainTimeout,
    GroupDestroyedError,
    InflightError,
    NCCLError,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpc_inflight._cupy import Runtime
    from hpc_inflight.communicators._nccl_p2p import Loopback, Pair
    from hpc_inflight.communicators._nccl_stream import Stream
    from hpc_inflight.work import Completion

_END_S = 10.0  # for NCCL to destroy or abort a communicator
_LAUNCH_S = 1.0  # for a launch or an abort to return that NCCL may keep waiting: for other ranks, or for graphs to go
_left_behind: list[object] = []
_log = logging.getLogger(__name__)


class Life(Mover):
    """The streams of a communicator, from the first to what an abort leaves.

    A communicator is destroyed or aborted by whoever says so, once, and never by the garbage collector.
    """

    def __init__(
        self, runtime: Runtime, index: int, rank: int, size: int, nccl: Any, name: str, stream: Stream
    ) -> None:
        super().__init__(runtime, index, rank, size, nccl, name)
        self._unusable: InflightError | None = None  # why, once it is
        self._stopping = False  # nothing is waited for any more
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._pairs: dict[tuple[int, int], Pair | Loopback] = {}
        self._graphs: weakref.WeakSet[_gate.Graph] = weakref.WeakSet()  # those that hold operations of this one
        self._stream = stream
        stream.check = functools.partial(runtime.check, nccl)

    def _refuse(self) -> NoReturn:
        assert self._unusable is not None  # noqa: S101  # for mypy: its callers have looked
        raise type(self._unusable)(str(self._unusable))

    def _streams(self) -> list[Stream]:
        return [self._stream, *(pair.stream for pair in list(self._pairs.values()))]

    def pending_works(self) -> list[Completion]:
        """See `Communicator.pending_works`."""
        found: list[Completion] = []
        for stream in self._streams():
            stream.retire()
            found += [completion for completion in list(stream.pending) if not completion.poll()]
        return sorted(found, key=lambda completion: completion.issued_at)

    def shutdown(self, timeout_s: float) -> None:
        """Wait for pending works and destroy the communicators; see `Communicator.shutdown`.

        Beside a graph that has captured operations of them they are left to the end of the process.

        Raises:
            DrainTimeout: Works were still pending at the deadline; the communicators were aborted.
        """
        deadline = time.monotonic() + timeout_s
        text = f"group {self.name} was destroyed; make a new group, or issue before destroying it"
        self._unusable = self._unusable or GroupDestroyedError(text)
        late: CollectiveTimeout | None = None
        failed = False
        try:
            if not self.runtime.capturing():  # who captures cannot wait for the end of that
                for work in self.pending_works():
                    work.block(max(0.0, deadline - time.monotonic()))
            self.block_synchronous(deadline)
        except CollectiveTimeout as error:
            late = error
            self._fail_pending()
        except NCCLError:  # of what no work stands for: whoever uses the device next is told
            failed = True
        self._end(abort=failed or late is not None)
        if late is not None:
            raise DrainTimeout(f"destroying group {self.name}: {late}") from None

    def block_synchronous(self, deadline: float) -> None:
        """Block the host until what synchronous calls have left on their streams is complete.

        Nothing is waited for after an abort, which has ended it, nor during a capture, when CUDA must not be asked.

        Raises:
            CollectiveTimeout: It is not at ``deadline``, a `time.monotonic`.
            NCCLError: Something failed on the device.
        """

    def is_idle(self) -> bool:
        """See `Communicator.is_idle`."""
        stream = self._stream
        # the lock first: who holds it may be about to enqueue; who takes it later finds the gate closed
        if stream.lock.locked() or stream.pending or self._unusable is not None:
            return False
        return not self._pairs or not any(
            pair.stream.lock.locked() or pair.stream.pending for pair in list(self._pairs.values())
        )

    def quiesce(self, timeout_s: float) -> bool:
        """See `Communicator.quiesce`."""
        deadline = time.monotonic() + min(timeout_s, threading.TIMEOUT_MAX)
        quiet = True
        for stream in self._streams():
            quiet = stream.lock.acquire(timeout=max(0.0, deadline - time.monotonic()))
            if not quiet:
                break
            stream.lock.release()
        if self._unusable is not None:
            raise CommunicatorAborted(str(self._unusable)) from self._unusable
        return quiet

    def check(self) -> None:
        """Raise what NCCL has found wrong since."""
        for stream in self._streams():
            stream.check()

    def abort(self, error: InflightError | None = None) -> None:
        """End what is running and refuse the rest; see `Communicator.abort`."""
        if self._unusable is None:
            self._unusable = error or CommunicatorAborted(f"group {self.name} was aborted; make a new group")
            self._fail_pending()
            self._end(abort=True)

    def _fail_pending(self) -> None:
        """Fail what is pending, before an abort ends it on the device, which looks like completion."""
        assert self._unusable is not None  # noqa: S101  # for mypy: its callers have set it
        for stream in self._streams():
            for completion in list(stream.pending):
                completion.fail(self._unusable)

    def _end(self, *, abort: bool) -> None:
        """Destroy or abort all communicators, once; after an abort, which another thread may be at, wait for that."""
        with self._lock:
            first, self._stopping = not self._stopping, True
        if not first:
            self._ended.wait(2 * _END_S)
            return
        try:
            self._end_all(abort=abort)
        finally:
            self._ended.set()

    def _end_all(self, *, abort: bool) -> None:
        assert self._unusable is not None  # noqa: S101  # for mypy: whoever ends it has said why
        streams, deadline = self._streams(), time.monotonic() + _LAUNCH_S
        busy = [s for s in streams if not s.refuse(self._unusable, max(0.0, deadline - time.monotonic()))]
        if busy or any(s.failed for s in streams):
            abort = True  # NCCL destroys nothing that is in use, or has failed
        if abort:
            self._fail_pending()  # what was just being launched, too
        for pair in list(self._pairs.values()):
            pair.stop(_END_S)
        ended = [self._nccl, *(pair.nccl for pair in self._pairs.values() if pair.nccl is not None)]
        if self._graphs and not (abort or _gate.capturing()):
            gc.collect()  # torch keeps some graphs in cycles, which each rank would find at a time of its own
        if abort:
            with _gate.ending(self.name, 0.0):
                self._end_each(self.runtime.abort, ended, streams)
        elif self._graphs:
            self._leave(ended, "a CUDA graph that captured its operations is not gone")
        else:
            with _gate.ending(self.name, 0.0 if self.runtime.capturing() else _END_S) as apart:
                if apart:
                    self._end_each(self.runtime.destroy, ended, streams)
                else:
                    self._leave(ended, "a CUDA graph is being captured")
        self._pairs = {}

    def _leave(self, ended: list[Any], why: str) -> None:
        """Do not call NCCL, which would block until the graphs are gone, and go on beside whatever is captured then.

        A rank on the same node that does call it waits for this one, to its own deadline.
        """
        _log.info("group %s: its NCCL communicators are left to the end of the process: %s", self.name, why)
        _left_behind.append((self, ended))

    def _end_each(self, how: Callable[[Any], None], ended: list[Any], streams: list[Stream]) -> None:
        """End communicators in threads: NCCL may never return, and offers no deadline."""
        runtime, index = self.runtime, self._index
        # An abort ends the kernels at once; but the call returns only when graphs that hold them are gone.
        beside_graphs = bool(self._graphs)
        patience_s = _LAUNCH_S if beside_graphs else _END_S

        def run(nccl: Any) -> None:
            try:
                runtime.settle_device(index)
                how(nccl)
            except Exception as error:  # noqa: BLE001  # CuPy raises what it likes; out of here it would end the job
                _log.warning("group %s: NCCL failed to end a communicator: %s", self.name, error)

        # all at once: NCCL may wait for the peer of each, and the peers know them in other orders
        name = f"hpc_inflight-end-{self.name}"
        threads = [threading.Thread(target=run, args=(nccl,), name=name, daemon=True) for nccl in ended]
        deadline = time.monotonic() + patience_s
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        left = sum(thread.is_alive() for thread in threads)
        if left:
            text = "group %s: NCCL did not end %d of %d communicators within %g s; they are left behind"
            level = logging.INFO if beside_graphs else logging.WARNING  # what NCCL waits for is known
            _log.log(level, text, self.name, left, len(threads), patience_s)
            _left_behind.append(streams)  # with the tensors that it may still be using
            if beside_graphs:
                _gate.linger(self.name, self._graphs, threads)
            return
        for stream in streams:
            stream.failed.clear()
