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

import functools
import sys
import time
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hpc_inflight import _torch_compat as compat
from hpc_inflight import _wait_watch
from hpc_inflight._inflight_registry import Registry
from hpc_inflight._inflight_storage import this_thread
from hpc_inflight._unwaited import Tally
from hpc_inflight.config import checked_on_unwaited, config
from hpc_inflight.errors import InvalidArgumentError, UnwaitedError, UnwaitedWarning

if TYPE_CHECKING:
    import torch

    from hpc_inflight._inflight_storage import Record

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
        call_site: File, line and function that issued it, with ``HPC_INFLIGHT_CALL_SITES=1``; else empty.
    """

    op: str
    group: str
    seq: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    age_s: float
    completed: bool
    call_site: str


@dataclass(frozen=True)
class Counts:
    """What has happened to the works registered in this process so far.

    Attributes:
        registered: Works that were registered.
        waited_by_tensor: Those that ``wait_tensor`` found, in a compiled region or eagerly.
        waited_by_work: Those whose own ``wait`` came first.
        unwaited: Those that completed and were let go because nobody could wait for them any more.
        missed: In strict mode, waits by tensor that found nothing in flight.
        wait_s: Seconds the host was blocked in ``wait_tensor``.
    """

    registered: int = 0
    waited_by_tensor: int = 0
    waited_by_work: int = 0
    unwaited: int = 0
    missed: int = 0
    wait_s: float = 0.0


_registry = Registry()


@dataclass
class _Reporting:
    """Who reports, and what is done about works that nobody waited for."""

    label: str = ""
    policy: str = ""
    told: bool = False  # a context has warned of lost works: the next report comes at the end of the program
    reported: Tally = field(default_factory=Tally)  # what had come by the last report


_reporting = _Reporting()


def configure(label: str) -> None:
    """Read the settings that the registry goes by, and note who this process is, for messages.

    **Local:** when a group is made, and before a work is registered by hand.

    Raises:
        InvalidArgumentError: The environment holds what it cannot.
    """
    _reporting.label = label or _reporting.label
    _settings()


@functools.cache
def _settings() -> None:
    _registry.records_sites = config().call_sites
    if config().strict:
        _registry.on_missed = functools.partial(_wait_watch.missed, _registry)
        _wait_watch.watch(_registry)


def label() -> str:
    """Return who this process is, as messages say it; empty before the first group."""
    return _reporting.label


def set_policy(on_unwaited: str | None) -> None:
    """Set what is done about registered works that nobody waited for; None leaves it to the environment.

    Raises:
        InvalidArgumentError: Neither ``"warn"``, ``"raise"`` nor ``"ignore"``.
    """
    _reporting.policy = "" if on_unwaited is None else checked_on_unwaited("on_unwaited", on_unwaited)


# what `register_work` does after its checks, for groups, which register every output of every collective
register = _registry.register
# what `functional.wait_tensor` does in eager code
wait_by_tensor = _registry.wait_by_tensor


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
    _settings()
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
    shape, dtype = record.shape_and_dtype()
    age_s, completed = now - entry.issued_at(), entry.completed()
    return InflightWork(entry.op(), entry.group(), entry.seq(), shape, dtype, age_s, completed, entry.site)


def counts() -> Counts:
    """Count what has happened to registered works in this process so far.

    **Local:** any thread, any time.
    """
    r = _registry
    return Counts(r.registered, r.by_tensor, r.by_work, r.unwaited.total, r.missed, r.wait_s)


def sweep() -> None:
    """Let go of every complete work whose storage nobody else holds.

    **Local:** any thread, any time; happens by itself, a few entries per registration.
    """
    _registry.sweep()


def left_context() -> None:
    """Let go of some works that nobody can wait for, and report if there are such, at the end of a context.

    **Local:** any thread, any time. Warns once per process; the count of all comes at the end of the program.

    Raises:
        UnwaitedError: With the policy ``"raise"``.
    """
    _registry.sweep(_SWEEP_AT_THE_END)
    if _registry.unwaited.total > _reporting.reported.total and not _reporting.told:
        policy = _reporting.policy or config().on_unwaited
        tally, before = _registry.unwaited.copy(), _reporting.reported
        if policy == "raise":
            _reporting.reported = tally
        _reporting.told = policy == "warn"
        _report(tally.since(before), policy)


def open_scope() -> tuple[Tally, Tally | None]:
    """Begin to count what this thread registers, and return the count and the one that it is nested in."""
    scope, outer = Tally(), this_thread.scope
    this_thread.scope = scope
    return scope, outer


def close_scope(scope: Tally, outer: Tally | None, on_unwaited: str) -> None:
    """End counting, and report what was registered since its beginning and not waited.

    Raises:
        UnwaitedError: There are such works, and ``on_unwaited`` is ``"raise"``.
    """
    this_thread.scope = outer
    _registry.sweep()
    tally = scope.copy()
    _count_live(tally, scope)
    _report(tally, on_unwaited)


def _count_live(tally: Tally, scope: Tally | None = None) -> None:
    seen = set()
    for record in _registry.records():
        if record.entry not in seen and (scope is None or record.entry.scope is scope):
            seen.add(record.entry)
            record.count_in(tally)


def report_unwaited(*, at_exit: bool = False) -> None:
    """Report the registered works that nobody has waited for and that no report before has told of.

    **Local:** at the end of the program; at the interpreter's exit it prints, since nobody could catch anything.

    Raises:
        UnwaitedError: With the policy ``"raise"``.
    """
    policy = _reporting.policy or config().on_unwaited
    tally = _registry.unwaited.copy()
    _count_live(tally)
    if tally.total > _reporting.reported.total:
        before, _reporting.reported = _reporting.reported, tally
        _report(tally.since(before), policy, at_exit=at_exit)
    if at_exit:
        _registry.forget()


def _report(tally: Tally, policy: str, *, at_exit: bool = False) -> None:
    if tally.total == 0 or policy == "ignore":
        return
    text = f"{_reporting.label}: {tally.text()}" if _reporting.label else tally.text()
    if at_exit:
        sys.stderr.write(f"hpc_inflight: {text}\n")  # in one write: other ranks write, too
    elif policy == "raise":
        raise UnwaitedError(text)
    else:
        warnings.warn(text, UnwaitedWarning, stacklevel=4)
