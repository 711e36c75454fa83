"""How a process that cannot call MPI_Finalize takes leave of its launcher."""

from __future__ import annotations

import os
import socket
import threading

import pytest

from hpc_inflight import _mpi

PMIX = "/site/lib/libpmix.so.2"
HYDRA = {"PMI_SIZE": "2", "PMI_RANK": "0", "MPI_LOCALRANKID": "0", "PMI_FD": "9"}
MPIRUN = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}
SRUN_PMIX = {"PMIX_RANK": "0", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
SRUN_PMI2 = {"PMI_SIZE": "2", "PMI_RANK": "0", "PMI_FD": "9", "SLURM_STEP_ID": "0"}


@pytest.mark.parametrize(
    ("env", "mapped", "says"),
    [
        pytest.param(MPIRUN, [PMIX], ["pmix"], id="mpirun"),
        pytest.param(SRUN_PMIX, [PMIX], ["pmix"], id="srun pmix"),
        pytest.param(MPIRUN, [], [], id="mpirun without a PMIx library"),
        pytest.param(HYDRA, [], ["hydra on 9"], id="hydra"),
        pytest.param(HYDRA, [PMIX], ["hydra on 9"], id="hydra, and an MPICH that could speak PMIx"),
        pytest.param(HYDRA | {"MPIR_CVAR_PMI_VERSION": "2"}, [], [], id="hydra's other protocol"),
        pytest.param(HYDRA | {"PMI_FD": ""}, [], [], id="hydra over a port"),
        pytest.param(SRUN_PMI2, [], [], id="srun pmi2"),
        pytest.param({}, [PMIX], [], id="no launcher"),
    ],
)
def test_each_launcher_is_told_in_its_own_protocol(
    env: dict[str, str], mapped: list[str], says: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    for name in [name for name in os.environ if name.startswith(("OMPI_", "PMI", "SLURM_", "MPI_", "HYD", "MPIR_"))]:
        monkeypatch.delenv(name)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(_mpi, "mapped_files", lambda: mapped)
    monkeypatch.setattr(_mpi, "_leave_pmix", lambda _path: said.append("pmix"))
    monkeypatch.setattr(_mpi, "_leave_hydra", lambda descriptor, _timeout_s: said.append(f"hydra on {descriptor}"))
    _mpi.leave_launcher(30.0)
    assert said == says


@pytest.mark.parametrize("answers", [True, False], ids=["answers", "silent"])
def test_hydra_is_told_that_the_rank_is_at_the_end_and_then_that_it_leaves(answers: bool) -> None:
    mine, theirs = _pair()
    heard: list[bytes] = []

    def hydra() -> None:
        for reply in (b"cmd=barrier_out\n", b"cmd=finalize_ack rc=0\n"):
            heard.append(os.read(theirs, 256))
            if answers:
                os.write(theirs, reply)

    thread = threading.Thread(target=hydra)
    thread.start()
    _mpi._leave_hydra(mine, 30.0 if answers else 0.2)
    thread.join(30)
    assert b"".join(heard) == b"cmd=barrier_in\ncmd=finalize\n"
    os.close(mine)
    os.close(theirs)


def test_a_launcher_that_has_gone_is_no_failure() -> None:
    mine, theirs = _pair()
    os.close(theirs)
    _mpi._leave_hydra(mine, 30.0)
    os.close(mine)


def _pair() -> tuple[int, int]:
    mine, theirs = socket.socketpair()
    return mine.detach(), theirs.detach()
