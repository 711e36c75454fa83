"""What a program is told about collectives that it forgot to wait for, and about waits that found nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from hpc_inflight.testing.launch import run_plain, run_ranks

if TYPE_CHECKING:
    from pathlib import Path

START = """
import os, signal, sys, threading, time, warnings
import torch, torch.distributed as dist
import hpc_inflight as hi
from hpc_inflight import work_registry
def issue(tensor):
    return dist.all_reduce(tensor, async_op=True)
allow = hi.allow_inflight_collective_as_graph_input
"""
FORGET = """
kept = torch.ones(4)
with allow():
    for _ in range(3):
        issue(kept)
    for _ in range(5):
        issue(torch.ones(7))
"""


def lines(text: str, part: str) -> list[str]:
    return [line for line in text.splitlines() if part in line]


@pytest.mark.parametrize("finalized", [True, False], ids=["finalize", "exit"])
def test_each_rank_reports_once_and_ends_well(finalized: bool) -> None:
    program = START + "hi.init(device='cpu')\nwarnings.simplefilter('ignore')\n" + FORGET
    if finalized:
        program += "warnings.simplefilter('always')\nhi.finalize()\n"
    run = run_ranks(2, ["-c", program], env={"HPC_INFLIGHT_CALL_SITES": "1"})
    assert run.returncode == 0, run.stderr
    for rank in range(2):
        (line,) = lines(run.stderr, f"rank {rank} of 2: 8 registered collectives were never waited for")
        assert (
            "5 x all_reduce on group 0 (seq 4 to 8), shape (7,), torch.float32, issued at <string>:7 in issue" in line
        )
        assert "3 x all_reduce on group 0 (seq 1 to 3), shape (4,), torch.float32, issued at" in line
    assert "unwaited collective calls" not in run.stderr  # torch's own message would say it once more


@pytest.mark.parametrize(
    ("by", "policy"), [("init", "warn"), ("init", "raise"), ("init", "ignore"), ("environment", "raise")]
)
def test_policies(by: str, policy: str) -> None:
    end = """
try:
    hi.finalize()
except hi.UnwaitedError as error:
    sys.stdout.write(f"raised {error}")
sys.stdout.write(f" ended: {not dist.is_initialized()}")
"""
    argument = f", on_unwaited={policy!r}" if by == "init" else ""
    env = {"HPC_INFLIGHT_ON_UNWAITED": policy if by == "environment" else "warn"}
    program = f"{START}hi.init(device='cpu'{argument})\nkept = torch.ones(4)\nwith allow():\n    issue(kept)\n{end}"
    run = run_plain(["-c", program], env=env, check=True)
    text = "1 registered collective was never waited for: 1 x all_reduce on group 0 (seq 1), shape (4,), torch.float32"
    assert (text in run.stdout) == (policy == "raise"), run.stdout
    assert (text in run.stderr) == (policy == "warn"), run.stderr
    assert "ended: True" in run.stdout
    assert "HPC_INFLIGHT_CALL_SITES=1" in run.stdout + run.stderr or policy == "ignore"


def test_nothing_is_said_when_all_were_waited_or_issued_outside() -> None:
    program = START + (
        "hi.init(device='cpu')\n"
        "with allow():\n"
        "    for n in range(20):\n"
        "        x = torch.ones(n); w = issue(x); y = torch.ones(n); issue(y)\n"
        "        w.wait(); hi.wait_tensor(y)\n"
        "issue(torch.ones(4))\n"
    )
    again = program.removeprefix(START)  # the first world ends by finalize, the second by the end of the program
    run = run_ranks(2, ["-c", f"{program}hi.finalize()\n{again}"], check=True)
    assert "never waited" not in run.stderr
    assert "unwaited" not in run.stderr


def test_a_second_world_tells_only_of_its_own() -> None:
    program = (
        START
        + """
for count in (2, 3):
    hi.init(device='cpu')
    warnings.simplefilter('ignore')  # a context may tell of those that are lost already
    with allow():
        for _ in range(count):
            issue(torch.ones(4))
    warnings.simplefilter('always')
    hi.finalize()
"""
    )
    run = run_plain(["-c", program], check=True)
    told = lines(run.stderr, "never waited for")
    assert len(told) == 2
    assert "2 registered collectives were" in told[0]
    assert "3 registered collectives were" in told[1]


def test_a_wrong_policy_is_refused_on_every_rank() -> None:
    run = run_ranks(2, ["-c", f"{START}hi.init(on_unwaited='shout')"])
    assert run.returncode != 0
    assert "on_unwaited: expected one of 'warn', 'raise', 'ignore', found 'shout'" in run.stderr
    run = run_plain(["-c", f"{START}hi.init()"], env={"HPC_INFLIGHT_DUMP_SIGNAL": "KILL"})
    assert run.returncode != 0
    assert "HPC_INFLIGHT_DUMP_SIGNAL: expected a signal such as USR2" in run.stderr


STRICT = """
hi.init(device="cpu")
def region(tensor):
    return torch.ops._c10d_functional.wait_tensor(tensor) + 1
compiled = torch.compile(region, backend=os.environ["MODE"], fullgraph=True)
x = torch.ones(4)
with allow():
    issue(x)
    issue(x)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    compiled(x.clone())          # missed: another storage
    compiled(x.clone())          # missed, and counted
    compiled(x[1:])              # found
    with allow():
        issue(x)
    hi.wait_tensor(x.detach())   # found
    hi.wait_tensor(x)            # waited before: counted, too
    y = torch.distributed._functional_collectives.all_reduce(x, "sum", dist.group.WORLD)
    y + 1                        # a functional collective's own wait is found
told = [str(w.message) for w in caught if w.category is hi.MissedWaitWarning]
sys.stdout.write(f"missed {work_registry.counts().missed} told {len(told)}: {told[0]}")
hi.finalize()
"""


@pytest.mark.parametrize("mode", ["eager", "aot_eager", "inductor"])
def test_strict_mode_counts_waits_that_found_nothing(mode: str) -> None:
    run = run_plain(["-c", START + STRICT], env={"HPC_INFLIGHT_STRICT": "1", "MODE": mode}, check=True)
    assert "missed 3 told 1:" in run.stdout, run.stdout
    assert "tensor of shape (4,), torch.float32 on cpu, waited for at <string>:" in run.stdout
    assert "the nearest in flight, of the same shape and dtype, is all_reduce (seq 2) on group 0" in run.stdout
    assert "issued at <string>:7 in issue" in run.stdout


DUMP = """
world = hi.init(device="cpu")
x = torch.ones(4)
with allow():
    if world.rank == 0:
        issue(x)
        issue(torch.ones(2))
        # comes while the main thread is blocked below: no Python handler runs there
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGUSR2)).start()
    else:
        time.sleep(3)
        issue(x)
        issue(torch.ones(2))
dist.barrier()
hi.wait_tensor(x)
hi.finalize()
"""


def test_a_signal_prints_what_is_in_flight_while_the_rank_is_blocked(tmp_path: Path) -> None:
    env = {"HPC_INFLIGHT_DUMP_SIGNAL": "USR2", "HPC_INFLIGHT_ON_UNWAITED": "ignore"}
    env["HPC_INFLIGHT_DUMP_DIR"] = str(tmp_path)
    run = run_ranks(2, ["-c", START + DUMP], env=env, check=True)
    for line in (
        "rank 0 of 2: pending on group 0 (rank 0 of 2): all_reduce (seq 1), ",
        "rank 0 of 2: pending on group 0 (rank 0 of 2): all_reduce (seq 2), ",
        "rank 0 of 2: un-waited: all_reduce (seq 1) on group 0, shape (4,), torch.float32, ",
    ):
        assert len(lines(run.stderr, line)) == 1, run.stderr
    assert "rank 1 of 2" not in run.stderr
