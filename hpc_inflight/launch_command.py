"""Find the command that starts N ranks here: srun in a Slurm allocation, else mpirun or mpiexec.hydra."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_inflight.errors import LaunchError
from hpc_inflight.launch_env import Allocation, allocation
from hpc_inflight.launch_find import find_launcher, find_mpi, last_line, run, usable_cores
from hpc_inflight.launch_plan import SRUN_MPI, Launch, Wanted, mpirun_launch, shape, srun_launch

if TYPE_CHECKING:
    from collections.abc import Mapping

# Where mpirun of Open MPI 5 makes the folder of its job, if not in the temporary folder: on its own node, or on all.
# It takes one of the two only.
LOCAL_BASE = "PRTE_MCA_prte_local_tmpdir_base"
SESSION_BASES = (LOCAL_BASE, "PRTE_MCA_prte_tmpdir_base")

# Run once on every node of a larger job, without MPI: a node that lacks the environment would otherwise be found out
# by a traceback among those of the ranks that it takes down.
_NODE_CHECK = """
import importlib.util, os, sys
missing = [m for m in ("mpi4py", "hpc_inflight") if importlib.util.find_spec(m) is None]
if missing:
    os.write(2, f"{os.uname().nodename} has no {' and no '.join(missing)} for {sys.executable}\\n".encode())
    sys.exit(1)
"""


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
    return mpirun_launch(Wanted(n), None, find_launcher(environ), environ, cores=usable_cores(), root=os.geteuid() == 0)


def plan_here(wanted: Wanted, environ: Mapping[str, str], pid: int | None = None) -> Launch:
    """Find how the ranks are started with what there is: Slurm's srun in a job, else the MPI library's launcher.

    **Local:** starts short processes; MPI is not initialised.

    Args:
        wanted: what the user asks for.
        environ: the job's environment.
        pid: the process id that the launcher will have, None where it is not known or nothing is started.

    Returns:
        The command, the variables to add and to take out, and notes.

    Raises:
        LaunchError: nothing can be started; the message says why.
    """
    job = allocation(environ)
    if job is None or shutil.which("srun", path=environ.get("PATH")) is None:
        notes = [] if job is None else ["in a Slurm job, but without srun: this node only"]
        return _without_srun(wanted, None, environ, pid, cores=usable_cores(), notes=notes)
    vendor, _, _ = find_mpi(environ)
    launch = srun_launch(wanted, job, vendor, environ)
    listed = _ask("srun", "--mpi=list")
    if SRUN_MPI[vendor] not in re.findall(r"\w+", listed):
        note = f"this srun has no --mpi={SRUN_MPI[vendor]}"
        return _without_srun(wanted, job, environ, pid, cores=min(job.cpus), notes=[note])
    nodes = shape(wanted, job)[1]
    if nodes > 1:
        _check_nodes(nodes, overlap=bool(job.step_tasks))
    return launch


def srun_mpi(environ: Mapping[str, str]) -> str:
    """Find what srun's ``--mpi`` must be for the MPI library that this Python's mpi4py loads.

    **Local:** starts a short process; MPI is not initialised.

    Args:
        environ: the job's environment.

    Returns:
        ``"pmix"`` or ``"pmi2"``.

    Raises:
        LaunchError: mpi4py finds no MPI library, or one that is not known here.
    """
    return SRUN_MPI[find_mpi(environ)[0]]


def _without_srun(
    wanted: Wanted, job: Allocation | None, environ: Mapping[str, str], pid: int | None, *, cores: int, notes: list[str]
) -> Launch:
    found = find_launcher(environ)
    launch = mpirun_launch(wanted, job, found, environ, cores=cores, root=os.geteuid() == 0)
    env, said = dict[str, str](), list[str]()
    if pid is not None and found[0] == "Open MPI":
        env, said = _session_base(pid, {n: value for n, value in environ.items() if n not in launch.unset})
    return Launch(launch.argv, launch.env | env, (*notes, *launch.notes, *said), launch.unset)


def _session_base(pid: int, environ: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Find where mpirun can make the folder of its job, and what to say of that.

    Open MPI 5 names that folder by mpirun's process id, and a job that was killed leaves it behind. An mpirun that gets
    the same process id later, as in a container that keeps its /tmp, ends with "The PMIx server's listener thread
    failed to start".
    """
    name = next((name for name in SESSION_BASES if environ.get(name)), LOCAL_BASE)
    base = Path(environ.get(name) or tempfile.gettempdir())  # TMPDIR, TEMP, TMP, /tmp, as PMIx
    node = os.uname().nodename  # is in it on a file system that nodes share
    taken = next((path for path in (base / f"ompi.{pid}", base / f"ompi.{node}.{pid}") if path.exists()), None)
    if taken is None:
        return {}, []
    # Not removed: it may belong to a job that runs, in another container with process ids of its own.
    own = tempfile.mkdtemp(prefix="hpc_inflight.", dir=base)
    return {name: own}, [f"{taken} is left from another job, so mpirun's folder is in {own}"]


def _check_nodes(nodes: int, *, overlap: bool) -> None:
    """Raise when a node cannot import the package."""
    argv = ["srun", "--mpi=none", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--cpus-per-task=1"]
    argv += [*(["--overlap"] if overlap else []), "--kill-on-bad-exit=1", "--quit-on-interrupt"]
    done = run([*argv, sys.executable, "-c", _NODE_CHECK], os.environ)
    if done.returncode == 0:
        return
    said = re.findall(r"^.* has no .*$", done.stderr, re.MULTILINE)
    absent = re.findall(r"error: (\S+): tasks? .*Exited", done.stderr)
    if not said and absent and "No such file" in done.stderr:
        said = [f"{' and '.join(absent)} cannot run {sys.executable}"]
    if not said:
        raise LaunchError(f"srun failed on the nodes of this job: {last_line(done)}")
    raise LaunchError(f"{', '.join(sorted(set(said)))}: the environment must be on a file system that the nodes share.")


def _ask(*argv: str) -> str:
    done = run(argv, os.environ)
    if done.returncode:
        raise LaunchError(f"`{' '.join(argv)}` failed: {last_line(done)}")
    return done.stdout + done.stderr
