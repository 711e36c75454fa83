"""What tests of the NCCL communicator on the stand-in share."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from hpc_inflight import _gate
from hpc_inflight.communicators.base import Reduction

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from hpc_inflight.communicators.nccl import NCCLCommunicator

SUM = Reduction("SUM")
ALONE: Any = SimpleNamespace(rank=0, size=1)  # the group's MPI communicator, as far as one rank needs it


def issue(comm: NCCLCommunicator, *tensors: torch.Tensor) -> Any:
    """Issue an all_reduce of each tensor, as one operation."""
    return comm.enqueue("all_reduce", [comm.all_reduce(t, SUM) for t in tensors], tensors, 10.0)


@contextlib.contextmanager
def closed_gate() -> Iterator[Callable[[], None]]:
    """Hold the gate closed in another thread, as a drain does; what is yielded opens it."""
    closed, may_open = threading.Event(), threading.Event()

    def drain() -> None:
        _gate.gate.close()
        closed.set()
        may_open.wait(30)
        _gate.gate.open()

    drainer = threading.Thread(target=drain)
    drainer.start()
    assert closed.wait(30)
    try:
        yield may_open.set
    finally:
        may_open.set()
        drainer.join(30)
