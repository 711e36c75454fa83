"""Who runs where: pure functions from gathered facts to decisions, so that tables of situations test them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpc_inflight.errors import LaunchError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True)
class Launcher:
    """What a launcher said of itself in the environment.

    Attributes:
        name: The command that a user knows it by.
        size: Number of ranks it says it started.
        vendor: The MPI library that its ranks must load; empty when it serves several.
    """

    name: str
    size: int
    vendor: str


# Innermost first: inside mpirun or hydra in an allocation, the SLURM_* values describe the launcher's helper.
_LAUNCHERS = (
    ("OMPI_COMM_WORLD_SIZE", "Open MPI's mpirun", "Open MPI"),
    ("PMI_SIZE", "mpiexec.hydra or srun --mpi=pmi2", "MPICH"),
    ("SLURM_STEP_NUM_TASKS", "srun", ""),
)


def launcher_from_env(env: Mapping[str, str]) -> Launcher | None:
    """Find the launcher that started this process.

    **Local:** any rank, before MPI is initialised.

    Args:
        env: The process's environment. ``SLURM_*`` counts only where ``SLURM_STEP_ID`` is set: in a batch
            script outside ``srun`` the variables say N tasks while the script is one process.

    Returns:
        The launcher, or None for a plain ``python``.
    """
    for variable, name, vendor in _LAUNCHERS:
        size = env.get(variable, "")
        if not size.isdigit() or (name == "srun" and "SLURM_STEP_ID" not in env):
            continue
        return Launcher(name, int(size), vendor)
    return None


def launch_problem(launcher: Launcher | None, mpi_size: int | None, vendor: str, library: str) -> str | None:
    """Say what is wrong between the launcher and the MPI library, if anything is.

    **Local:** any rank; called before MPI is initialised with ``mpi_size=None``, and again with its size.

    Args:
        launcher: From `launcher_from_env`.
        mpi_size: Size of ``COMM_WORLD``; None when MPI is not yet initialised.
        vendor: Name of the MPI library that was loaded, as ``MPI.get_vendor()`` gives it.
        library: The library's own version line.

    Returns:
        One sentence with the fix in it, or None.
    """
    if launcher is None or launcher.size <= 1:
        return None
    remedy = {
        "Open MPI": "use the mpirun of that Open MPI, or `srun --mpi=pmix`",
        "MPICH": "use the mpiexec.hydra of that MPICH, or `srun --mpi=pmi2`",
    }.get(vendor, "use the launcher that belongs to that library")
    if launcher.vendor and vendor != launcher.vendor and vendor in {"Open MPI", "MPICH"}:
        return (
            f"{launcher.name} started {launcher.size} ranks, but mpi4py loaded {vendor} ({library}), "
            f"so each rank would be alone; {remedy}, or point MPI4PY_LIBMPI at the launcher's library"
        )
    if mpi_size is not None and mpi_size != launcher.size:
        return (
            f"{launcher.name} started {launcher.size} ranks, but MPI ({library}) sees a world of {mpi_size}; {remedy}"
        )
    return None


def node_ranks(hostnames_of_leaders: Sequence[int]) -> dict[int, int]:
    """Number the nodes in the order of their lowest world rank.

    **Local:** any rank.

    Args:
        hostnames_of_leaders: For every world rank, the world rank of the lowest rank on its node.

    Returns:
        From that lowest rank to the node's index.
    """
    return {leader: index for index, leader in enumerate(sorted(set(hostnames_of_leaders)))}


def device_index(visible: int, local_rank: int, hostname: str) -> int | None:
    """Choose the CUDA device of a rank.

    **Local:** any rank.

    Args:
        visible: Number of devices that this process sees.
        local_rank: Rank within the node.
        hostname: For the error.

    Returns:
        None without a device; 0 when one device is visible (the launcher chose it); else ``local_rank``.

    Raises:
        LaunchError: More ranks on the node than devices.
    """
    if visible == 0:
        return None
    if visible == 1:
        return 0
    if local_rank >= visible:
        msg = (
            f"init: local rank {local_rank} on {hostname} has no GPU: {visible} are visible; start at most {visible} "
            'ranks per node, give each rank one device (--gpus-per-task=1), or call init(device="cpu")'
        )
        raise LaunchError(msg)
    return local_rank
