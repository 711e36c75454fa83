"""Waiting for a collective by its tensor, in eager code and in compiled regions."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from hpc_inflight import _torch_compat as compat
from hpc_inflight import work_registry
from hpc_inflight.config import checked_on_unwaited

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Self

    from hpc_inflight._unwaited import Tally


class allow_inflight_collective_as_graph_input(contextlib.ContextDecorator):  # noqa: N801  # torch's name, used as a function
    """Register what is issued inside with ``async_op=True``, so that a region compiled by torch can wait for it.

    **Local:** per thread, as torch's own flag is, and nests; collectives that other threads issue meanwhile are not
    registered. Nothing is registered outside, so that code which never waits by tensor keeps nothing alive. torch's
    ``torch.distributed._functional_collectives.allow_inflight_collective_as_graph_input_ctx`` does the same.

    Only the issue needs to be inside; the wait may come later and anywhere. So what is still in flight on leaving is
    not reported there, but at the end of the program; what is lost - complete, never waited, and nobody holds its
    storage any more - is reported on leaving the outermost context, once.

    Args:
        on_unwaited: For a context that contains the waits as well: ``"warn"`` or ``"raise"`` on leaving it if any
            work that this thread registered inside has not been waited, ``"ignore"`` to report nothing on leaving.

    Raises:
        UnwaitedError: On leaving, with ``"raise"``; not while another exception passes through.
        UnwaitedWarning: The warning's category, with ``"warn"``.
    """

    # a class, because a generator would cost more than the registration of a work may

    def __init__(self, on_unwaited: str | None = None) -> None:
        self._on_unwaited = None if on_unwaited is None else checked_on_unwaited("on_unwaited", on_unwaited)
        self._previous: list[bool] = []
        self._scopes: list[tuple[Tally, Tally | None]] = []

    def _recreate_cm(self) -> Self:
        return type(self)(self._on_unwaited)  # as a decorator: each call, in whatever thread, has its own

    def __enter__(self) -> None:
        self._previous.append(compat.inflight_allowed())
        compat.set_inflight_allowed(True)
        if self._on_unwaited is not None:
            self._scopes.append(work_registry.open_scope())

    def __exit__(self, raised: type[BaseException] | None, *_rest: object) -> None:
        previous = self._previous.pop()
        compat.set_inflight_allowed(previous)
        if self._on_unwaited is not None:
            work_registry.close_scope(*self._scopes.pop(), self._on_unwaited if raised is None else "ignore")
        elif not previous and raised is None:
            work_registry.left_context()


class _Wait(torch.autograd.Function):
    """The operator with an identity gradient, for the torch versions whose own has none."""

    @staticmethod
    def forward(_ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        waited: torch.Tensor = torch.ops._c10d_functional.wait_tensor(tensor)  # noqa: SLF001  # dynamo traces this name
        return waited

    @staticmethod
    def backward(_ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


def _operator(tensor: torch.Tensor) -> torch.Tensor:
    waited: torch.Tensor
    if compat.WAIT_TENSOR_HAS_GRADIENT or not tensor.requires_grad:
        waited = torch.ops._c10d_functional.wait_tensor(tensor)  # noqa: SLF001  # dynamo traces this name
    else:
        waited = _Wait.apply(tensor)  # type: ignore[no-untyped-call]  # torch's own signature
    return waited


def wait_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Wait for every registered work on the storage of ``tensor`` and return ``tensor``.

    **Local:** eager or inside ``torch.compile(fullgraph=True)``, where it becomes one node of the graph. Finding
    nothing registered is not an error: it returns at once.

    On CPU the host blocks until the data has arrived. Gradients pass through unchanged.

    Several threads may wait for one tensor. Only torch's own operator, in a compiled region or called directly, has
    an instant in which another thread's operator finds nothing: between taking the works and beginning to wait.

    Args:
        tensor: The output of the collective, or any tensor that shares its storage.

    Returns:
        The same data; use the returned tensor, so that the compiler keeps the order.

    Raises:
        CollectiveTimeout: The group's timeout passed first; the next wait waits on.
        InflightError: The collective failed.
    """
    if torch.compiler.is_compiling():
        return _operator(tensor)
    # without the look-up of the name that dynamo needs, which takes as long as the operator itself
    plain = compat.WAIT_TENSOR_HAS_GRADIENT or not tensor.requires_grad
    operator: Callable[[torch.Tensor], torch.Tensor] = compat.wait_tensor_op if plain else _operator
    # Our own registry first. The operator forgets the works before it waits for them, so a second thread that waits
    # for the same tensor would find nothing and go on.
    return work_registry.wait_by_tensor(tensor, operator)
