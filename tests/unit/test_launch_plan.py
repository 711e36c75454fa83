"""Which command starts the ranks: tables of what is wanted and what there is."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from hpc_inflight.errors import LaunchError
from hpc_inflight.launch_command import _NODE_CHECK
from hpc_inflight.launch_env import Allocation, allocation
from hpc_inflight.launch_plan import Wanted, mpirun_launch, shape, srun_launch

JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_CPUS_PER_NODE": "4(x2)"}
TWO = Allocation((4, 4), 4)


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": "7"}, None),
        (JOB, Allocation((4, 4))),
        (JOB | {"SLURM_JOB_CPUS_PER_NODE": "8,4(x3),2"}, Allocation((8, 4, 4, 4, 2))),
        (JOB | {"SLURM_NTASKS": "4", "SLURM_CPUS_PER_TASK": "2"}, Allocation((4, 4), 4, 2)),
        (JOB | {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"}, Allocation((4, 4), step_tasks=1)),
        (JOB | {"SLURM_STEP_ID": "4294967290"}, Allocation((4, 4), step_tasks=1)),
    ],
)
def test_allocation(env: dict[str, str], expected: Allocation | None) -> None:
    assert allocation(env) == expected


@pytest.mark.parametrize(
    ("wanted", "job", "expected"),
    [
        (Wanted(3), None, (3, 1, 3)),
        (Wanted(per_node=2), None, (2, 1, 2)),
        (Wanted(nodes=1, per_node=2), None, (2, 1, 2)),
        (Wanted(), TWO, (4, 2, 2)),
        (Wanted(2), TWO, (2, 2, 1)),
        (Wanted(1), TWO, (1, 1, 1)),
        (Wanted(3), TWO, (3, 2, None)),
        (Wanted(nodes=1), TWO, (4, 1, 4)),
        (Wanted(per_node=3), TWO, (6, 2, 3)),
        (Wanted(4, per_node=4), TWO, (4, 1, 4)),
    ],
)
def test_shape(wanted: Wanted, job: Allocation | None, expected: tuple[int, int, int | None]) -> None:
    assert shape(wanted, job) == expected


@pytest.mark.parametrize(
    ("wanted", "job", "says"),
    [
        (Wanted(), None, "say how many ranks"),
        (Wanted(), Allocation((4, 4)), "say how many ranks"),
        (Wanted(2, nodes=2), None, "outside of a Slurm allocation there is this one"),
        (Wanted(nodes=3), TWO, "--nodes 3: the allocation has 2"),
        (Wanted(4, nodes=2, per_node=3), TWO, "contradict each other"),
        (Wanted(8, per_node=2), TWO, "contradict each other"),
        (Wanted(1, nodes=2), TWO, "1 ranks, 2 nodes"),
    ],
)
def test_numbers_that_do_not_fit(wanted: Wanted, job: Allocation | None, says: str) -> None:
    with pytest.raises(LaunchError, match=says):
        shape(wanted, job)


@pytest.mark.parametrize(
    ("wanted", "job", "vendor", "expected"),
    [
        (Wanted(), TWO, "Open MPI", "--mpi=pmix --nodes=2 --ntasks=4 --ntasks-per-node=2"),
        (Wanted(3), TWO, "MPICH", "--mpi=pmi2 --nodes=2 --ntasks=3"),
        (
            Wanted(2, gpus=1, bind="core"),
            Allocation((4, 4), 4, 2),
            "MPICH",
            "--mpi=pmi2 --nodes=2 --ntasks=2 --ntasks-per-node=1 --cpus-per-task=2 --gpus-per-task=1 --cpu-bind=cores",
        ),
        (
            Wanted(2, bind="numa"),
            Allocation((4,), 4, None, 1),
            "Open MPI",
            "--mpi=pmix --nodes=1 --ntasks=2 --ntasks-per-node=2 --cpu-bind=ldoms --overlap",
        ),
    ],
)
def test_srun(wanted: Wanted, job: Allocation, vendor: str, expected: str) -> None:
    launch = srun_launch(wanted, job, vendor, JOB)
    assert " ".join(launch.argv) == f"srun {expected} --kill-on-bad-exit=1 --quit-on-interrupt"
    assert launch.unset == ()


@pytest.mark.parametrize(
    ("wanted", "job", "env", "threads"),
    [
        (Wanted(), TWO, {}, "2"),
        (Wanted(3), TWO, {}, "2"),
        (Wanted(2), Allocation((4, 4), 4, 3), {}, "3"),
        (Wanted(8), Allocation((4, 4), 8), {}, "1"),
        (Wanted(), TWO, {"OMP_NUM_THREADS": "5"}, None),
    ],
)
def test_threads_are_a_rank_s_share(wanted: Wanted, job: Allocation, env: dict[str, str], threads: str | None) -> None:
    assert srun_launch(wanted, job, "MPICH", JOB | env).env.get("OMP_NUM_THREADS") == threads


@pytest.mark.parametrize(
    ("wanted", "job", "says"),
    [
        (Wanted(9), TWO, "9 ranks of 1 CPUs want 9, and the allocation has 8"),
        (Wanted(4), Allocation((4, 4), 4, 3), "4 ranks of 3 CPUs want 12"),
        (Wanted(), Allocation((4,), 4, None, 2), "srun started this 2 times"),
    ],
)
def test_more_than_the_job_has(wanted: Wanted, job: Allocation, says: str) -> None:
    with pytest.raises(LaunchError, match=says):
        srun_launch(wanted, job, "MPICH", JOB)


def test_overcommitted_jobs_may_have_more_ranks_than_cpus() -> None:
    assert "--ntasks=9" in srun_launch(Wanted(9), TWO, "MPICH", JOB | {"SLURM_OVERCOMMIT": "1"}).argv


def mpirun(wanted: Wanted, vendor: str, job: Allocation | None = None, **more: Any) -> str:
    options: dict[str, Any] = {"cores": 8, "root": False} | more
    launch = mpirun_launch(wanted, job, (vendor, "mpirun"), {}, **options)
    return " ".join([*(f"{n}={v}" for n, v in launch.env.items() if n != "OMP_NUM_THREADS"), *launch.argv])


@pytest.mark.parametrize(
    ("wanted", "vendor", "job", "more", "expected"),
    [
        (Wanted(2), "Open MPI", None, {}, "OMPI_MCA_btl=^ofi mpirun --bind-to none -n 2"),
        (Wanted(9), "Open MPI", None, {}, "OMPI_MCA_btl=^ofi mpirun --bind-to none --oversubscribe -n 9"),
        (
            Wanted(2, bind="core"),
            "Open MPI",
            None,
            {},
            "OMPI_MCA_btl=^ofi mpirun --bind-to core --map-by slot:PE=4 -n 2",
        ),
        (Wanted(4), "Open MPI", TWO, {}, "mpirun --bind-to none --map-by ppr:2:node -n 4"),
        (Wanted(2), "MPICH", None, {"root": True}, "mpirun -n 2"),
        (Wanted(2, bind="core"), "MPICH", None, {}, "mpirun -bind-to core:4 -n 2"),
        (Wanted(4), "MPICH", TWO, {}, "mpirun -ppn 2 -n 4"),
    ],
)
def test_mpirun(wanted: Wanted, vendor: str, job: Allocation | None, more: dict[str, Any], expected: str) -> None:
    assert mpirun(wanted, vendor, job, **more) == expected


def test_root_is_allowed_for_open_mpi_only_and_said() -> None:
    launch = mpirun_launch(Wanted(1), None, ("Open MPI", "mpirun"), {}, cores=8, root=True)
    assert launch.env["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] == "1"
    assert "allowed as root" in launch.notes


def test_more_ranks_than_cores_cannot_be_bound() -> None:
    with pytest.raises(LaunchError, match="9 ranks cannot have a core each of 8"):
        mpirun(Wanted(9, bind="core"), "MPICH")


OUTER = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_MCA_orte": "1", "PMIX_RANK": "1"}


@pytest.mark.parametrize(
    ("env", "unset"),
    [
        ({"OMPI_MCA_btl": "self", "OMPI_ALLOW_RUN_AS_ROOT": "1", "SLURM_CONF": "x"}, ()),
        (OUTER | {"OMPI_ALLOW_RUN_AS_ROOT": "1"}, ("OMPI_COMM_WORLD_SIZE", "OMPI_MCA_orte", "PMIX_RANK")),
        (JOB | {"SLURM_CONF": "x"}, ("SLURM_JOB_CPUS_PER_NODE", "SLURM_JOB_ID")),
    ],
)
def test_an_outer_launcher_s_variables_are_taken_out(env: dict[str, str], unset: tuple[str, ...]) -> None:
    launch = mpirun_launch(Wanted(1), None, ("MPICH", "mpirun"), env, cores=1, root=False)
    assert launch.unset == unset


def test_a_slurm_job_s_variables_stay_for_srun() -> None:
    assert srun_launch(Wanted(), TWO, "MPICH", JOB | OUTER).unset == (
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_MCA_orte",
        "PMIX_RANK",
    )


def test_a_node_names_what_it_lacks() -> None:
    # -S: without site-packages; -P would be newer than the oldest Python
    done = subprocess.run([sys.executable, "-ISc", _NODE_CHECK], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "has no mpi4py and no hpc_inflight for " in done.stderr
