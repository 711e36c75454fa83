"""The all_to_all of pooled embeddings: issued by eager code, waited for in a compiled region, forward and backward.

Embedding tables are split over the ranks, so each rank looks up its own features for the whole batch, and every rank
needs all features of its part of the batch. In the forward the exchange travels while other work runs, until a
compiled region waits for it. In the backward the gradients leave as soon as the region has made them, and travel
while the rest of the backward runs, until a table needs its gradient.

Two autograd functions make that backward. `_Receive` issues, and is put in front of whatever else is ready. `_Send`
waits, and comes last by itself: autograd prefers what was made last, and it was made before the work that overlaps.
Between them goes a tensor without elements, so that no hook and no anomaly mode can look at data in flight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from hpc_inflight import _torch_compat as compat
from hpc_inflight.errors import InvalidArgumentError, UnsupportedError
from hpc_inflight.functional import allow_inflight_collective_as_graph_input, wait_tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

# for each buffer, the dims of each owner's features; for each feature, its buffer, its owner's place and its own there
_Layout = tuple[tuple[tuple[tuple[int, ...], ...], ...], tuple[tuple[int, int, int], ...]]


class PooledEmbeddingsAwaitable:
    """Features on their way, as `PooledEmbeddingsAllToAll` returns them; `wait` gives them.

    An argument of a compiled function like any other, and a pytree; a new one at each call recompiles nothing.

    Attributes:
        buffers: For each dtype the tensor in flight, shape (columns of all features, local batch). Its memory is to
            be read as one block of shape (local batch, columns) for each owner.
    """

    def __init__(self, buffers: Sequence[torch.Tensor], layout: _Layout) -> None:
        self.buffers = tuple(buffers)
        self._layout = layout

    def wait(self) -> tuple[torch.Tensor, ...]:
        """Wait for the exchange and return every feature of this rank's part of the batch.

        **Local:** in eager code or under ``torch.compile(fullgraph=True)``; for the host and the stream it is
        `hpc_inflight.wait_tensor`.

        Returns:
            In the order of the plan, tensors of shape (local batch, dim). They are views of `buffers`: contiguous
            only if their owner has no other feature of that dtype.

        Raises:
            CollectiveTimeout: The group's timeout passed first.
            InflightError: The exchange failed.
        """
        dims, places = self._layout
        features = []
        for buffer, by_owner in zip(self.buffers, dims, strict=True):
            widths = [sum(widths) for widths in by_owner]
            blocks = wait_tensor(buffer).split(widths)
            features.append(
                [
                    # through one dimension: a view from two to two compiles anew for each way the sizes divide
                    block.view(-1).view(block.shape[1], width).split(columns, dim=1)
                    for block, width, columns in zip(blocks, widths, by_owner, strict=True)
                ]
            )
        return tuple(features[buffer][owner][feature] for buffer, owner, feature in places)


class PooledEmbeddingsAllToAll:
    """Which rank owns which feature; called with the features of a batch, it issues their exchange.

    Every rank of the group makes it with equal arguments; that communicates nothing.

    Args:
        dims: Columns of each feature; 0 is a feature without any.
        owners: Group rank that owns each feature, in any order; a rank may own none.
        dtypes: Of all features, or of each. Each different dtype is an all_to_all of its own. Features of integers
            and bools have no gradient.
        group: The default group if None.
        device: Where the features are, also on a rank that owns none.

    Raises:
        InvalidArgumentError: Lists of different lengths, a negative dim, or an owner that is not in the group.
    """

    def __init__(
        self,
        dims: Sequence[int],
        owners: Sequence[int],
        dtypes: torch.dtype | Sequence[torch.dtype] = torch.float32,
        *,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.group = group
        self.device = torch.device(device)
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        kinds = [dtypes] * len(dims) if isinstance(dtypes, torch.dtype) else list(dtypes)
        if not len(dims) == len(owners) == len(kinds):
            msg = (
                f"PooledEmbeddingsAllToAll: {len(dims)} dims, {len(owners)} owners and {len(kinds)} dtypes; expected "
                "one of each for every feature"
            )
            raise InvalidArgumentError(msg)
        for feature, (dim, owner) in enumerate(zip(dims, owners, strict=True)):
            if dim < 0 or not 0 <= owner < self.world_size:
                msg = (
                    f"PooledEmbeddingsAllToAll: feature {feature} has dim {dim} and owner {owner}; expected a dim of "
                    f"at least 0 and a rank of the group, 0 to {self.world_size - 1}"
                )
                raise InvalidArgumentError(msg)
        self.dtypes = list(dict.fromkeys(kinds))
        self.own = [[f for f, o in enumerate(owners) if o == self.rank and kinds[f] == d] for d in self.dtypes]
        self.dims = list(dims)
        by_owner = [
            [[f for f, o in enumerate(owners) if o == rank and kinds[f] == dtype] for rank in range(self.world_size)]
            for dtype in self.dtypes
        ]
        self.columns = [[sum(dims[f] for f in features) for features in ranks] for ranks in by_owner]
        places = {
            f: (b, r, i)
            for b, ranks in enumerate(by_owner)
            for r, features in enumerate(ranks)
            for i, f in enumerate(features)
        }
        widths = tuple(tuple(tuple(dims[f] for f in features) for features in ranks) for ranks in by_owner)
        self._layout: _Layout = widths, tuple(places[f] for f in range(len(dims)))

    def __call__(
        self, features: Sequence[torch.Tensor], batch_sizes: Sequence[int], *, gradients: bool = True
    ) -> PooledEmbeddingsAwaitable:
        """Issue the exchange of one batch, and return what to wait for.

        **Collective:** over the group, in eager code and not in a capture: one all_to_all for each dtype, registered
        as under `hpc_inflight.allow_inflight_collective_as_graph_input`.

        In grad mode the backward is collective, too: once the gradients of what was waited for are made, an
        all_to_all is issued for each dtype that has any, on every rank or on none. So ask ``backward()`` for all
        gradients: asked for those of some inputs, autograd skips it on a rank whose features do not depend on them.
        The gradients are sums over the ranks' losses; divide the loss by the size of the group for the mean.

        Args:
            features: Those that this rank owns, in the order of the plan: each of shape (sum of ``batch_sizes``, dim),
                with the parts of the batch in rank order. Not to be written to before the exchange was waited for.
            batch_sizes: Samples of each rank, the same on all; they may differ and may be 0.
            gradients: False, on every rank, if gradients are not to travel back though grad mode is on.

        Raises:
            InvalidArgumentError: The features are not what the plan says. Only on the rank that has them.
            UnsupportedError: Called in a compiled region.
        """
        if torch.compiler.is_compiling():
            msg = (
                "PooledEmbeddingsAllToAll was called in a compiled region; issue the exchange in eager code, and call "
                "only wait() in the region"
            )
            raise UnsupportedError(msg)
        self._check(features, batch_sizes)
        exchange = _Exchange(self, batch_sizes)
        if gradients and torch.is_grad_enabled() and any(map(_differentiable, self.dtypes)):
            # a rank that owns nothing, or nothing that needs a gradient, still takes part in the backward
            start = torch.empty(0, device=self.device, requires_grad=True)
            token = _Send.apply(exchange, start, *features)  # type: ignore[no-untyped-call]  # torch's own signature
            buffers = _Receive.apply(exchange, token)  # type: ignore[no-untyped-call]  # torch's own signature
            compat.run_first_in_backward(next(b for b in buffers if b.requires_grad))
        else:
            exchange.issue(features)
            buffers = exchange.take_buffers()
        return PooledEmbeddingsAwaitable(buffers, self._layout)

    def _check(self, features: Sequence[torch.Tensor], batch_sizes: Sequence[int]) -> None:
        if len(batch_sizes) != self.world_size or min(batch_sizes) < 0:
            msg = (
                f"PooledEmbeddingsAllToAll: batch_sizes={list(batch_sizes)}; expected {self.world_size} numbers of "
                "samples, one of each rank of the group"
            )
            raise InvalidArgumentError(msg)
        own = {f: dtype for dtype, listed in zip(self.dtypes, self.own, strict=True) for f in listed}
        if len(features) != len(own):
            msg = (
                f"PooledEmbeddingsAllToAll: {len(features)} features; expected the {len(own)} that rank {self.rank} "
                f"owns: {sorted(own)} of the plan"
            )
            raise InvalidArgumentError(msg)
        for f, tensor in zip(sorted(own), features, strict=True):
            expected = (sum(batch_sizes), self.dims[f]), own[f], self.device.type
            found = tuple(tensor.shape), tensor.dtype, tensor.device.type
            if found != expected:
                msg = (
                    f"PooledEmbeddingsAllToAll: feature {f} of the plan is {found[0]} {found[1]} on {found[2]}; "
                    f"expected {expected[0]} {expected[1]} on {expected[2]}"
                )
                raise InvalidArgumentError(msg)


class _Exchange:
    """One batch on its way, and then its gradients on theirs."""

    def __init__(self, plan: PooledEmbeddingsAllToAll, batch_sizes: Sequence[int]) -> None:
        self.plan = plan
        self._batch_sizes = list(batch_sizes)
        self._buffers: list[torch.Tensor] = []
        self._returned: list[tuple[torch.Tensor, Any]] = []  # by dtype that has gradients

    def _splits(self, columns: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return how many elements go to each rank, and how many come from each, in the forward."""
        rank = self.plan.rank
        sent = [samples * columns[rank] for samples in self._batch_sizes]
        return sent, [self._batch_sizes[rank] * width for width in columns]

    def issue(self, features: Sequence[torch.Tensor]) -> None:
        plan = self.plan
        by_number = dict(zip(sorted(f for own in plan.own for f in own), features, strict=True))
        for dtype, own, columns in zip(plan.dtypes, plan.own, plan.columns, strict=True):
            sent, received = self._splits(columns)
            rows = [by_number[f].detach() for f in own]
            # one feature travels as it is: its rows are in the order of the ranks
            flat = rows[0] if len(rows) == 1 else torch.cat(rows or [self._empty(0, dtype)], dim=-1)
            buffer = self._empty((sum(columns), self._batch_sizes[plan.rank]), dtype)
            with allow_inflight_collective_as_graph_input():
                dist.all_to_all_single(
                    buffer.view(-1), flat.reshape(-1), received, sent, group=plan.group, async_op=True
                )
            self._buffers.append(buffer)

    def take_buffers(self) -> list[torch.Tensor]:
        """Hand the buffers over: nothing here may keep them alive, or the registry could not see them go."""
        buffers, self._buffers = self._buffers, []
        return buffers

    def issue_gradients(self, gradients: Sequence[torch.Tensor | None]) -> None:
        plan = self.plan
        self._returned = []
        for dtype, columns, gradient in zip(plan.dtypes, plan.columns, gradients, strict=True):
            if not _differentiable(dtype) or gradient is None:
                continue
            sent, received = self._splits(columns)
            returned = self._empty((sum(self._batch_sizes), columns[plan.rank]), dtype)
            work = dist.all_to_all_single(
                returned.view(-1), gradient.reshape(-1), sent, received, group=plan.group, async_op=True
            )
            self._returned.append((returned, work))

    def take_gradients(self) -> dict[int, torch.Tensor]:
        """Wait for the gradients and return them by the number of the feature."""
        plan = self.plan
        returned, self._returned = self._returned, []
        gradients: dict[int, torch.Tensor] = {}
        owned = [own for dtype, own in zip(plan.dtypes, plan.own, strict=True) if _differentiable(dtype)]
        for own, (columns, work) in zip(owned, returned, strict=True):
            work.wait()
            gradients.update(zip(own, columns.split([plan.dims[f] for f in own], dim=1), strict=True))
        return gradients

    def _empty(self, shape: int | tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.plan.device)


class _Send(torch.autograd.Function):
    """Forward: issue the features. Backward, the last to run: wait for their gradients."""

    @staticmethod
    def forward(ctx: Any, exchange: _Exchange, start: torch.Tensor, *features: torch.Tensor) -> torch.Tensor:
        ctx.exchange = exchange
        exchange.issue(features)
        return start.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_token: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients = ctx.exchange.take_gradients()
        numbers = sorted(f for own in ctx.exchange.plan.own for f in own)
        return None, None, *[gradients.get(f) for f in numbers]


class _Receive(torch.autograd.Function):
    """Forward: hand the buffers in flight out. Backward, the first to run: issue their gradients."""

    @staticmethod
    def forward(ctx: Any, exchange: _Exchange, token: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.exchange = exchange
        ctx.like = token.device
        buffers = tuple(exchange.take_buffers())
        ctx.mark_non_differentiable(*[b for b in buffers if not _differentiable(b.dtype)])
        return buffers

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, torch.Tensor]:
        ctx.exchange.issue_gradients(gradients)
        return None, torch.empty(0, device=ctx.like)


def _differentiable(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


compat.register_pytree(
    PooledEmbeddingsAwaitable,
    lambda awaitable: (list(awaitable.buffers), awaitable._layout),  # noqa: SLF001  # its own class's
    lambda buffers, layout: PooledEmbeddingsAwaitable(tuple(buffers), layout),
)
