"""Assertions that every rank makes together, so that a failure on one is a failure on all and hangs none."""

from __future__ import annotations

from typing import Any

from hpc_inflight._mpi import allgather


def gather_on_all_ranks(value: Any, timeout_s: float = 60.0) -> list[Any]:
    """Return every rank's value, in rank order.

    **Collective:** over the world, on a communicator of the package's own.

    Args:
        value: Anything that pickles.
        timeout_s: Seconds to wait for the other ranks.

    Raises:
        CollectiveTimeout: A rank did not come.
    """
    return allgather(value, timeout_s, "gather_on_all_ranks")


def assert_on_all_ranks(condition: object, message: str = "", timeout_s: float = 60.0) -> None:
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
