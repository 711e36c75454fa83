"""Drills: one rank of a job fails in every way that is known, and the job ends, says why, and leaves nobody behind."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hpc_inflight.testing.launch import run_ranks

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

PROGRAM = Path(__file__).parent / "programs" / "drill.py"
LATE = (
    r"hpc_inflight: rank 0: {op} \(seq \d+\) on group \w+ \(rank 0 of 2\): not complete after \d+\.\d s \(timeout 3 s\); "
    r"rank 1 has not issued it \(it is at seq \d+\), its main thread is at \S*drill\.py:\d+ in {where}"
)
# exit code (None: any but 0) and what stderr says
CASES = {
    "raises": (1, r"ValueError: boom(.|\n)*rank 1 of \d on \S+ ends the job: ValueError: boom"),
    "exits": (3, r"rank 1 of \d on \S+ ends the job: sys\.exit\(3\)"),
    "is killed": (None, r"signal 9|KILLED|Killed"),
    "is stuck in Python": (1, LATE.format(op="all_reduce", where="stuck_in_python")),
    "is stuck in another collective": (1, LATE.format(op="all_reduce", where="fail")),
    "differs in shape": (1, r"shape is \(4,\) on rank 0, \(9,\) on rank 1"),
    "differs in op": (1, r"op is SUM on rank 0, MAX on rank 1"),
    "is slow": (0, ""),
    "does not come to new_group": (1, r"CollectiveTimeout: new_group\(\[0, 1\]\): not every rank arrived within 3 s"),
}


WAITERS = ("main thread", "worker", "nobody")
GROUPS = {"world": 2, "subgroup": 3}  # and on how many ranks


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.timeout(900)
def test_a_rank_fails(case: str, record_property: Callable[[str, object], None]) -> None:
    def drill(waiter: str, group: str) -> str:
        started = time.monotonic()
        run = run_ranks(
            GROUPS[group],
            [str(PROGRAM), case, waiter, group],
            env={"HPC_INFLIGHT_DEBUG": "1" if "differs" in case else "0"},
            timeout_s=400,  # past it the job would be stuck, and nothing of it is left by run_ranks either
        )
        record_property(f"{waiter}, {group}: seconds", round(time.monotonic() - started, 1))
        return problem(case, run, GROUPS[group])

    with ThreadPoolExecutor(3) as pool:  # they mostly wait
        found = {(w, g): pool.submit(drill, w, g) for w in WAITERS for g in GROUPS}
    problems = {key: future.result() for key, future in found.items() if future.result()}
    assert not problems, "\n".join(f"{waiter} waits, {group}: {text}" for (waiter, group), text in problems.items())


def problem(case: str, run: subprocess.CompletedProcess[str], ranks: int) -> str:
    """Return what is wrong with how a job ended; empty if nothing is."""
    code, said = CASES[case]
    if (run.returncode == 0) if code is None else (run.returncode != code):
        return f"exit code {run.returncode}: {run.stderr}"
    if not re.search(said, run.stderr):
        return f"not said: {run.stderr}"
    if code == 0 and run.stdout.count("done") != ranks:
        return f"not all done: {run.stdout}"
    return ""
