"""Waiting with a deadline for what can only be asked about, as MPI's requests and CUDA's events."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_SPIN_S = 50e-6  # a reply on the same node arrives within this
_SLEEP_MIN_S, _SLEEP_MAX_S = 20e-6, 1e-3


def poll(done: Callable[[], bool], timeout_s: float) -> bool:
    """Call ``done`` until it is true: spinning at first, then sleeping up to a millisecond between calls.

    **Local:** used in place of a blocking MPI wait where there is a deadline.

    Args:
        done: Cheap test without side effects on the result, such as ``request.Test``.
        timeout_s: Seconds; ``float("inf")`` waits without limit.

    Returns:
        False when the deadline passed first.
    """
    if done():
        return True
    now = time.monotonic()
    spin_until, deadline = now + _SPIN_S, now + timeout_s
    pause = _SLEEP_MIN_S
    while not done():
        now = time.monotonic()
        if now >= deadline:
            return False
        if now >= spin_until:
            time.sleep(pause)
            pause = min(pause * 1.5, _SLEEP_MAX_S)
    return True
