"""However a rank ends, the job ends with it: also where nobody waits for that rank, and beside a pending drain."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hpc_inflight import failure
from tests import mpis
from tests.drills import drill

if TYPE_CHECKING:
    from collections.abc import Callable

PROGRAM = Path(__file__).parent / "programs" / "ending.py"
# tracebacks have the rank and its host before each line
TRACEBACK = (
    r"\[rank 1 on \S+\] Traceback .*\n(.*\n)*\[rank 1 on \S+\] ValueError: boom\n"
    r"(.*\n)*?hpc_inflight: rank 1 of 3 on \S+ ends the job: ValueError: boom\n"
)
# exit code (None: any but 0, as a launcher has it) and what stderr says
CASES = {
    "raises": (1, TRACEBACK),
    "raises in a thread": (1, rf"\[rank 1 on \S+\] Exception in thread .*\n{TRACEBACK}"),
    "own hook": (1, r"\[rank 1 on \S+\] the program's own hook: ValueError\n(.*\n)*?hpc_inflight: rank 1 of 3 on"),
    "own hook set later": (1, r"the program's own hook: ValueError\n(.*\n)*?hpc_inflight: rank 1 of 3 on"),
    "sys.exit": (3, r"rank 1 of 3 on \S+ ends the job: sys\.exit\(3\)"),
    "SystemExit": (3, r"rank 1 of 3 on \S+ ends the job: sys\.exit\(3\)"),
    "exit with a text": (1, r"a text\n(.*\n)*?hpc_inflight: rank 1 of 3 on \S+ ends the job: sys\.exit\('a text'\)"),
    "SIGINT": (130, r"\[rank 1 on \S+\] KeyboardInterrupt\n(.*\n)*?hpc_inflight: rank 1 of 3 on \S+ ends the job"),
    # no Python code of the rank runs any more: what there is to say, the launcher says
    "os._exit": (None, ""),
    "SIGTERM": (None, r"(?i)signal 15|terminated"),
    "SIGKILL": (None, r"(?i)signal 9|killed"),
}
ELSEWHERE = ["raises in a thread", "SystemExit", "SIGKILL"]  # what an MPI may treat differently


@pytest.mark.parametrize("vendor", mpis.VENDORS)
@pytest.mark.timeout(900)
def test_the_job_ends(vendor: str, record_property: Callable[[str, object], None]) -> None:
    mpi = mpis.installed().get(vendor)
    if mpi is None:
        pytest.skip(mpis.missing(vendor))

    def problem(how: str) -> str:
        ended = drill(3, [str(PROGRAM), how], mpi.env)
        record_property(f"{how}: seconds", round(ended.seconds, 1))
        code, said = CASES[how]
        if (ended.code == 0) if code is None else (ended.code != code):
            return f"exit code {ended.code}: {ended.stderr}"
        if not re.search(said, ended.stderr + ended.stdout):  # MPICH's launcher speaks on stdout
            return f"not said: {ended.stderr}"
        if ended.seconds > 60:  # the others would wait for 600 s; how long it takes here is recorded
            return f"{ended.seconds} s"
        written = code is not None
        if ("flight_recorder_rank_1" in ended.dumps) != written:
            return f"dumps {ended.dumps}"
        return f"left: {ended.survivors}" if ended.survivors else ""

    cases = list(CASES) if vendor == next(iter(mpis.installed())) else ELSEWHERE
    with ThreadPoolExecutor(3) as pool:  # they mostly wait
        problems = {how: text for how, text in zip(cases, pool.map(problem, cases), strict=True) if text}
    assert not problems, "\n".join(f"{how}: {text}" for how, text in problems.items())


LIVES_ON = """
import sys, threading, types
import torch, torch.distributed as dist
sys.modules["ipykernel"] = types.ModuleType("stand_in")
import hpc_inflight as hi
hook, exit, code = threading.excepthook, sys.exit, vars(SystemExit)["code"]
world = hi.init(device="cpu")
assert (threading.excepthook, sys.exit, vars(SystemExit)["code"]) == (hook, exit, code)
def boom(): raise ValueError("boom")
thread = threading.Thread(target=boom)
thread.start()
thread.join()
dist.barrier()
hi.finalize()
sys.stdout.write(f"rank {world.rank} done\\n")
"""
FORGETFUL = """
import torch, torch.distributed as dist
import hpc_inflight as hi
hi.init(device="cpu")
group = dist.new_group([0, 1])
dist.all_reduce(torch.ones(2), group=group, async_op=True)
"""


def test_what_lives_on_after_an_exception_is_left_alone() -> None:
    assert failure._lives_on()  # pytest; and Jupyter:
    ended = drill(2, ["-c", LIVES_ON], {})
    assert ended.code == 0, ended
    assert ended.stdout.count(" done\n") == 2
    assert ended.stderr.count("ValueError: boom") == 2


def test_groups_that_are_never_destroyed_cost_at_most_a_line_per_rank() -> None:
    ended = drill(2, ["-c", FORGETFUL], {"HPC_INFLIGHT_EXIT_TIMEOUT_S": "100000"})  # an end that waits comes too late
    assert ended.code == 0, ended
    assert ended.stderr.count("\n") <= 2, ended
