"""Tables of situations; the variables are those that the launchers were seen to set."""

from __future__ import annotations

import pytest

from hpc_inflight.launchers import (
    Launcher,
    Library,
    launch_hints,
    launch_problem,
    launcher_from_env,
    library_differs,
    mixed_libraries,
)

MPIRUN = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3", "PMIX_RANK": "3", "PMIX_NAMESPACE": "prterun@1"}
HYDRA = {"PMI_SIZE": "4", "PMI_RANK": "1", "MPI_LOCALRANKID": "1"}
BATCH = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}
STEP = BATCH | {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2", "SLURM_MPI_TYPE": "none"}
PMIX = STEP | {"PMIX_RANK": "2", "PMIX_NAMESPACE": "slurm.pmix.1.0", "SLURM_MPI_TYPE": "pmix"}
PMI2 = STEP | {"PMI_SIZE": "4", "PMI_RANK": "2", "SLURM_MPI_TYPE": "pmi2"}
HELPER = BATCH | {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"}
TORCHRUN = {"WORLD_SIZE": "4", "RANK": "1", "TORCHELASTIC_RUN_ID": "none"}


@pytest.mark.parametrize(
    ("env", "name", "size", "rank", "vendor", "pmix"),
    [
        pytest.param(MPIRUN, "Open MPI's mpirun", 4, 3, "Open MPI", True, id="mpirun"),
        pytest.param(HYDRA, "mpiexec.hydra", 4, 1, "MPICH", False, id="hydra"),
        pytest.param(
            {"PMI_SIZE": "4", "PMI_RANK": "1"}, "mpiexec.hydra or srun --mpi=pmi2", 4, 1, "MPICH", False, id="PMI"
        ),
        pytest.param(STEP, "srun --mpi=none", 4, 2, "", False, id="srun --mpi=none"),
        pytest.param(PMI2, "srun --mpi=pmi2", 4, 2, "MPICH", False, id="srun --mpi=pmi2"),
        pytest.param(PMIX, "srun --mpi=pmix", 4, 2, "", True, id="srun --mpi=pmix"),
        pytest.param(
            MPIRUN | HELPER, "Open MPI's mpirun", 4, 3, "Open MPI", True, id="mpirun in a job: its helper is a step"
        ),
        pytest.param(HYDRA | HELPER, "mpiexec.hydra", 4, 1, "MPICH", False, id="hydra in a job"),
        pytest.param(MPIRUN | PMI2, "Open MPI's mpirun", 4, 3, "Open MPI", True, id="mpirun in a step"),
        pytest.param(TORCHRUN, "torchrun", 4, 1, "", False, id="torchrun"),
        pytest.param(HYDRA | TORCHRUN, "mpiexec.hydra", 4, 1, "MPICH", False, id="torchrun's variables left over"),
        pytest.param(HELPER, "srun", 1, 0, "", False, id="a step of one task, such as a shell"),
    ],
)
def test_launcher(env: dict[str, str], name: str, size: int, rank: int, vendor: str, pmix: bool) -> None:
    assert launcher_from_env(env) == Launcher(name, size, vendor, rank, pmix)


@pytest.mark.parametrize(
    "env",
    [
        pytest.param({}, id="plain python"),
        pytest.param(BATCH, id="a batch script's own python: 4 tasks were asked for, this is none of them"),
        pytest.param({"PMI_SIZE": ""}, id="an empty variable"),
        pytest.param({"OMPI_COMM_WORLD_SIZE": "four"}, id="not a number"),
        pytest.param({"WORLD_SIZE": "4", "RANK": "1"}, id="a job script's own variables"),
    ],
)
def test_no_launcher(env: dict[str, str]) -> None:
    assert launcher_from_env(env) is None


OMPI5 = Library("Open MPI", (5, 0, 11), "Open MPI v5.0.11", "/opt/ompi/bin/mpirun")
OMPI4 = Library("Open MPI", (4, 1, 4), "Open MPI v4.1.4", "/usr/bin/mpirun")
MPICH = Library("MPICH", (5, 0, 2), "MPICH Version: 5.0.2", "/opt/mpich/bin/mpiexec.hydra", pmix=False)
MPICH_PMIX = Library("MPICH", (4, 2, 0), "MPICH Version: 4.2.0", "")
INTEL = Library("Intel MPI", (2021, 1), "Intel(R) MPI Library 2021.1", "")


@pytest.mark.parametrize(
    ("env", "mpi_size", "library"),
    [
        (MPIRUN, None, OMPI5),
        (MPIRUN, 4, OMPI5),
        (HYDRA, 4, MPICH),
        (HYDRA, 4, INTEL),
        (STEP, 4, MPICH),
        (STEP, None, OMPI5),  # not certain before MPI says its size: PMI-1 needs no --mpi
        (PMIX, None, OMPI5),
        (PMIX, 4, MPICH_PMIX),
        (MPIRUN, None, MPICH_PMIX),
        (PMI2, None, OMPI4),  # may have been built with Slurm's PMI-2
        (PMI2, 4, OMPI4),
        ({}, 1, MPICH),
        (HELPER, 1, OMPI5),
        (BATCH, 1, OMPI5),
    ],
)
def test_what_fits_is_no_problem(env: dict[str, str], mpi_size: int | None, library: Library) -> None:
    assert launch_problem(launcher_from_env(env), mpi_size, library) is None


@pytest.mark.parametrize(
    ("env", "mpi_size", "library", "says"),
    [
        (MPIRUN, None, MPICH, ["Open MPI's mpirun started 4 ranks", "mpi4py loaded MPICH", MPICH.launcher]),
        (HYDRA, None, OMPI5, ["mpiexec.hydra started 4 ranks", "mpi4py loaded Open MPI", "/opt/ompi/bin/mpirun"]),
        (PMI2, None, OMPI5, ["srun --mpi=pmi2 started 4 ranks", "mpi4py loaded Open MPI", "`srun --mpi=pmix`"]),
        (PMIX, None, MPICH, ["srun --mpi=pmix started 4 ranks", "or abort", "`srun --mpi=pmi2`"]),
        (STEP, 1, OMPI5, ["srun --mpi=none started 4 ranks", "sees a world of 1", "`srun --mpi=pmix`"]),
        (STEP, 1, MPICH, ["srun --mpi=none started 4 ranks", "sees a world of 1", "`srun --mpi=pmi2`"]),
        (STEP, 1, INTEL, ["sees a world of 1", "the launcher that belongs to that library"]),
        (PMI2, 1, OMPI4, ["srun --mpi=pmi2 started 4 ranks", "sees a world of 1", "`srun --mpi=pmix`"]),
        (MPIRUN, 1, OMPI4, ["Open MPI v4.1.4", "sees a world of 1", "/usr/bin/mpirun"]),
        (MPIRUN, 2, OMPI5, ["started 4 ranks", "sees a world of 2"]),
        (HYDRA, 1, MPICH_PMIX, ["sees a world of 1", "mpiexec.hydra of that MPICH (none was found"]),
        (TORCHRUN, 1, OMPI5, ["torchrun started 4 ranks", "sees a world of 1", "use /opt/ompi/bin/mpirun"]),
    ],
)
def test_problems_name_the_remedy(env: dict[str, str], mpi_size: int | None, library: Library, says: list[str]) -> None:
    problem = launch_problem(launcher_from_env(env), mpi_size, library)
    assert problem is not None
    assert library.line in problem
    for part in says:
        assert part in problem


@pytest.mark.parametrize(
    ("env", "library", "says"),
    [
        pytest.param(BATCH, OMPI5, "a world of one in a job of 4 tasks", id="a batch script's own python"),
        pytest.param(PMI2, OMPI4, "if MPI ends this process now", id="Open MPI 4 that may abort in MPI_Init"),
        pytest.param(STEP, OMPI4, "`srun --mpi=pmix`", id="the same without a --mpi"),
    ],
)
def test_hints(env: dict[str, str], library: Library, says: str) -> None:
    hints = launch_hints(env, library)
    assert len(hints) == 1
    assert says in hints[0]


@pytest.mark.parametrize(
    ("env", "library"),
    [
        ({}, OMPI5),
        (BATCH | {"SLURM_NTASKS": "1"}, OMPI5),
        (PMIX, OMPI4),
        (PMI2, MPICH),
        (MPIRUN | HELPER, OMPI4),
        (HELPER, OMPI4),
        (HYDRA | HELPER, MPICH),
    ],
)
def test_no_hints(env: dict[str, str], library: Library) -> None:
    assert launch_hints(env, library) == []


@pytest.mark.parametrize(
    ("files", "mixed"),
    [
        (["/a/libmpi.so.40", "/a/libopen-pal.so.80", "/a/libmpi_mpifh.so.40"], False),
        (["/usr/lib/libmpich.so.12"], False),
        (["/a/libmpi.so.40", "/b/libmpi.so.12"], True),
        (["/a/libmpi.so.40", "/usr/lib/libmpich.so.12"], True),
        ([], False),
    ],
)
def test_mixed_libraries(files: list[str], mixed: bool) -> None:
    said = mixed_libraries(files)
    assert (said is not None) == mixed
    if said is not None:
        assert all(file in said for file in files)


def test_ranks_with_other_libraries_are_named() -> None:
    assert library_differs(["v1"] * 3) is None
    assert "v1 on rank 0, 2; v2 on rank 1;" in str(library_differs(["v1", "v2", "v1"]))
    assert "on rank 0, 1, 2, 3, 4, 5, 6, 7, ...; v2 on rank 40" in str(library_differs(["v1"] * 40 + ["v2"]))
