"""Find the command that starts N ranks here: srun in a Slurm allocation, else mpirun or mpiexec.hydra."""

from __future__ import annotations

import os
import re
import shutil
import sys
from typing import TYPE_CHECKING

from hpc_inflight.errors import LaunchError
from hpc_inflight.launch_env import allocation
from hpc_inflight.launch_find import find_launcher, find_mpi, last_line, run, usable_cores
from hpc_inflight.launch_plan import SRUN_MPI, Launch, Wanted, mpirun_launch, shape, srun_launch

if TYPE_CHECKING:
    from collections.abc import Mapping

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


def plan_here(wanted: Wanted, environ: Mapping[str, str]) -> Launch:
    """Find how the ranks are started with what there is: Slurm's srun in a job, else the MPI library's launcher.

    **Local:** starts short processes; MPI is not initialised.

    Args:
        wanted: what the user asks for.
        environ: the job's environment.

    Returns:
        The command, the variables to add and to take out, and notes.

    Raises:
        LaunchError: nothing can be started; the message says why.
    """
    job = allocation(environ)
    if job is None or shutil.which("srun", path=environ.get("PATH")) is None:
        notes = [] if job is None else ["in a Slurm job, but without srun: this node only"]
        found = find_launcher(environ)
        launch = mpirun_launch(wanted, None, found, environ, cores=usable_cores(), root=os.geteuid() == 0)
        return Launch(launch.argv, launch.env, (*notes, *launch.notes), launch.unset)
    vendor, _, _ = find_mpi(environ)
    launch = srun_launch(wanted, job, vendor, environ)
    listed = _ask("srun", "--mpi=list")
    if SRUN_MPI[vendor] not in re.findall(r"\w+", listed):
        found = find_launcher(environ)
        launch = mpirun_launch(wanted, job, found, environ, cores=min(job.cpus), root=os.geteuid() == 0)
        note = f"this srun has no --mpi={SRUN_MPI[vendor]}"
        return Launch(launch.argv, launch.env, (note, *launch.notes), launch.unset)
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
