"""Drills: one rank of a job fails in every way that is known, and the job ends, says why, and leaves nobody behind."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hpc_inflight.testing.launch import run_ranks

if TYPE_CHECKING:
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


@pytest.mark.parametrize("group", ["world", "subgroup"])
@pytest.mark.parametrize("waiter", ["main thread", "worker", "nobody"])
@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.timeout(300)
def test_a_rank_fails(case: str, waiter: str, group: str, record_property: Callable[[str, object], None]) -> None:
    code, said = CASES[case]
    started = time.monotonic()
    run = run_ranks(
        2 if group == "world" else 3,
        [str(PROGRAM), case, waiter, group],
        env={"HPC_INFLIGHT_DEBUG": "1" if "differs" in case else "0"},
        timeout_s=240,  # past it the job would be stuck, and nothing of it is left by run_ranks either
    )
    record_property("seconds", round(time.monotonic() - started, 1))
    if code is None:
        assert run.returncode != 0
    else:
        assert run.returncode == code, run.stderr
    assert re.search(said, run.stderr), run.stderr
    if case == "is slow":
        assert run.stdout.count("done") == (2 if group == "world" else 3)
