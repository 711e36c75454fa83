"""Drills: one rank of a job fails in every way that is known, and the job ends, says why, and leaves nobody behind."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest

from tests.drills import Case, drills, late
from tests.gpu.test_drills import CASES as NCCL_CASES

if TYPE_CHECKING:
    from collections.abc import Callable

CASES = {
    "raises": Case(1, r"ValueError: boom(.|\n)*rank 1 of \d on \S+ ends the job: ValueError: boom", (1,)),
    "exits": Case(3, r"rank 1 of \d on \S+ ends the job: sys\.exit\(3\)", (1,)),
    "is killed": Case(None, r"(?i)signal 9|killed"),
    "is stuck in Python": late("stuck_in_python"),
    "is stuck in another collective": late("fail"),
    "differs in shape": Case(1, r"shape is \(4,\) on rank 0, \(9,\) on rank 1"),
    "differs in op": Case(1, r"op is SUM on rank 0, MAX on rank 1"),
    "is slow": Case(0, ""),
    "does not come to new_group": Case(
        1, r"CollectiveTimeout: new_group\(\[0, 1\]\): not every rank arrived within 3 s"
    ),
}
WAITERS = ("main thread", "worker", "nobody")
GROUPS = ("world", "subgroup")
ON_CPU = {"HPC_INFLIGHT_DRILL_DEVICE": "cpu", "HPC_INFLIGHT_DRILL_TIMEOUT_S": "3"}


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.timeout(900)
def test_a_rank_fails(case: str, record_property: Callable[[str, object], None]) -> None:
    env = ON_CPU | {"HPC_INFLIGHT_DEBUG": "1" if "differs" in case else "0"}
    jobs = [(case, waiter, group) for waiter in WAITERS for group in GROUPS]
    problems = drills(CASES, jobs, ranks=2, env=env, at_once=3, record=record_property)
    assert not problems, problems


# each case of tests/gpu once: what only the communicator does, and what only the device does, has its tests there
@pytest.mark.timeout(900)
def test_a_rank_fails_on_a_stand_in_for_nccl(record_property: Callable[[str, object], None]) -> None:
    variants = itertools.cycle([("main thread", "world"), ("caller", "subgroup"), ("nobody", "subgroup")])
    of_interest = [case for case in NCCL_CASES if case not in {"raises", "exits", "is killed"}]
    jobs = [(case, *variant) for case, variant in zip(of_interest, variants)]  # noqa: B905  # the other is endless
    env = ON_CPU | {"HPC_INFLIGHT_DRILL_DEVICE": "fake"}
    problems = drills(NCCL_CASES, jobs, ranks=2, env=env, at_once=3, record=record_property)
    env = ON_CPU | {"HPC_INFLIGHT_DRILL_DEVICE": "fake, blocking"}
    jobs = [("is stuck in Python", "caller", "world")]
    problems += drills(NCCL_CASES, jobs, ranks=2, env=env, at_once=1, record=record_property)
    assert not problems, problems
