"""Stand-ins for a group and for torch.cuda.CUDAGraph: who waits for whom around a capture needs no GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpc_inflight import _gate
from hpc_inflight.work import Completion

if TYPE_CHECKING:
    from collections.abc import Callable


class Group:
    def __init__(self) -> None:
        self.works: list[Completion] = []
        self.failure: Exception | None = None

    def issue(self, op: str = "all_reduce") -> Completion:
        self.works.append(Completion(op, "test", len(self.works) + 1, 30.0))
        return self.works[-1]

    def pending_works(self) -> list[Completion]:
        return [work for work in self.works if not work.completed]

    def is_idle(self) -> bool:
        return not self.pending_works() and self.failure is None

    def quiesce(self, timeout_s: float) -> bool:  # noqa: ARG002  # the protocol's
        if self.failure is not None:
            raise self.failure
        return True

    def shape_of(self, _work: Completion) -> str:
        return "shape (4,), torch.float32"

    def describe(self) -> str:
        return "group test (rank 0 of 2)"

    def block_synchronous(self, deadline: float) -> None:
        """Do nothing: there is no GPU."""

    def forked(self) -> None:
        pass


class Graph:
    """What a capture does to this process, without CUDA."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.fails = False
        self.during: Callable[[], object] = lambda: None

    def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
        self.seen.append((pool, capture_error_mode, _gate.capturing(), _gate.gate.closed))
        self.during()
        if self.fails:
            raise RuntimeError("capture refused")

    def capture_end(self) -> None:
        if self.fails:
            raise RuntimeError("capture invalidated")

    def reset(self) -> None:
        pass
