"""The watchdog names the operation and the ranks that it is about, ends what hangs, and leaves alone what is only slow."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.drills import Case, drill, problem

PROGRAM = Path(__file__).parent / "programs" / "watched.py"
IS_LATE = r"hpc_inflight: rank [01]: {} \(seq {}\) on group \w+ \(rank [01] of \d\): not complete after \d+\.\d s"
CASES = {
    "a rank does not come": (
        3,
        Case(
            1,
            IS_LATE.format("all_reduce", 2)
            + r" \(timeout 2 s\); rank [01] has issued it, .*; rank 2 has not issued it",
        ),
    ),
    "a callback waits": (2, Case(1, IS_LATE.format("broadcast", 3))),
    "a callback hangs": (2, Case(1, IS_LATE.format("all_reduce", 2))),
    "two threads": (2, Case(1, IS_LATE.format("all_reduce", 2))),
    "a rank is late for a reduction": (3, Case(0, "done")),
    "a rank has ended beside a receive": (
        2,
        Case(1, r"all_reduce \(seq 2\) on group \w+ \(rank 0 of 2\): waits for rank 1, which ended"),
    ),
    "a program asks what failed": (2, Case(0, "asked: CollectiveMismatch")),
}


@pytest.mark.timeout(400)
def test_it_names_what_it_is_about_and_ends_nothing_else() -> None:
    def run(name: str) -> str:
        ranks, case = CASES[name]
        env = {"HPC_INFLIGHT_DEBUG": "1" if "failed" in name else "0"}
        return problem(case, drill(ranks, [str(PROGRAM), name], env), ranks)

    with ThreadPoolExecutor(3) as pool:
        found = dict(zip(CASES, pool.map(run, CASES), strict=True))
    assert not any(found.values()), found
