"""However a rank ends, its step ends on all nodes, as `tests/subprocess/test_endings.py` has it for other launchers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from tests.drills import observe

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.mpis import MPI
    from tests.slurm.conftest import Site

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "tests" / "subprocess" / "programs" / "ending.py"
RUN_SH = str(ROOT / "launch" / "run.sh")
ENDS_THE_JOB = r"hpc_inflight: rank 1 of 3 on n\d ends the job: "
# what srun returns of the ranks that it has to kill; with pmi2 that hides the code of the one that failed
KILLED = 137
CASES = {
    "raises": (1, r"\[rank 1 on n\d\] ValueError: boom\n(.*\n)*?" + ENDS_THE_JOB),
    "raises in a thread": (1, ENDS_THE_JOB + "ValueError: boom"),
    "sys.exit": (3, ENDS_THE_JOB + r"sys\.exit\(3\)"),
    "SIGTERM": (None, "Terminated"),
    "SIGKILL": (None, "Killed"),
}


def test_the_step_ends(site: Site, mpi: MPI, record_property: Callable[[str, object], None]) -> None:
    def problem(how: str) -> str:
        ended = observe(
            lambda env: site.run(
                *("salloc", "--quiet", "--nodes=2", "--ntasks=3", RUN_SH, "python", str(PROGRAM), how),
                env=mpi.env | dict(env),
            )
        )
        record_property(f"{how}: seconds", round(ended.seconds, 1))
        code, said = CASES[how]
        if mpi.kind == "pmi2" and code is not None:
            code = KILLED
        if ended.code == 0 if code is None else ended.code != code:
            return f"exit code {ended.code}: {ended.stderr}"
        if not re.search(said, ended.stderr):
            return f"not said: {ended.stderr}"
        if code is not None and "flight_recorder_rank_1" not in ended.dumps:
            return f"dumps {ended.dumps}"
        return f"left: {ended.survivors}" if ended.survivors else ""

    problems = {how: text for how in CASES if (text := problem(how))}
    assert not problems, "\n".join(f"{how}: {text}" for how, text in problems.items())
    assert site.left_over() == ""
