"""Steps on two nodes: they start right, say what is wrong, and end."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.mpis import MPI
    from tests.slurm.conftest import Site

ROOT = Path(__file__).resolve().parents[2]
RUN_SH = str(ROOT / "launch" / "run.sh")
TWO_BY_TWO = ("--nodes=2", "--ntasks-per-node=2")


WHO = """
import os, hpc_inflight as hi
w = hi.init(device="cpu")
who = f"{w.rank} of {w.world_size}, {w.local_rank} of {w.local_world_size} on {w.node_rank}={w.hostname}"
os.write(1, f"<{who}>\\n".encode())
hi.finalize()
"""


def test_ranks_know_their_nodes(site: Site, mpi: MPI) -> None:
    done = site.run("srun", f"--mpi={mpi.kind}", *TWO_BY_TWO, "python", "-c", WHO, env=mpi.env)
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall("<.*?>", done.stdout)) == [
        "<0 of 4, 0 of 2 on 0=n1>",
        "<1 of 4, 1 of 2 on 0=n1>",
        "<2 of 4, 0 of 2 on 1=n2>",
        "<3 of 4, 1 of 2 on 1=n2>",
    ]


@pytest.mark.parametrize("kind", ["none", "the other's"])
def test_a_wrong_mpi_option_is_said(site: Site, mpi: MPI, kind: str) -> None:
    wrong = {"pmix": "pmi2", "pmi2": "pmix"}[mpi.kind] if kind == "the other's" else kind
    done = site.run("srun", f"--mpi={wrong}", *TWO_BY_TWO, "python", "-c", WHO, env=mpi.env)
    assert done.returncode != 0
    assert "<" not in done.stdout
    said = re.findall(r"LaunchError: (.*)", done.stderr)
    assert len(said) == 4, done.stderr
    for one in said:
        # a step without an MPI plug-in says nothing of one
        assert re.match(rf"srun( --mpi={wrong})? started 4 ranks, but ", one)
        assert f"`srun --mpi={mpi.kind}`" in one


DIES = """
import os, signal, time, torch, torch.distributed as dist, hpc_inflight as hi
w = hi.init(device="cpu")
os.write(1, b"up\\n")
dist.barrier()
if w.rank == 3:
    {how}
dist.all_reduce(torch.ones(1))
time.sleep(600)
"""


def test_a_rank_that_dies_ends_the_job_on_both_nodes(site: Site, mpi: MPI) -> None:
    # with pmi2 it is srun alone that can end the others, for a killed rank cannot
    how = {"pmix": "raise KeyError('lost')", "pmi2": "os.kill(os.getpid(), signal.SIGKILL)"}[mpi.kind]
    done = site.run("salloc", "--quiet", *TWO_BY_TWO, RUN_SH, "python", "-c", DIES.format(how=how), env=mpi.env)
    assert done.returncode != 0
    assert done.stdout.count("up") == 4, done.stdout + done.stderr
    assert site.left_over() == ""


def test_a_batch_script_s_own_python_is_a_world_of_one_and_says_so(site: Site, mpi: MPI) -> None:
    done = site.run("salloc", "--quiet", *TWO_BY_TWO, "python", "-c", WHO, env=mpi.env)
    assert done.returncode == 0, done.stderr
    assert "<0 of 1, 0 of 1 on 0=" in done.stdout
    assert "not by srun, so it is a world of one in a job of 4 tasks" in done.stderr
    assert f"`srun --mpi={mpi.kind}`" in done.stderr
