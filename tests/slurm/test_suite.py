"""The multi-rank tests on two nodes with two ranks each."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests import mpis

if TYPE_CHECKING:
    from tests.mpis import MPI
    from tests.slurm.conftest import Site

RUN_SH = str(Path(__file__).resolve().parents[2] / "launch" / "run.sh")
# With the MPI of the environment, which has run the rest on one node: what has to do with how messages travel.
MESSAGES = [f"tests/mpi/test_{name}.py" for name in ("collectives", "groups", "p2p", "store", "matrix", "lifetime")]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_multi_rank_tests_pass_on_two_nodes(site: Site, mpi: MPI) -> None:
    whole = mpi.vendor == list(mpis.installed())[-1]  # the other one, which gives way to others while it waits
    tests, least = (["tests/mpi"], 400) if whole else (MESSAGES, 150)
    pytest_ = [
        "python",
        "-m",
        "mpi4py",
        "-m",
        "pytest",
        "-x",
        "--with-mpi",
        "--color=no",
        "-m",
        "not slow and not once",
    ]
    job = ["salloc", "--quiet", "--nodes=2", "--ntasks-per-node=2", RUN_SH, *pytest_, *tests]
    done = site.run(*job, timeout_s=3500, env=mpi.env)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed, done.stdout
    assert int(passed[1]) > least  # of the 489 and 193 there were
    assert f"srun --mpi={mpi.kind}" in done.stderr
