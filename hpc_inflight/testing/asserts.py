"""Assertions that every rank makes together, so that a failure on one is a failure on all and hangs none."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from hpc_inflight._mpi_agree import allgather

if TYPE_CHECKING:
    from collections.abc import Callable


def gather_on_all_ranks(value: Any, timeout_s: float = 600.0) -> list[Any]:
    """Return every rank's value, in rank order.

    **Collective:** over the world, on a communicator of the package's own.

    Args:
        value: Anything that pickles.
        timeout_s: Seconds to wait for the other ranks.

    Raises:
        CollectiveTimeout: A rank did not come.
    """
    return allgather(value, timeout_s, "gather_on_all_ranks")


def assert_on_all_ranks(condition: object, message: str = "", timeout_s: float = 600.0) -> None:
    """Assert a condition on every rank; if it is false on any, fail on all and name those.

    **Collective:** over the world; a rank that fails an ordinary ``assert`` before it leaves the others waiting.

    Args:
        condition: Anything with a truth value.
        message: What was found here; each failing rank's own is shown on all ranks.
        timeout_s: Seconds to wait for the other ranks.

    Raises:
        AssertionError: The condition was false on at least one rank.
        CollectiveTimeout: A rank did not come.
    """
    told = gather_on_all_ranks(None if condition else (message or "condition is false"), timeout_s)
    failed = {rank: text for rank, text in enumerate(told) if text is not None}
    if failed:
        lines = "".join(f"\n  rank {rank}: {text}" for rank, text in failed.items())
        raise AssertionError(f"failed on {len(failed)} of {len(told)} ranks:{lines}")


def wait_until(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    """Return as soon as a condition holds, and fail when it does not in time.

    **Local:** looks about every millisecond; for what another thread or process does at its own pace, where a sleep
    would be too short on some machine.

    Args:
        condition: Called without arguments, from this thread.
        timeout_s: Seconds.

    Raises:
        AssertionError: It was still false then.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"wait_until: still false after {timeout_s:g} s")
        time.sleep(1e-3)
