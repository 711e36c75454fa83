"""Run a whole job in which a rank fails, and look at how it ended and what it left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_inflight.testing.launch import run_ranks

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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


def drill(ranks: int, argv: Sequence[str], env: Mapping[str, str]) -> Ended:
    """Run ``python *argv`` on some ranks until the job ends, and end what it left behind.

    Raises:
        RanksTimeoutError: The job did not end.
    """
    name = uuid.uuid4().hex
    with tempfile.TemporaryDirectory() as directory:
        mark, dumps = Path(directory, "mark"), Path(directory, "dumps")
        started = time.time()
        run = run_ranks(
            ranks,
            argv,
            env={_NAME: name, MARK: str(mark), "HPC_INFLIGHT_DUMP_DIR": str(dumps), **env},
            timeout_s=400,  # past it the job would be stuck
        )
        failed = mark.stat().st_mtime if mark.exists() else started
        seconds = time.time() - failed
        left = _survivors(name)
        return Ended(
            run.returncode,
            run.stdout,
            run.stderr,
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
