"""The registry of collectives in flight: from a tensor's storage to the works that a compiled region may wait for.

torch's own registry finds a work by storage when ``wait_tensor`` runs, compiled or not, but offers Python no way
to remove one. So it gets small handles (`_inflight_storage`), as many as there are live works, and the real list is
ours (`_inflight_registry`). A work that was waited leaves a handle that the next registration on that storage uses
again; when the last live work of a storage goes, its handles are popped through ``wait_tensor``.

An entry also goes when nobody could wait for it any more: its operation is complete and only this registry still
holds the storage. Storages are looked at for that, a few each time a work is added, so memory stays bounded when a
program forgets to wait.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from hpc_inflight import _torch_compat as compat
from hpc_inflight._inflight_registry import Registry
from hpc_inflight.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from hpc_inflight._inflight_storage import Record

_T = TypeVar("_T")

_SWEEP_AT_THE_END = 4  # of a context: a loop of contexts must not pay for thousands of works in flight


@dataclass(frozen=True)
class InflightWork:
    """One collective in flight, as `inflight` lists it.

    Attributes:
        op: Name of the operation.
        group: Name of the group; empty for a work registered by hand that is not of this package.
        seq: Its number in the group; 0 for one that is not of this package.
        shape: Shape of the registered tensor.
        dtype: Dtype of the registered tensor.
        age_s: Seconds since it was issued.
        completed: Its data has arrived, but nobody has waited for it.
    """

    op: str
    group: str
    seq: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    age_s: float
    completed: bool


@dataclass(frozen=True)
class Counts:
    """What has happened to the works registered in this process so far.

    Attributes:
        registered: Works that were registered.
        waited_by_tensor: Those that ``wait_tensor`` found, in a compiled region or eagerly.
        waited_by_work: Those whose own ``wait`` came first.
        unwaited: Those that completed and were let go because nobody could wait for them any more.
        wait_s: Seconds the host was blocked in ``wait_tensor``.
    """

    registered: int = 0
    waited_by_tensor: int = 0
    waited_by_work: int = 0
    unwaited: int = 0
    wait_s: float = 0.0


_registry = Registry()


def register_work(tensor: torch.Tensor, work: object) -> None:
    """Let a later ``wait_tensor`` on ``tensor``, or on a tensor that shares its storage, wait for ``work``.

    **Local:** any thread, inside or outside of `allow_inflight_collective_as_graph_input`. Registering a work for
    several tensors is one registration with several handles; two works on one tensor are both waited.

    Args:
        tensor: A tensor with a storage; any dtype, shape and device. Its storage is kept alive until the work is
            waited, or complete with no other holder of the storage.
        work: A c10d Work.

    Raises:
        InvalidArgumentError: The tensor has no storage (sparse), so that nothing could find the work again.
    """
    if not compat.has_storage(tensor):
        msg = (
            f"register_work: a tensor of type {type(tensor).__name__} with layout {tensor.layout} has no storage to "
            "find the work by; register its dense parts"
        )
        raise InvalidArgumentError(msg)
    _registry.register(tensor, work)


def inflight() -> list[InflightWork]:
    """List the registered works that nobody has waited for, oldest first.

    **Local:** any thread, any time; a snapshot. Empty unless works were registered under
    `allow_inflight_collective_as_graph_input` or by `register_work`.
    """
    now = time.monotonic()
    return sorted((_listed(record, now) for record in _registry.records()), key=lambda w: -w.age_s)


def _listed(record: Record, now: float) -> InflightWork:
    entry = record.entry
    completion = entry.completion
    return InflightWork(
        op=type(entry.work).__name__ if completion is None else completion.op,
        group="" if completion is None else completion.group,
        seq=0 if completion is None else completion.seq,
        shape=tuple(record.shape),
        dtype=record.dtype,
        age_s=now - entry.issued_at,
        completed=entry.completed(),
    )


def counts() -> Counts:
    """Count what has happened to registered works in this process so far.

    **Local:** any thread, any time.
    """
    r = _registry
    return Counts(r.registered, r.by_tensor, r.by_work, r.unwaited, r.wait_s)


def sweep() -> None:
    """Let go of every complete work whose storage nobody else holds.

    **Local:** any thread, any time; happens by itself, a few entries per registration.
    """
    _registry.sweep()


def sweep_few() -> None:
    """Do what `sweep` does for a bounded number of storages, at the end of a context.

    **Local:** any thread, any time.
    """
    _registry.sweep(_SWEEP_AT_THE_END)


def wait_by_tensor(tensor: torch.Tensor, operator: Callable[[torch.Tensor], _T]) -> _T:
    """Wait for every work registered for the storage of ``tensor``, then return ``operator(tensor)``.

    **Local:** any thread, eager only. ``operator`` is ``wait_tensor``, for the works that only torch knows of.

    Raises:
        CollectiveTimeout: A group's timeout passed first; the works stay registered.
        InflightError: A collective failed.
    """
    return _registry.wait_by_tensor(tensor, operator)
