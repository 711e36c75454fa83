"""Tables of situations; the variables are those that the launchers were seen to set."""

from __future__ import annotations

import pytest

from hpc_inflight.errors import LaunchError
from hpc_inflight.topology import Launcher, device_index, launch_problem, launcher_from_env, node_ranks

OMPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3", "PMIX_RANK": "3"}
HYDRA = {"PMI_SIZE": "4", "PMI_RANK": "1", "MPI_LOCALRANKID": "1"}
BATCH = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}
STEP = BATCH | {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}
HELPER = BATCH | {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"}


@pytest.mark.parametrize(
    ("env", "size", "vendor"),
    [
        pytest.param(OMPI, 4, "Open MPI", id="mpirun"),
        pytest.param(HYDRA, 4, "MPICH", id="hydra"),
        pytest.param(STEP, 4, "", id="srun"),
        pytest.param(STEP | {"PMI_SIZE": "4"}, 4, "MPICH", id="srun --mpi=pmi2"),
        pytest.param(OMPI | HELPER, 4, "Open MPI", id="mpirun in an allocation: its helper is a step of one task"),
        pytest.param(HYDRA | HELPER, 4, "MPICH", id="hydra in an allocation"),
    ],
)
def test_launcher(env: dict[str, str], size: int, vendor: str) -> None:
    launcher = launcher_from_env(env)
    assert launcher is not None
    assert (launcher.size, launcher.vendor) == (size, vendor)


@pytest.mark.parametrize(
    "env",
    [
        pytest.param({}, id="plain python"),
        pytest.param(BATCH, id="a batch script's own python: 4 tasks were asked for, this is none of them"),
        pytest.param({"PMI_SIZE": ""}, id="an empty variable"),
    ],
)
def test_no_launcher(env: dict[str, str]) -> None:
    assert launcher_from_env(env) is None


MPIRUN, SRUN = Launcher("Open MPI's mpirun", 4, "Open MPI"), Launcher("srun", 4, "")
HYDRA_4 = Launcher("mpiexec.hydra or srun --mpi=pmi2", 4, "MPICH")


@pytest.mark.parametrize(
    ("launcher", "mpi_size", "vendor"),
    [
        (MPIRUN, None, "Open MPI"),
        (MPIRUN, 4, "Open MPI"),
        (HYDRA_4, 4, "MPICH"),
        (SRUN, 4, "MPICH"),
        (SRUN, 4, "Open MPI"),
        (None, 1, "MPICH"),
        (Launcher("srun", 1, ""), 1, "MPICH"),
    ],
)
def test_what_fits_is_no_problem(launcher: Launcher | None, mpi_size: int | None, vendor: str) -> None:
    assert launch_problem(launcher, mpi_size, vendor, "its version") is None


@pytest.mark.parametrize(
    ("launcher", "mpi_size", "vendor", "says"),
    [
        (MPIRUN, None, "MPICH", ["Open MPI's mpirun started 4 ranks", "mpi4py loaded MPICH", "mpiexec.hydra"]),
        (HYDRA_4, None, "Open MPI", ["started 4 ranks", "mpi4py loaded Open MPI", "srun --mpi=pmix"]),
        (SRUN, 1, "Open MPI", ["srun started 4 ranks", "sees a world of 1", "`srun --mpi=pmix`"]),
        (SRUN, 1, "MPICH", ["srun started 4 ranks", "sees a world of 1", "`srun --mpi=pmi2`"]),
        (MPIRUN, 1, "Open MPI", ["sees a world of 1", "the mpirun of that Open MPI"]),
    ],
)
def test_problems_name_the_remedy(launcher: Launcher, mpi_size: int | None, vendor: str, says: list[str]) -> None:
    problem = launch_problem(launcher, mpi_size, vendor, "its version")
    assert problem is not None
    for part in says:
        assert part in problem


def test_nodes_are_numbered_by_their_lowest_rank() -> None:
    # ranks 0, 2 on one node and 1, 3, 4 on another
    assert node_ranks([0, 1, 0, 1, 1]) == {0: 0, 1: 1}
    assert node_ranks([0, 0, 2, 2]) == {0: 0, 2: 1}


@pytest.mark.parametrize(
    ("visible", "local_rank", "index"),
    [(0, 3, None), (1, 0, 0), (1, 3, 0), (4, 0, 0), (4, 3, 3)],
)
def test_device_index(visible: int, local_rank: int, index: int | None) -> None:
    assert device_index(visible, local_rank, "node7") == index


def test_more_ranks_than_devices() -> None:
    with pytest.raises(LaunchError, match=r"local rank 2 on node7 has no GPU: 2 are visible.*init\(device=\"cpu\"\)"):
        device_index(2, 2, "node7")
