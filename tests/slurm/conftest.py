"""The cluster for all tests here, and jobs on it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hpc_inflight.launch_env import clean_env
from tests import mpis
from tests.slurm.cluster import Cluster, ClusterError, install, running

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tests.mpis import MPI

ROOT = Path(__file__).resolve().parents[2]
# Set where a skip would hide that the tests do not run, as in continuous integration.
REQUIRED = os.environ.get("HPC_INFLIGHT_REQUIRE_SLURM", "") not in {"", "0"}


@dataclass(frozen=True)
class Job:
    """A batch job that has ended."""

    job_id: str
    state: str
    exit_code: str
    output: str


class Site:
    """What a user of the cluster has: its commands, this Python, one of two MPI libraries."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        env = clean_env(os.environ) | cluster.env | {"VIRTUAL_ENV": sys.prefix, "PYTHONUNBUFFERED": "1"}
        # The nodes share this machine's cores, which no launcher can know: ranks that wait must let others run.
        env |= {"OMPI_MCA_mpi_yield_when_idle": "1", "MPIR_CVAR_ENABLE_HEAVY_YIELD": "1"}
        # Nor is there a network for this transport, which makes messages between the two several times slower here.
        env["OMPI_MCA_btl"] = "^ofi"
        env.pop("MPI", None)
        self.env = {name: value for name, value in env.items() if not name.startswith("PYTEST_")}
        self.env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{self.env['PATH']}"

    def run(
        self, *command: str, timeout_s: float = 300, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command that needs the cluster."""
        return subprocess.run(
            command,
            env=self.env | dict(env or {}),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )

    def submit(self, *arguments: str, env: Mapping[str, str] | None = None) -> str:
        """Hand in a batch job and return its number."""
        done = self.run("sbatch", "--parsable", *arguments, env=env)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip().split(";")[0]

    def left_over(self, timeout_s: float = 120) -> str:
        """Return the jobs that are still in the queue after the timeout."""
        deadline = time.monotonic() + timeout_s
        while (jobs := self.run("squeue", "--noheader").stdout) and time.monotonic() < deadline:
            time.sleep(0.1)
        return jobs

    def field(self, job_id: str, name: str) -> str:
        """Return a field of a job, "" when there is none."""
        done = self.run("scontrol", "show", "job", job_id)
        found = re.search(rf"\b{name}=(\S+)", done.stdout)
        return found[1] if found else ""

    def wait(self, job_id: str, output: Path, timeout_s: float = 500) -> Job:
        """Return the job once it has ended; sbatch --wait would look every ten seconds only."""
        deadline = time.monotonic() + timeout_s
        while (state := self.field(job_id, "JobState")) in {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING"}:
            text = output.read_text(errors="replace") if output.exists() else ""
            assert time.monotonic() < deadline, f"job {job_id} is {state} after {timeout_s} s:\n{text}"
            time.sleep(0.2)
        text = output.read_text(errors="replace") if output.exists() else ""
        return Job(job_id, state, self.field(job_id, "ExitCode"), text)


@pytest.fixture(scope="session")
def site() -> Iterator[Site]:
    try:
        if REQUIRED:
            install()
        with running() as cluster:
            yield Site(cluster)
    except ClusterError as error:
        if REQUIRED:
            raise
        pytest.skip(f"no Slurm cluster here: {error}")


@pytest.fixture(scope="session", params=mpis.VENDORS)
def mpi(request: pytest.FixtureRequest) -> MPI:
    """Each of the two, where it is installed."""
    found = mpis.installed().get(request.param)
    if found is None:
        if REQUIRED:
            pytest.fail(mpis.missing(request.param))
        pytest.skip(mpis.missing(request.param))
    # MPICH 5.0.2 over UCX loses short messages between nodes that are received from any source
    more = {"MPIR_CVAR_CH4_NETMOD": "ofi"} if found.vendor == "MPICH" else {}
    return replace(found, env=found.env | more)
