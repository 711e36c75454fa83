"""The command that starts the ranks: pure functions from what is wanted and what there is, so that tables test them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hpc_inflight.errors import LaunchError
from hpc_inflight.launch_env import Allocation, outer_variables

if TYPE_CHECKING:
    from collections.abc import Mapping

# What srun must be told for the ranks of each library to find each other.
SRUN_MPI = {"Open MPI": "pmix", "MPICH": "pmi2"}


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
    mpi = SRUN_MPI[vendor]
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
    return Launch(tuple(argv), env, (f"{vendor} (srun --mpi={mpi})", *notes), outer_variables(environ, slurm=False))


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
    outer = outer_variables(environ, slurm=job is None)
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
