"""Debug mode: before each collective the ranks compare what they are about to do, so that a mismatch is an error.

Without it a mismatch is what MPI makes of it: wrong numbers, a truncation error on some rank, or a hang.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from hpc_inflight.errors import CollectiveMismatch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mpi4py import MPI

    from hpc_inflight.communicators.base import Operation


class Checker:
    """Compares the collectives of one group over its ranks."""

    def __init__(self, comm: MPI.Intracomm, name: str) -> None:
        self._comm = comm.Dup()  # its own: the group's next call may be of another kind on another rank
        self._name = name
        self._seq = itertools.count(1)

    def before(self, run: Operation, call: str, facts: Mapping[str, Any]) -> Operation:
        """Return an operation that compares, then runs.

        Args:
            run: The collective.
            call: Its name.
            facts: What must be the same on all ranks. ``sends`` and ``receives`` are lists with a number of
                elements for each rank instead: what rank a sends to b, b must receive from a.

        The returned operation raises `CollectiveMismatch` on every rank when the ranks differ.
        """

        def compared() -> None:
            mine = {"call": call, "seq": next(self._seq), **{k: str(v) for k, v in facts.items() if k not in _PAIRED}}
            paired = {k: facts[k] for k in _PAIRED if k in facts}
            told = self._comm.allgather((mine, paired))
            problem = _difference([fact for fact, _ in told]) or _unmatched([pairs for _, pairs in told])
            if problem is not None:
                msg = (
                    f"group {self._name}: the ranks do not issue the same collective: {problem}; all ranks must issue "
                    "the same collectives in the same order"
                )
                raise CollectiveMismatch(msg)
            run()

        return compared

    def free(self) -> None:
        """Free the communicator."""
        self._comm.Free()


_PAIRED = ("sends", "receives")


def _difference(facts: list[dict[str, Any]]) -> str | None:
    names = list(dict.fromkeys(name for fact in facts for name in fact))
    lines = []
    for name in names:
        values: dict[str, list[int]] = {}
        for rank, fact in enumerate(facts):
            values.setdefault(str(fact.get(name, "none")), []).append(rank)
        if len(values) > 1:
            who = ", ".join(f"{value} on rank {', '.join(map(str, ranks))}" for value, ranks in values.items())
            lines.append(f"{name} is {who}")
    return "; ".join(lines) or None


def _unmatched(pairs: list[dict[str, list[int]]]) -> str | None:
    if not all(len(pair) == len(_PAIRED) for pair in pairs):
        return None
    for a, b in itertools.product(range(len(pairs)), repeat=2):
        sent, expected = pairs[a]["sends"][b], pairs[b]["receives"][a]
        if sent != expected:
            return f"rank {a} sends {sent} elements to rank {b}, which expects {expected}"
    return None
