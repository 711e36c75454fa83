"""A CUDA graph capture begins when no group has work in flight, whoever begins it.

Upstream had this once, in ProcessGroupNCCL: work that is in flight when a capture begins is polled by a watchdog, and
an event query from another thread ends a capture in global mode. So `capture_begin` first drains every group, keeps
other threads from enqueuing until the capture has begun, and marks that one is under way: nobody asks CUDA about
events until it has ended.

``torch.cuda.graph``, ``make_graphed_callables`` and Inductor's cudagraph trees all call ``CUDAGraph.capture_begin``,
so that is where the drain is. It is installed with the first group and removed after the last.
"""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any

import torch

from hpc_inflight import group_set
from hpc_inflight.config import config

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

_nested = threading.local()  # `graph` has drained with a deadline of its own


class _Hook:
    """What is put in place of ``CUDAGraph.capture_begin`` and ``capture_end``."""

    def __init__(self) -> None:
        self._active = False
        self._replaced: dict[str, tuple[Any, Any]] = {}

    def install(self) -> None:
        """Wrap the two methods, unless wrappers of ours are still in place below another package's."""
        if not config().capture_drain or self._active:
            return
        self._active = True
        for name, wrap in (("capture_begin", self._begin), ("capture_end", self._end)):
            if name not in self._replaced:
                original = getattr(torch.cuda.CUDAGraph, name)
                wrapper = wrap(original)
                self._replaced[name] = original, wrapper
                setattr(torch.cuda.CUDAGraph, name, wrapper)

    def remove(self) -> None:
        """Put the originals back; where another package has wrapped ours, ours stays and only passes on."""
        self._active = False
        for name, (original, wrapper) in list(self._replaced.items()):
            if vars(torch.cuda.CUDAGraph).get(name) is wrapper:
                setattr(torch.cuda.CUDAGraph, name, original)
                del self._replaced[name]

    def _begin(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> None:
            if not self._active or getattr(_nested, "drained", False):
                original(graph, *args, **kwargs)
                return
            begin(functools.partial(original, graph, *args, **kwargs), graph, config().drain_timeout_s, "capture_begin")

        return capture_begin

    @staticmethod
    def _end(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def capture_end(graph: Any, *args: Any, **kwargs: Any) -> None:
            try:
                original(graph, *args, **kwargs)
            finally:  # also when the capture failed
                group_set.capture_ended(graph)

        return capture_end


_hook = _Hook()


def begin(call: Callable[[], None], capture: object, timeout_s: float, what: str) -> None:
    """Drain every group, then begin a capture with ``call``; nothing is enqueued or polled in between.

    Raises:
        DrainTimeout: Work was still enqueued after ``timeout_s``; the capture has not begun.
        CommunicatorAborted: A group was aborted, so that its work never completes.
    """
    group_set.close_and_drain(timeout_s, what)
    try:
        with group_set.polling:
            group_set.capture_began(capture)
            try:
                call()
            except BaseException:
                group_set.capture_ended(capture)
                raise
    finally:
        group_set.gate.open()


class graph:  # noqa: N801  # torch.cuda.graph's name
    """``torch.cuda.graph``, drained first; for a deadline of its own, or where the hook is turned off.

    **Local:** but the drain returns only when the other ranks issue what this rank's works wait for. Collectives of
    CUDA tensors issued inside are captured, not enqueued: the graph's replays run them, on every rank alike.

    Args:
        cuda_graph: The ``torch.cuda.CUDAGraph`` to capture into.
        timeout_s: Seconds that the drain may take; ``HPC_INFLIGHT_DRAIN_TIMEOUT_S`` by default.
        **options: As of ``torch.cuda.graph``: ``pool``, ``stream``, ``capture_error_mode``.

    Raises:
        DrainTimeout: Work was still enqueued at the deadline; nothing was captured.
    """

    def __init__(self, cuda_graph: Any, *, timeout_s: float | None = None, **options: Any) -> None:
        self._graph = cuda_graph
        self._timeout_s = config().drain_timeout_s if timeout_s is None else timeout_s
        self._context = torch.cuda.graph(cuda_graph, **options)

    def __enter__(self) -> None:
        begin(self._enter, self._graph, self._timeout_s, "graph")

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
            group_set.capture_ended(self._graph)


def register() -> None:
    """Install the hook with the first group, and remove it after the last.

    **Local:** once, at import; touches nothing of CUDA.
    """
    group_set.watch(_hook.install, _hook.remove)
