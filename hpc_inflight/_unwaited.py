"""Works that nobody waited for, counted by kind, and the one message that tells of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_KINDS = 64  # kept apart; a program that forgets waits for ever new shapes must not grow for that
_SHOWN = 8


@dataclass(frozen=True)
class Kind:
    """What the works that are counted together have in common.

    Attributes:
        op: Name of the operation.
        group: Name of the group; empty for a work of another package.
        shape: Shape of the registered tensor.
        dtype: Its dtype.
        call_site: Where it was issued, if that is recorded.
    """

    op: str
    group: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    call_site: str


class Tally:
    """How many works of each kind nobody waited for."""

    def __init__(self) -> None:
        self.total = 0
        self._kinds: dict[Kind, list[int]] = {}  # count, first and last sequence number

    def add(self, kind: Kind, seq: int) -> None:
        """Count one work."""
        self.total += 1
        seen = self._kinds.get(kind)
        if seen is not None:
            seen[0] += 1
            seen[1:] = min(seen[1], seq), max(seen[2], seq)  # they come in any order
        elif len(self._kinds) < _KINDS:
            self._kinds[kind] = [1, seq, seq]

    def copy(self) -> Tally:
        """Return one that counts on by itself."""
        copied = Tally()
        copied.total = self.total
        copied._kinds = {kind: list(seen) for kind, seen in self._kinds.items()}
        return copied

    def since(self, earlier: Tally) -> Tally:
        """Return what has come after ``earlier``, a copy of this one; without sequence numbers where it had some."""
        later = Tally()
        later.total = self.total - earlier.total
        for kind, (count, first, last) in self._kinds.items():
            before = earlier._kinds.get(kind)
            if before is None:
                later._kinds[kind] = [count, first, last]
            elif count > before[0]:
                later._kinds[kind] = [count - before[0], 0, 0]
        return later

    def text(self) -> str:
        """Return one message about all of them."""
        shown = sorted(self._kinds.items(), key=lambda item: -item[1][0])[:_SHOWN]
        parts = [_describe(kind, *seen) for kind, seen in shown]
        rest = self.total - sum(seen[0] for _, seen in shown)
        if rest:
            parts.append(f"{rest} of other kinds")
        hint = ""
        if any(not kind.call_site for kind, _ in shown):
            hint = "; set HPC_INFLIGHT_CALL_SITES=1 to see where they were issued"
        noun = "collective was" if self.total == 1 else "collectives were"
        return (
            f"{self.total} registered {noun} never waited for: {'; '.join(parts)}. Wait for each with wait_tensor() "
            f"or its work's wait(){hint}"
        )


def _describe(kind: Kind, count: int, first: int, last: int) -> str:
    group = f" on group {kind.group}" if kind.group else ""
    seq = f" (seq {first})" if first == last else f" (seq {first} to {last})"
    site = f", issued at {kind.call_site}" if kind.call_site else ""
    return f"{count} x {kind.op}{group}{seq if first else ''}, shape {kind.shape}, {kind.dtype}{site}"
