"""What launchers leave in the environment of what they start: the Slurm job, and an outer launcher's variables.

The launch_* modules import the standard library and each other only, so that launch/run.sh starts at once.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

# An outer launcher describes its own ranks in these; what is started below it must not read them.
_OUTER_PREFIXES = ("OMPI_", "OPAL_", "PMIX_", "PRTE_", "PMI_", "HYDI_", "MPI_LOCAL", "SLURM_")
# Outside of Open MPI's launcher these are the user's own settings; inside, it has added its own to them.
_USER_PREFIXES = ("OMPI_MCA_", "OPAL_", "PMIX_MCA_", "PRTE_MCA_")

_OUTER_LAUNCHERS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK")


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


def outer_variables(environ: Mapping[str, str], *, slurm: bool) -> tuple[str, ...]:
    """Name an outer launcher's variables, by which the new ranks would take themselves for its own.

    **Local:** pure.

    Args:
        environ: the environment.
        slurm: whether those of a Slurm job count, too: the new ranks are not Slurm's.

    Returns:
        The names, sorted; not those of the user's own settings.
    """
    inside = any(name in environ for name in _OUTER_LAUNCHERS)
    in_job = slurm and ("SLURM_JOB_ID" in environ or "SLURM_STEP_ID" in environ)
    kept = clean_env(environ)
    own = ("OMPI_ALLOW_RUN_AS_ROOT", "SLURM_CONF")
    gone = (n for n in environ if n not in kept and not n.startswith(own))
    return tuple(sorted(n for n in gone if (in_job if n.startswith("SLURM_") else inside)))
