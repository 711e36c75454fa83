"""A DLRM-style model whose embedding tables are split over the ranks.

Each rank owns whole tables (table-wise sharding). It looks up the rows of the *global* batch in its own tables and an
all_to_all brings every rank the rows of its slice of the batch from all tables. Eager code issues that exchange; the
compiled over-arch waits for it. The gradients of the rows travel back while the bottom MLP runs its backward
(`hpc_inflight.PooledEmbeddingsAllToAll` does both). The dense layers are the same on every rank and their gradients
are averaged, while the tables' are computed.
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
    """Which rank owns which tables.

    Contiguous runs of tables, so that rows received in rank order are in table order for any number of ranks. A
    rank owns none when there are more ranks than tables.

    Attributes:
        counts: Number of tables of each rank.
        own: The tables of this rank.
        own_slice: The part of the global batch that is this rank's.
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
        self.local_batch = local_batch


class ShardedEmbeddings(nn.Module):
    """The tables this rank owns, and the exchange of their rows and gradients."""

    def __init__(
        self, table_rows: Sequence[int], sharding: TableSharding, seed: int, device: torch.device | None = None
    ) -> None:
        """Make this rank's tables; each is seeded by its own number, so it is the same whoever owns it."""
        super().__init__()
        self.sharding = sharding
        tables = [_init_table(table_rows[t], sharding.dim, seed, t) for t in sharding.own]
        # The tables of a rank lie under each other in one parameter: one lookup, one gradient.
        self.weight = nn.Parameter(torch.cat([torch.empty(0, sharding.dim), *tables]).to(device))
        first_rows = [sum(table_rows[sharding.own.start : t]) for t in sharding.own]
        self.register_buffer("first_rows", torch.tensor(first_rows, dtype=torch.int64, device=device))
        self._rows = [table_rows[t] for t in sharding.own]
        # The tables of a rank travel as one feature, which needs no copy.
        columns = [count * sharding.dim for count in sharding.counts]
        self._all_to_all = hi.PooledEmbeddingsAllToAll(columns, range(sharding.world_size), device=self.weight.device)

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

    def issue_exchange(self, rows: torch.Tensor) -> hi.PooledEmbeddingsAwaitable:
        """Start sending every rank its rows; the compiled region waits for those of this rank's slice."""
        return self._all_to_all([rows.flatten(1)], [self.sharding.local_batch] * self.sharding.world_size)


class OverArch(nn.Module):
    """Wait for the rows, let all vectors of an example interact, and give the logit. This part is compiled."""

    def __init__(self, sharding: TableSharding, hidden: Sequence[int]) -> None:
        """Make the interaction and the MLP above it."""
        super().__init__()
        self.counts = tuple(sharding.counts)
        self.dim = sharding.dim
        vectors = 1 + sharding.tables
        first, second = torch.triu_indices(vectors, vectors, offset=1)
        self.register_buffer("pairs", first * vectors + second)
        width = vectors * self.dim + first.numel()
        self.mlp = mlp((width, *hidden, 1))

    def forward(self, bottom: torch.Tensor, rows: hi.PooledEmbeddingsAwaitable) -> torch.Tensor:
        """Return the logits of the local batch.

        Args:
            bottom: Output of the bottom MLP, shape (local batch, dim).
            rows: What ``ShardedEmbeddings.issue_exchange`` returned, still in flight.
        """
        parts = zip(rows.wait(), self.counts, strict=True)
        owned = [part.unflatten(1, (count, self.dim)) for part, count in parts if count > 0]
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
        self,
        dense_features: int,
        table_rows: Sequence[int],
        sharding: TableSharding,
        *,
        backend: str,
        seed: int,
        device: torch.device | None = None,
    ) -> None:
        """Make the model; ``backend`` is the ``torch.compile`` backend of the over-arch.

        The weights are drawn on the CPU, so that they are the same on any ``device``.
        """
        torch.manual_seed(seed)  # Every rank draws the same dense layers.
        self.bottom = mlp((dense_features, *BOTTOM_HIDDEN, sharding.dim)).to(device)
        self.over_arch = OverArch(sharding, TOP_HIDDEN).to(device)
        self.tables = ShardedEmbeddings(table_rows, sharding, seed, device)
        self._compiled = torch.compile(self.over_arch, fullgraph=True, dynamic=False, backend=backend)
        self.sharding = sharding

    def dense_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that every rank holds a copy of."""
        return [*self.bottom.parameters(), *self.over_arch.parameters()]

    def predict(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        """Return the logits of this rank's slice, without gradients; arguments as in ``forward_backward``."""
        with torch.no_grad():
            rows = self.tables.issue_exchange(self.tables.lookup(sparse))
            logits: torch.Tensor = self._compiled(self.bottom(dense), rows)
        return logits

    def forward_backward(self, dense: torch.Tensor, sparse: torch.Tensor, late: torch.Tensor) -> torch.Tensor:
        """Leave the gradients of the global mean loss in ``.grad`` and return that loss.

        Args:
            dense: Dense features of this rank's slice of the global batch.
            sparse: Table rows of the whole global batch.
            late: Labels of this rank's slice.
        """
        rows = self.tables.issue_exchange(self.tables.lookup(sparse))
        logits = self._compiled(self.bottom(dense), rows)
        # Gradients are summed over the ranks, so each rank's share of the global mean is what is differentiated.
        loss = nn.functional.binary_cross_entropy_with_logits(logits, late) / self.sharding.world_size
        total = GradientSum(self.dense_parameters(), loss)
        loss.backward()
        return total.wait()


class GradientSum:
    """Sums the gradients of parameters over the ranks, in one all_reduce issued when the last of them is there.

    That is within the backward, so the backward of what has no such parameter, the tables, runs meanwhile.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], loss: torch.Tensor) -> None:
        """Wait for a gradient of each of ``parameters``; the sum of ``loss`` over the ranks rides along."""
        self._parameters = list(parameters)
        self._loss = loss.detach()
        self._missing = len(self._parameters)
        self._hooks = [p.register_post_accumulate_grad_hook(self._ready) for p in self._parameters]
        self._flat = self._loss
        self._work: dist.Work | None = None

    def _ready(self, _parameter: torch.Tensor) -> None:
        self._missing -= 1
        if self._missing == 0:
            gradients = [p.grad.reshape(-1) for p in self._parameters if p.grad is not None]
            self._flat = torch.cat([*gradients, self._loss.reshape(1)])
            self._work = dist.all_reduce(self._flat, async_op=True)

    def wait(self) -> torch.Tensor:
        """Leave the sums in ``.grad``, and return that of the losses."""
        for hook in self._hooks:
            hook.remove()
        if self._work is None:
            message = f"a gradient is expected for every parameter, {self._missing} have none: are they unused?"
            raise RuntimeError(message)
        self._work.wait()
        sums = self._flat[:-1].split([p.numel() for p in self._parameters])
        for parameter, gradient in zip(self._parameters, sums, strict=True):
            parameter.grad = gradient.view_as(parameter)
        return self._flat[-1]


def mlp(widths: Sequence[int]) -> nn.Sequential:
    """Return linear layers of the given widths with ReLU between them, none after the last."""
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _init_table(rows: int, dim: int, seed: int, table: int) -> torch.Tensor:
    """Return a table of small normal values; row 0, the unknown value, starts at zero: it says nothing."""
    generator = torch.Generator().manual_seed(1000 * seed + table)
    values = torch.randn(rows, dim, generator=generator) * TABLE_INIT_STD
    values[0] = 0.0
    return values
