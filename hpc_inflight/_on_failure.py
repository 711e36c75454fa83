"""What is done once something has failed and before anybody is told: the flight recorder is written."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

_calls: list[Callable[[], object]] = []
_last: Hashable = None


def add(call: Callable[[], object]) -> None:
    """Have ``call``, which must not raise, run at every failure.

    **Local:** at import.
    """
    _calls.append(call)


def tell(what: Hashable = None) -> None:
    """Run what was added; whoever is about to raise, or to end the job, calls it.

    **Local:** any thread.

    Args:
        what: What has failed, where the same failure may be met again and again: it is told of once, as long as nothing
            else has failed meanwhile.
    """
    global _last  # noqa: PLW0603  # of the process
    if what is not None and what == _last:
        return
    _last = what
    for call in _calls:
        call()
