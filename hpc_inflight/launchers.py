"""What launchers say in the environment, and what is wrong between them and the MPI library.

Pure functions from gathered facts to sentences, so that tables of situations test them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


MPI_FILES = ("libmpi.so", "libmpich.so")
"""How the file names of MPI libraries begin."""

_SHOWN_RANKS = 8


@dataclass(frozen=True)
class Launcher:
    """What a launcher said of itself in the environment.

    Attributes:
        name: The command that a user knows it by.
        size: Number of ranks it says it started.
        vendor: The MPI library that its ranks must load; empty when it serves several.
        rank: The rank that it gave this process; 0 when it did not say.
        pmix: Whether its ranks find each other through PMIx.
    """

    name: str
    size: int
    vendor: str = ""
    rank: int = 0
    pmix: bool = False


@dataclass(frozen=True)
class Library:
    """The MPI library of this process.

    Attributes:
        vendor: As ``MPI.get_vendor()`` gives it, such as ``"Open MPI"`` or ``"MPICH"``.
        version: The same, such as ``(5, 0, 11)``; empty when unknown.
        line: The library's own version line.
        launcher: Path of the launcher that belongs to it; empty when none was found.
        pmix: Whether it came with a PMIx client; an MPICH without one aborts where it meets PMIx.
    """

    vendor: str
    version: tuple[int, ...]
    line: str
    launcher: str = ""
    pmix: bool = True


def launcher_from_env(env: Mapping[str, str]) -> Launcher | None:
    """Find the launcher that started this process.

    The innermost one counts: inside mpirun or hydra in a Slurm job, the SLURM_* values describe the launcher's helper.

    **Local:** any rank, before MPI is initialised.

    Args:
        env: The process's environment. ``SLURM_*`` counts only where ``SLURM_STEP_ID`` is set: in a batch
            script outside ``srun`` the variables say N tasks while the script is one process.

    Returns:
        The launcher, or None for a plain ``python``.
    """

    def number(name: str) -> int | None:
        return int(env[name]) if env.get(name, "").isdigit() else None

    in_step = "SLURM_STEP_ID" in env
    tasks = number("SLURM_STEP_NUM_TASKS") if in_step else None
    size, rank = number("OMPI_COMM_WORLD_SIZE"), number("OMPI_COMM_WORLD_RANK")
    if size is not None:
        return Launcher("Open MPI's mpirun", size, "Open MPI", rank or 0, pmix=True)
    rank = number("PMIX_RANK")
    if rank is not None and tasks is not None:
        return Launcher("srun --mpi=pmix", tasks, "", rank, pmix=True)
    size, rank = number("PMI_SIZE"), number("PMI_RANK")
    if size is not None:
        is_hydra = "MPI_LOCALRANKID" in env or "HYDI_CONTROL_FD" in env
        name = "mpiexec.hydra" if is_hydra else "srun --mpi=pmi2" if in_step else "mpiexec.hydra or srun --mpi=pmi2"
        return Launcher(name, size, "MPICH", rank or 0)
    if tasks is not None:
        kind = env.get("SLURM_MPI_TYPE", "")
        return Launcher(f"srun --mpi={kind}" if kind else "srun", tasks, "", number("SLURM_PROCID") or 0)
    size = number("WORLD_SIZE")
    if size is not None and "TORCHELASTIC_RUN_ID" in env:
        return Launcher("torchrun", size, "", number("RANK") or 0)
    return None


def launch_problem(launcher: Launcher | None, mpi_size: int | None, library: Library) -> str | None:
    """Say what is wrong between the launcher and the MPI library, if anything is.

    **Local:** any rank; called before MPI is initialised with ``mpi_size=None``, and again with its size.

    Args:
        launcher: From `launcher_from_env`.
        mpi_size: Size of ``COMM_WORLD``; None when MPI is not yet initialised.
        library: The library that was loaded.

    Returns:
        One sentence with the fix in it, or None.
    """
    if launcher is None or launcher.size <= 1:
        return None
    started = f"{launcher.name} started {launcher.size} ranks, but "
    if mpi_size is None and _cannot_meet(launcher, library):
        return (
            f"{started}mpi4py loaded {library.vendor} ({library.line}), so each rank would be alone, or abort; "
            f"{remedy(library)}, or point MPI4PY_LIBMPI at the launcher's own library"
        )
    if mpi_size is not None and mpi_size != launcher.size:
        return f"{started}MPI ({library.line}) sees a world of {mpi_size}; {remedy(library)}"
    return None


def _cannot_meet(launcher: Launcher, library: Library) -> bool:
    """Say whether it is certain that the ranks will not find each other."""
    if library.vendor == "MPICH":
        return launcher.pmix and not library.pmix
    # Open MPI 4 may have been built for Slurm's PMI-2; 5 knows PMIx alone
    knows_pmi = library.version != () and library.version[0] < 5  # noqa: PLR2004  # the major version
    return library.vendor == "Open MPI" and launcher.vendor == "MPICH" and not knows_pmi


def remedy(library: Library) -> str:
    """Say how ranks that load this library are started.

    **Local:** pure.

    Args:
        library: The library.

    Returns:
        Half a sentence, such as "use /opt/ompi/bin/mpirun, or `srun --mpi=pmix` in a Slurm job".
    """
    names = {"Open MPI": ("mpirun", "pmix"), "MPICH": ("mpiexec.hydra", "pmi2")}.get(library.vendor)
    if names is None:
        return f"use {library.launcher or 'the launcher that belongs to that library'}"
    own = library.launcher or f"the {names[0]} of that {library.vendor} (none was found beside it or on PATH)"
    return f"use {own}, or `srun --mpi={names[1]}` in a Slurm job"


def launch_hints(env: Mapping[str, str], library: Library) -> list[str]:
    """Say what may be meant otherwise, though nothing is certainly wrong.

    **Local:** before MPI is initialised, which in one of the cases ends the process.

    Args:
        env: The process's environment.
        library: The library that was loaded.

    Returns:
        Sentences.
    """
    launcher = launcher_from_env(env)
    tasks = env.get("SLURM_NTASKS", "")
    if launcher is None and "SLURM_JOB_ID" in env and tasks.isdigit() and int(tasks) > 1:
        alone = "this process was started by the batch script itself, not by srun, so it is a world of one in a job of"
        return [f"{alone} {tasks} tasks; to start them all, {remedy(library)}, or launch/run.sh"]
    if (
        launcher is not None
        and launcher.size > 1
        and "SLURM_STEP_ID" in env
        and not launcher.pmix
        and launcher.name.startswith("srun")
        and library.vendor == "Open MPI"
        and library.version[:1] < (5,)
    ):
        return [f"if MPI ends this process now, {launcher.name} does not serve {library.line}: {remedy(library)}"]
    return []


def mixed_libraries(files: Sequence[str]) -> str | None:
    """Say whether one process has loaded two MPI libraries.

    **Local:** any rank.

    Args:
        files: Resolved paths of the shared libraries that the process has mapped.

    Returns:
        One sentence, or None.
    """
    found = sorted({f for f in files if PurePath(f).name.startswith(MPI_FILES)})
    if len(found) < 2:  # noqa: PLR2004  # one is right
        return None
    return (
        f"this process has loaded more than one MPI library ({', '.join(found)}), and calls may end up in the "
        f"wrong one; point MPI4PY_LIBMPI at the one that everything else was built with"
    )


def library_differs(lines: Sequence[str]) -> str | None:
    """Say whether the ranks loaded different MPI libraries.

    **Local:** any rank; all see the same.

    Args:
        lines: Every rank's version line.

    Returns:
        One sentence that names a rank of each, or None.
    """
    if len(set(lines)) <= 1:
        return None
    ranks = {line: [str(rank) for rank, other in enumerate(lines) if other == line] for line in lines}
    each = "; ".join(
        f"{line} on rank {', '.join(where[:_SHOWN_RANKS])}{', ...' * (len(where) > _SHOWN_RANKS)}"
        for line, where in ranks.items()
    )
    return f"the ranks loaded different MPI libraries: {each}; give all nodes one environment, or set MPI4PY_LIBMPI"
