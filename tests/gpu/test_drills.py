"""The drills of tests/subprocess on CUDA tensors: a rank that is missing leaves a kernel that waits for it on the GPU.

Jobs of their own, so this process must not be a rank: run it without a launcher. HPC_INFLIGHT_TEST_RANKS is how many
ranks a group has, 2 by default.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from tests.drills import Case, drills, late

if TYPE_CHECKING:
    from collections.abc import Callable

CASES = {
    "raises": Case(1, r"ValueError: boom(.|\n)*rank 1 of \d on \S+ ends the job: ValueError: boom", (1,)),
    "exits": Case(3, r"rank 1 of \d on \S+ ends the job: sys\.exit\(3\)", (1,)),
    "is killed": Case(None, r"(?i)signal 9|killed"),
    "is stuck in Python": late("stuck_in_python"),
    "is stuck in another collective": late("synchronize"),
    # NCCL compares nothing: both sides wait for data that the other does not send, and either may say so first
    "issues another operation": Case(
        1,
        r"hpc_inflight: rank [01]: (all_reduce|broadcast) \(seq (\d+)\) on group \w+ \(rank [01] of \d\): not complete "
        r"after \d+\.\d s \(timeout \d s\); rank [01] issued (?!\1)(all_reduce|broadcast) as seq \2, its main thread "
        r"is at \S*drill\.py:\d+ in (synchronize|stuck_in_python|<module>)",
        (0, 1),
    ),
    "is slow": Case(0, ""),
    "does not come to connect": Case(
        1, r"CollectiveTimeout: NCCL for group \w+: rank 1 did not come in time; all its ranks must issue", (0,)
    ),
}
WAITERS = ("main thread", "caller", "nobody")
GROUPS = ("world", "subgroup")
# ranks that share a GPU take turns on it, and so do the jobs: what is no failure must be far from the deadline
ENV = {"HPC_INFLIGHT_DRILL_DEVICE": "cuda", "HPC_INFLIGHT_DRILL_TIMEOUT_S": "8"}


@pytest.mark.parametrize("waiter", WAITERS)
@pytest.mark.timeout(1200)
def test_a_rank_fails(waiter: str, record_property: Callable[[str, object], None]) -> None:
    if "OMPI_COMM_WORLD_SIZE" in os.environ or "PMI_SIZE" in os.environ:
        pytest.skip("starts jobs of its own; run it without a launcher")
    ranks = int(os.environ.get("HPC_INFLIGHT_TEST_RANKS", "2"))
    jobs = [(case, waiter, group) for case in CASES for group in GROUPS]
    problems = drills(CASES, jobs, ranks=ranks, env=ENV, at_once=4, record=record_property)
    assert not problems, problems
