"""Run a whole job in which a rank fails, and look at how it ended and what it left behind."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import tempfile
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from hpc_inflight.testing.launch import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

_NAME = "HPC_INFLIGHT_DRILL"  # every process of a job inherits it, whatever sessions and groups launchers make
MARK = "HPC_INFLIGHT_DRILL_MARK"  # the rank that fails touches this file just before
_GONE_S = 20.0  # for what has been told to end to be gone


@dataclass(frozen=True)
class Ended:
    """How a job ended.

    Attributes:
        code: The launcher's exit code.
        stdout: Of all ranks.
        stderr: Of all ranks and the launcher.
        seconds: From the failure to the end of the job; from its start if no rank has said that it fails.
        survivors: What was still running after that, as command lines.
        dumps: Names of the flight recorders that were written.
    """

    code: int
    stdout: str
    stderr: str
    seconds: float
    survivors: tuple[str, ...]
    dumps: tuple[str, ...]


class Run(Protocol):
    """A program that has ended."""

    returncode: int
    stdout: str
    stderr: str


def drill(ranks: int, argv: Sequence[str], env: Mapping[str, str]) -> Ended:
    """Run ``python *argv`` on some ranks until the job ends, and end what it left behind.

    Raises:
        RanksTimeoutError: The job did not end.
    """
    return observe(lambda more: run_ranks(ranks, argv, env={**more, **env}, timeout_s=400))  # past it it would be stuck


def observe(run: Callable[[Mapping[str, str]], Run]) -> Ended:
    """Call what runs a job with these variables, and end what it left behind."""
    name = uuid.uuid4().hex
    with tempfile.TemporaryDirectory() as directory:
        mark, dumps = Path(directory, "mark"), Path(directory, "dumps")
        started = time.time()
        ended = run({_NAME: name, MARK: str(mark), "HPC_INFLIGHT_DUMP_DIR": str(dumps)})
        failed = mark.stat().st_mtime if mark.exists() else started
        seconds = time.time() - failed
        left = _survivors(name)
        return Ended(
            ended.returncode,
            ended.stdout,
            ended.stderr,
            seconds,
            left,
            tuple(sorted(file.name for file in dumps.glob("*"))),
        )


def _survivors(name: str) -> tuple[str, ...]:
    deadline = time.monotonic() + _GONE_S
    while (found := _running(name)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return tuple(found.values())


def _running(name: str) -> dict[int, str]:
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # ended meanwhile, or not ours
                if f"{_NAME}={name}".encode() in (entry / "environ").read_bytes():
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


PROGRAM = Path(__file__).parent / "subprocess" / "programs" / "drill.py"


@dataclass(frozen=True)
class Case:
    """What a job must end with.

    Attributes:
        code: The exit code; None for any but 0, as a launcher has it for a rank that a signal ended.
        said: Pattern of what stderr, or the launcher on stdout, says.
        dumped: Ranks that write their flight recorder. Others may.
    """

    code: int | None
    said: str
    dumped: tuple[int, ...] = ()


def late(where: str, found: str = r"has not issued it \(it is at seq \d+\)") -> Case:
    """Return a case that the watchdog ends, where every rank can say where it is."""
    said = (
        r"hpc_inflight: rank 0: all_reduce \(seq \d+\) on group \w+ \(rank 0 of \d\): not complete after \d+\.\d s "
        rf"\(timeout \d s\); rank 1 {found}, its main thread is at \S*drill\.py:\d+ in {where}"
    )
    return Case(1, said, (0, 1))


def drills(
    cases: Mapping[str, Case],
    jobs: Iterable[tuple[str, str, str]],
    *,
    ranks: int,
    env: Mapping[str, str],
    at_once: int,
    record: Callable[[str, object], None],
) -> str:
    """Run drill.py for jobs of (case, who waits, group) and return what was wrong with how they ended.

    Args:
        cases: By name.
        jobs: Which to run.
        ranks: Of the group; a subgroup has one rank more around it.
        env: What drill.py reads.
        at_once: How many jobs run at the same time: they mostly wait.
        record: Takes the seconds from the failure to the end of each job.
    """

    def run(job: tuple[str, str, str]) -> str:
        name, waiter, group = job
        case, size = cases[name], ranks + (group == "subgroup")
        ended = drill(size, [str(PROGRAM), name, waiter, group], env)
        record(f"{name}, {waiter} waits, {group}: seconds", round(ended.seconds, 1))
        return problem(case, ended, size)

    jobs = list(jobs)
    with ThreadPoolExecutor(at_once) as pool:
        problems = zip(jobs, pool.map(run, jobs), strict=True)
        return "\n".join(f"{name}, {waiter} waits, {group}: {text}" for (name, waiter, group), text in problems if text)


def problem(case: Case, ended: Ended, size: int) -> str:
    """Return what was wrong with how a job of so many ranks ended; empty if nothing was."""
    if (ended.code == 0) if case.code is None else (ended.code != case.code):
        return f"exit code {ended.code}: {ended}"
    if not re.search(case.said, ended.stderr + ended.stdout):
        return f"not said: {ended}"
    if case.code == 0 and ended.stdout.count("done") != size:
        return f"not all done: {ended}"
    if missing := [rank for rank in case.dumped if f"flight_recorder_rank_{rank}" not in ended.dumps]:
        return f"no flight recorder of ranks {missing}: {ended}"
    return f"left behind: {ended.survivors}" if ended.survivors else ""
