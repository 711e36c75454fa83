"""Start a program on several ranks and collect its output, for tests.

The launcher is that of the MPI library in use, which `hpc_inflight.launch_command` finds.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_inflight.errors import LaunchError
from hpc_inflight.launch_command import LOCAL_BASE, SESSION_BASES, plan
from hpc_inflight.launch_env import clean_env
from hpc_inflight.launch_plan import Launch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = [
    "Launch",
    "LaunchError",
    "RanksFailedError",
    "RanksTimeoutError",
    "clean_env",
    "plan",
    "run_plain",
    "run_ranks",
]

_TERM_GRACE_S = 5.0
_TAIL_CHARACTERS = 4000


class RanksTimeoutError(RuntimeError):
    """The job did not end in time and was stopped; `stdout` and `stderr` hold the output up to then."""

    def __init__(self, command: Sequence[str], timeout_s: float, stdout: str, stderr: str) -> None:
        super().__init__(f"not ended after {timeout_s} s: {list(command)}{_tails(stdout, stderr)}")
        self.stdout = stdout
        self.stderr = stderr


class RanksFailedError(subprocess.CalledProcessError):
    """The job ended with a non-zero code; `stdout` and `stderr` hold its output."""

    def __str__(self) -> str:
        return f"{super().__str__()}{_tails(self.stdout, self.stderr)}"


def run_ranks(
    n: int | None,
    argv: Sequence[str],
    *,
    timeout_s: float = 300,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    check: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run `python *argv` on n ranks of this machine and return its exit code and output.

    **Local:** the calling process starts the job and takes no part in it; it may be a rank of another one.

    The ranks are unbuffered, so that a killed one loses no output. `print` then writes a text and its newline one
    after the other, and another rank's may come between: whose lines a test reads, writes each with its newline
    in one `sys.stdout.write`.

    At the deadline the launcher gets SIGTERM (a killed mpirun leaves its ranks behind), and 5 s later
    everything in its session gets SIGKILL.

    Args:
        n: number of ranks; None or 0 starts plain python, without a launcher.
        argv: what follows the interpreter: a file or `-c`/`-m`, and its arguments. `-m mpi4py` in front makes
            an uncaught exception end the whole job.
        timeout_s: seconds until the job is stopped.
        env: added to the environment of this process, from which an outer launcher's variables are taken out.
        cwd: working directory of the ranks, this process's own by default.
        check: whether a non-zero exit code raises.

    Returns:
        The launcher's exit code (how it follows from the ranks' depends on the MPI) and all ranks' output.

    Raises:
        LaunchError: mpi4py finds no MPI library, or no launcher belongs to it.
        RanksTimeoutError: the deadline passed.
        RanksFailedError: the exit code is not 0 and `check` is set.
    """
    full_env = clean_env(os.environ)
    full_env |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | dict(env or {})
    command = [sys.executable, *argv]
    if n:
        launch = plan(n, full_env)
        full_env |= launch.env
        command = [*launch.argv, *command]
    with _session_base(full_env) if n else contextlib.nullcontext():
        code, out, err = _run(command, full_env, cwd, timeout_s)
    if check and code:
        raise RanksFailedError(code, command, output=out, stderr=err)
    return subprocess.CompletedProcess(command, code, out, err)


@contextlib.contextmanager
def _session_base(env: dict[str, str]) -> Iterator[None]:
    """Give mpirun a folder of its own: a killed one leaves one behind, in the way of a later one of its process id."""
    if any(env.get(name) for name in SESSION_BASES):
        yield
        return
    with tempfile.TemporaryDirectory(prefix="hpc_inflight.", ignore_cleanup_errors=True) as folder:
        env[LOCAL_BASE] = folder
        yield


def _run(
    command: list[str], env: Mapping[str, str], cwd: str | os.PathLike[str] | None, timeout_s: float
) -> tuple[int, str, str]:
    # A session of its own: a signal for the terminal's job misses it, and all that it started can be found.
    with subprocess.Popen(
        command,
        env=env,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            out, err = _stop(process)
            raise RanksTimeoutError(command, timeout_s, out, err) from None
        except BaseException:
            _stop(process)
            raise
    return process.returncode, out, err


def run_plain(
    argv: Sequence[str],
    *,
    timeout_s: float = 300,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    check: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run `python *argv` without a launcher, as `run_ranks` does otherwise.

    **Local:** as `run_ranks`.

    Args:
        argv: what follows the interpreter.
        timeout_s: seconds until the process is stopped.
        env: added to the environment of this process, from which an outer launcher's variables are taken out.
        cwd: working directory, this process's own by default.
        check: whether a non-zero exit code raises.

    Returns:
        The exit code and output.

    Raises:
        RanksTimeoutError: the deadline passed.
        RanksFailedError: the exit code is not 0 and `check` is set.
    """
    return run_ranks(None, argv, timeout_s=timeout_s, env=env, cwd=cwd, check=check)


def _stop(process: subprocess.Popen[str]) -> tuple[str, str]:
    """End the launcher, then whatever is left of its session, and return all output."""
    process.terminate()
    try:
        return process.communicate(timeout=_TERM_GRACE_S)
    except subprocess.TimeoutExpired:
        while pids := _session(process.pid):  # again: one may have started another after it was looked for
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):  # ended by itself, or with its launcher
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
    return process.communicate()


def _session(session_id: int) -> list[int]:
    """Return the processes of a session that run; killpg would miss the ranks, which have groups of their own."""
    members = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # pid (name) state ppid pgrp session ...; the name may hold spaces and parentheses.
            fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue  # ended meanwhile
        if int(fields[3]) == session_id and fields[0] not in {"Z", "X"}:
            members.append(int(entry.name))
    return members


def _tails(stdout: str, stderr: str) -> str:
    parts = []
    for name, text in (("stdout", stdout), ("stderr", stderr)):
        if text:
            cut = "[...]" if len(text) > _TAIL_CHARACTERS else ""
            parts.append(f"\n--- {name} ---\n{cut}{text[-_TAIL_CHARACTERS:].rstrip()}")
    return "".join(parts)
