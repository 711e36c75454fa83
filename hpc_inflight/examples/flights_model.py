"""A DLRM-style model whose embedding tables are split over the ranks.

Each rank owns whole tables (table-wise sharding). It looks up the rows of the *global* batch in its own tables and an
all_to_all brings every rank the rows of its slice of the batch from all tables. Eager code issues that exchange; the
compiled over-arch waits for it. The gradients of the rows travel back the same way. The dense layers are the same on
every rank and their gradients are averaged.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import nn

import hpc_inflight as hi

if TYPE_CHECKING:
    from collections.abc import Sequence

BOTTOM_HIDDEN = (128, 64)
TOP_HIDDEN = (128, 64)
TABLE_INIT_STD = 0.05


class TableSharding:
    """Which rank owns which tables, and the all_to_all splits that follow.

    Contiguous runs of tables, so that rows received in rank order are in table order for any number of ranks. A
    rank owns none when there are more ranks than tables; its splits are then zero.

    Attributes:
        counts: Number of tables of each rank.
        own: The tables of this rank.
        own_slice: The part of the global batch that is this rank's.
        sent_splits: Numbers that go to each rank in the exchange of rows.
        received_splits: Numbers that come from each rank.
    """

    def __init__(self, tables: int, dim: int, local_batch: int, rank: int, world_size: int) -> None:
        """Share ``tables`` of width ``dim`` out over ``world_size`` ranks with ``local_batch`` examples each."""
        bounds = [r * tables // world_size for r in range(world_size + 1)]
        self.counts = [high - low for low, high in pairwise(bounds)]
        self.own = range(bounds[rank], bounds[rank + 1])
        self.own_slice = slice(rank * local_batch, (rank + 1) * local_batch)
        self.tables = tables
        self.dim = dim
        self.rank = rank
        self.world_size = world_size
        self.sent_splits = [local_batch * len(self.own) * dim] * world_size
        self.received_splits = [local_batch * count * dim for count in self.counts]


class ShardedEmbeddings(nn.Module):
    """The tables this rank owns, and the exchange of their rows and gradients."""

    def __init__(self, table_rows: Sequence[int], sharding: TableSharding, seed: int) -> None:
        """Make this rank's tables; each is seeded by its own number, so it is the same whoever owns it."""
        super().__init__()
        self.sharding = sharding
        tables = [_init_table(table_rows[t], sharding.dim, seed, t) for t in sharding.own]
        # The tables of a rank lie under each other in one parameter: one lookup, one gradient.
        self.weight = nn.Parameter(torch.cat([torch.empty(0, sharding.dim), *tables]))
        first_rows = [sum(table_rows[sharding.own.start : t]) for t in sharding.own]
        self.register_buffer("first_rows", torch.tensor(first_rows, dtype=torch.int64))
        self._rows = [table_rows[t] for t in sharding.own]

    def row_slices(self) -> dict[int, slice]:
        """Return where in the parameter each own table lies, by the table's number."""
        ends = list(accumulate(self._rows))
        return {t: slice(end - rows, end) for t, rows, end in zip(self.sharding.own, self._rows, ends, strict=True)}

    def lookup(self, sparse: torch.Tensor) -> torch.Tensor:
        """Return the rows of the global batch in this rank's tables, shape (global batch, own tables, dim).

        The examples of a rank are contiguous in the batch, hence so are the rows that go to it.
        """
        own = sparse[:, self.sharding.own.start : self.sharding.own.stop] + cast("torch.Tensor", self.first_rows)
        return nn.functional.embedding(own, self.weight)

    def issue_exchange(self, rows: torch.Tensor) -> torch.Tensor:
        """Start sending every rank its rows and return the flat buffer that is being received.

        The Work is dropped on purpose: the registry keeps it, and the compiled region finds it by the buffer.
        """
        received = rows.new_empty(sum(self.sharding.received_splits))
        with hi.allow_inflight_collective_as_graph_input():
            dist.all_to_all_single(
                received,
                rows.detach().reshape(-1),
                self.sharding.received_splits,
                self.sharding.sent_splits,
                async_op=True,
            )
        return received

    def issue_gradients(self, gradient: torch.Tensor) -> tuple[torch.Tensor, dist.Work]:
        """Start sending the gradients of received rows back to the ranks that own them.

        Args:
            gradient: Gradient of the flat buffer of ``issue_exchange``.

        Returns:
            The flat gradient of this rank's ``lookup``, filled once the returned Work is waited for.
        """
        returned = gradient.new_empty(sum(self.sharding.sent_splits))
        work = dist.all_to_all_single(
            returned, gradient, self.sharding.sent_splits, self.sharding.received_splits, async_op=True
        )
        return returned, cast("dist.Work", work)


class OverArch(nn.Module):
    """Wait for the rows, let all vectors of an example interact, and give the logit. This part is compiled."""

    def __init__(self, sharding: TableSharding, hidden: Sequence[int]) -> None:
        """Make the interaction and the MLP above it."""
        super().__init__()
        self.splits = tuple(sharding.received_splits)
        self.counts = tuple(sharding.counts)
        self.dim = sharding.dim
        vectors = 1 + sharding.tables
        first, second = torch.triu_indices(vectors, vectors, offset=1)
        self.register_buffer("pairs", first * vectors + second)
        width = vectors * self.dim + first.numel()
        self.mlp = mlp((width, *hidden, 1))

    def forward(self, bottom: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
        """Return the logits of the local batch.

        Args:
            bottom: Output of the bottom MLP, shape (local batch, dim).
            received: Flat buffer of ``ShardedEmbeddings.issue_exchange``, still in flight.
        """
        parts = hi.wait_tensor(received).split(self.splits)
        owned = [part.view(-1, count, self.dim) for part, count in zip(parts, self.counts, strict=True) if count > 0]
        vectors = torch.cat([bottom.unsqueeze(1), *owned], dim=1)
        dots = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        dots = dots.index_select(1, cast("torch.Tensor", self.pairs))
        logits: torch.Tensor = self.mlp(torch.cat([vectors.flatten(1), dots], dim=1))
        return logits.squeeze(1)


class ShardedDLRM:
    """Bottom MLP, sharded tables and compiled over-arch, with the forward and backward of one global batch.

    Attributes:
        sharding: Who owns which tables.
        tables: The tables of this rank.
        bottom: MLP of the dense features; eager, it runs while the rows are in flight.
        over_arch: The part above, before compilation.
    """

    def __init__(
        self, dense_features: int, table_rows: Sequence[int], sharding: TableSharding, *, backend: str, seed: int
    ) -> None:
        """Make the model; ``backend`` is the ``torch.compile`` backend of the over-arch."""
        torch.manual_seed(seed)  # Every rank draws the same dense layers.
        self.bottom = mlp((dense_features, *BOTTOM_HIDDEN, sharding.dim))
        self.over_arch = OverArch(sharding, TOP_HIDDEN)
        self.tables = ShardedEmbeddings(table_rows, sharding, seed)
        self._compiled = torch.compile(self.over_arch, fullgraph=True, dynamic=False, backend=backend)
        self.sharding = sharding

    def dense_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that every rank holds a copy of."""
        return [*self.bottom.parameters(), *self.over_arch.parameters()]

    def predict(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        """Return the logits of this rank's slice, without gradients; arguments as in ``forward_backward``."""
        with torch.no_grad():
            received = self.tables.issue_exchange(self.tables.lookup(sparse))
            logits: torch.Tensor = self._compiled(self.bottom(dense), received)
        return logits

    def forward_backward(self, dense: torch.Tensor, sparse: torch.Tensor, late: torch.Tensor) -> torch.Tensor:
        """Leave the gradients of the global mean loss in ``.grad`` and return that loss.

        The autograd graph is cut where tensors cross ranks and at the compiled region's inputs, for each of the
        pieces to run its backward while the gradients of another are in flight.

        Args:
            dense: Dense features of this rank's slice of the global batch.
            sparse: Table rows of the whole global batch.
            late: Labels of this rank's slice.
        """
        rows = self.tables.lookup(sparse)
        received = self.tables.issue_exchange(rows).requires_grad_()
        bottom = self.bottom(dense)
        bottom_cut = bottom.detach().requires_grad_()
        loss = nn.functional.binary_cross_entropy_with_logits(self._compiled(bottom_cut, received), late)
        loss.backward()

        returned, returned_work = self.tables.issue_gradients(_gradient(received))
        bottom.backward(_gradient(bottom_cut))
        parameters = self.dense_parameters()
        # The loss rides along: one all_reduce a step for everything that is averaged.
        flat = torch.cat([*(_gradient(p).reshape(-1) for p in parameters), loss.detach().reshape(1)])
        flat_work = cast("dist.Work", dist.all_reduce(flat, async_op=True))

        returned_work.wait()
        rows.backward((returned / self.sharding.world_size).view_as(rows))
        flat_work.wait()
        flat /= self.sharding.world_size
        averaged = flat[:-1].split([p.numel() for p in parameters])
        for parameter, gradient in zip(parameters, averaged, strict=True):
            parameter.grad = gradient.view_as(parameter)
        return flat[-1]


def mlp(widths: Sequence[int]) -> nn.Sequential:
    """Return linear layers of the given widths with ReLU between them, none after the last."""
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _gradient(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor.grad``, which the backward before has set."""
    if tensor.grad is None:
        message = f"a gradient is expected for the tensor of shape {tuple(tensor.shape)}, found none: is it unused?"
        raise RuntimeError(message)
    return tensor.grad


def _init_table(rows: int, dim: int, seed: int, table: int) -> torch.Tensor:
    """Return a table of small normal values; row 0, the unknown value, starts at zero: it says nothing."""
    generator = torch.Generator().manual_seed(1000 * seed + table)
    values = torch.randn(rows, dim, generator=generator) * TABLE_INIT_STD
    values[0] = 0.0
    return values
