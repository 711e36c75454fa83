"""A CUDA graph capture begins when no group has work in flight, whoever begins it.

Upstream had this once, in ProcessGroupNCCL: work that is in flight when a capture begins is polled by a watchdog, and
an event query from another thread ends a capture in global mode. So `capture_begin` first drains every group, keeps
other threads from enqueuing until the capture has begun, and marks that one is under way: nobody asks CUDA about
events until it has ended.

``torch.cuda.graph``, ``make_graphed_callables`` and Inductor's cudagraph trees all call ``CUDAGraph.capture_begin``,
so that is where the drain is. It is installed with the first group and removed after the last. ``torch.cuda.graph``
waits for the device before it comes there: a kernel that waits for a missing rank holds it up until the watchdog ends
that at the group's timeout, not the drain at its own.
"""

from __future__ import annotations

import functools
import threading
import time
from typing import TYPE_CHECKING, Any

import torch

from hpc_inflight import _gate, group_set
from hpc_inflight._poll import poll
from hpc_inflight._torch_compat import CAPTURE_ENDS
from hpc_inflight.config import config
from hpc_inflight.errors import DrainTimeout

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

_nested = threading.local()  # `graph` has drained with a deadline of its own


class _Hook:
    """What is put in place of what begins and ends a capture, and of a graph's ``reset``."""

    def __init__(self) -> None:
        self._active = False
        self._replaced: dict[tuple[Any, str], tuple[Any, Any]] = {}

    def install(self) -> None:
        """Wrap the methods, unless wrappers of ours are still in place below another package's."""
        if not config().capture_drain or self._active:
            return
        self._active = True
        cuda_graph, context = torch.cuda.CUDAGraph, torch.cuda.graph
        wraps: dict[tuple[Any, str], Callable[[Any], Any]] = {
            (cuda_graph, "capture_begin"): self._begin,
            (cuda_graph, "reset"): self._reset,
            (context, "__enter__"): self._enter,
        } | {(cuda_graph, name): self._end for name in CAPTURE_ENDS}
        for (owner, name), wrap in wraps.items():
            if (owner, name) not in self._replaced and hasattr(owner, name):
                original = getattr(owner, name)
                wrapper = wrap(original)
                self._replaced[owner, name] = original, wrapper
                setattr(owner, name, wrapper)

    def remove(self) -> None:
        """Put the originals back; where another package has wrapped ours, ours stays and only passes on."""
        if _gate.lingers():  # it is for the captures to wait for that
            return
        self._active = False
        if _gate.capturing():  # the end of that has to come by here, and calls again
            return
        for (owner, name), (original, wrapper) in list(self._replaced.items()):
            if vars(owner).get(name) is wrapper:
                setattr(owner, name, original)
                del self._replaced[owner, name]

    def _begin(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> None:
            if not self._active or getattr(_nested, "drained", False):
                original(graph, *args, **kwargs)
                return
            begin(functools.partial(original, graph, *args, **kwargs), graph, config().drain_timeout_s, "capture_begin")

        return capture_begin

    def _enter(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def enter(context: Any) -> None:
            if not self._active:
                original(context)
                return
            before = torch.cuda.current_stream()
            try:
                original(context)
            except BaseException:
                torch.cuda.set_stream(before)  # torch has changed it, and undoes that only after a capture
                raise

        return enter

    def _end(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def capture_end(graph: Any, *args: Any, **kwargs: Any) -> None:
            try:
                original(graph, *args, **kwargs)
            finally:  # also when the capture failed
                _gate.capture_ended(graph)
                if not self._active:
                    self.remove()

        return capture_end

    def _reset(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def reset(graph: Any, *args: Any, **kwargs: Any) -> None:
            original(graph, *args, **kwargs)
            _gate.graph_gone(graph)

        return reset


_hook = _Hook()


def begin(
    call: Callable[[], None],
    capture: object,
    timeout_s: float,
    what: str,
    settle: Callable[[], object] | None = None,
) -> None:
    """Drain every group, then begin a capture with ``call``; nothing is enqueued or polled in between.

    ``settle`` runs after the drain, before this counts as a capture: it may block, and the watchdog looks on.

    Raises:
        DrainTimeout: Work was still enqueued, or a communicator being ended, after ``timeout_s``; no capture has begun.
        CommunicatorAborted: A group was aborted, so that its work never completes.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        if _gate.being_ended():
            _wait_for_endings(deadline, timeout_s, what)  # with the gate open: others' work need not wait for them
        group_set.close_and_drain(timeout_s, what, deadline)
        try:
            if settle is not None:
                settle()
            with _gate.polling:
                if not _gate.capture_began(capture):  # an end has begun meanwhile
                    continue
                try:
                    call()
                except BaseException:
                    _gate.capture_ended(capture)
                    raise
                return
        finally:
            _gate.gate.open()


def _wait_for_endings(deadline: float, timeout_s: float, what: str) -> None:
    if not poll(lambda: not _gate.being_ended(), max(0.0, deadline - time.monotonic())):
        whose = _gate.being_ended()
        raise DrainTimeout(f"{what}: after {timeout_s:g} s NCCL has not ended the communicators of group {whose}")


def _synchronize() -> None:
    """Wait for the device as ``torch.cuda.graph`` will, but where it is not yet taken for a capture."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


class graph:  # noqa: N801  # torch.cuda.graph's name
    """``torch.cuda.graph``, drained first; for a deadline of its own, or where the hook is turned off.

    **Local:** but the drain returns only when the other ranks issue what this rank's works wait for. Collectives of
    CUDA tensors issued inside are captured, not enqueued: the graph's replays run them, on every rank alike.

    Args:
        cuda_graph: The ``torch.cuda.CUDAGraph`` to capture into.
        timeout_s: Seconds that the drain may take; ``HPC_INFLIGHT_DRAIN_TIMEOUT_S`` by default.
        **options: As of ``torch.cuda.graph``: ``pool``, ``stream``, ``capture_error_mode``.

    Raises:
        DrainTimeout: Work was still enqueued, or a communicator being ended, at the deadline; nothing was captured.
    """

    def __init__(self, cuda_graph: Any, *, timeout_s: float | None = None, **options: Any) -> None:
        self._graph = cuda_graph
        self._timeout_s = config().drain_timeout_s if timeout_s is None else timeout_s
        self._context = torch.cuda.graph(cuda_graph, **options)

    def __enter__(self) -> None:
        begin(self._enter, self._graph, self._timeout_s, "graph", _synchronize)

    def _enter(self) -> None:
        _nested.drained = True
        try:
            self._context.__enter__()
        finally:
            _nested.drained = False

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._context.__exit__(kind, value, trace)
        finally:
            _gate.capture_ended(self._graph)


def register() -> None:
    """Install the hook with the first group, and remove it after the last.

    **Local:** once, at import; touches nothing of CUDA.
    """
    group_set.watch(_hook.install, _hook.remove)
