"""Strict mode: a ``wait_tensor`` that found nothing in flight is counted, and the first one is told of.

Such a wait is no error in itself: the work may have been waited before. But it is also what a wait on a clone, or on
a tensor that was issued outside of the context, looks like: the program goes on at once, with data that may not have
arrived.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from hpc_inflight import _torch_compat as compat
from hpc_inflight._call_site import caller
from hpc_inflight.errors import MissedWaitWarning

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from hpc_inflight._inflight_registry import Registry
    from hpc_inflight._inflight_storage import Record


def watch(registry: Registry) -> None:
    """Look at every ``wait_tensor`` of this process, eager and compiled, from here on.

    **Local:** once, before the first wait. Costs some microseconds per wait.
    """

    def observe(tensor: torch.Tensor, wait: Callable[[], torch.Tensor]) -> torch.Tensor:
        if registry.knows(tensor):
            return wait()
        before = compat.registry_size()
        waited = wait()
        if compat.registry_size() >= before:
            missed(registry, tensor)
        return waited

    compat.watch_wait_tensor(observe)


def missed(registry: Registry, tensor: torch.Tensor) -> None:
    """Count a wait that found nothing, and warn of the first."""
    registry.missed += 1
    if registry.missed > 1:
        return
    warnings.warn(
        f"wait_tensor: nothing is in flight for this tensor of shape {tuple(tensor.shape)}, {tensor.dtype} on "
        f"{tensor.device}, waited for at {caller()}; {_nearest(registry.records(), tensor)}. If it was waited for "
        "before, all is well; else wait for the collective's own output or a view of it (a clone has another storage), "
        "and issue it inside allow_inflight_collective_as_graph_input()",
        MissedWaitWarning,
        stacklevel=2,
    )


def _nearest(records: list[Record], tensor: torch.Tensor) -> str:
    wanted = tuple(tensor.shape), tensor.dtype
    alike = [record for record in records if record.shape_and_dtype() == wanted]
    if not alike:
        return f"of the {len(records)} works in flight none has its shape and dtype"
    entry = alike[-1].entry
    issued = f", issued at {entry.site}" if entry.site else ""
    op = f"{entry.op()} (seq {entry.seq()}) on group {entry.group()}"
    return f"the nearest in flight, of the same shape and dtype, is {op}{issued}"
