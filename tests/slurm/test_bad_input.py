"""What a job script can get wrong: one sentence, a non-zero exit code, nothing left running."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.slurm.cluster import NODES

if TYPE_CHECKING:
    from tests.slurm.conftest import Site

RUN_SH = str(Path(__file__).resolve().parents[2] / "launch" / "run.sh")


def libmpi() -> dict[str, str]:
    """Name the MPI library of this environment for a Python of another one."""
    found = [*Path(sys.prefix, "lib").glob("libmpi.so.*"), *Path(sys.prefix, "lib").glob("libmpi.so")]
    return {"MPI4PY_LIBMPI": os.environ.get("MPI4PY_LIBMPI") or str(found[0])} if found else {}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["-n", "9", "true"], "9 ranks of 1 CPUs want 9, and the allocation has 4"),
        (["--nodes", "3", "true"], "--nodes 3: the allocation has 2; ask for more with sbatch or salloc --nodes=3"),
        (["-n", "3", "--ranks-per-node", "2", "true"], "these numbers contradict each other"),
        (["--tasks", "4", "true"], "there is no option --tasks"),
        (["no-such-command"], "no command 'no-such-command'"),
    ],
)
def test_one_sentence_and_2(site: Site, arguments: list[str], says: str) -> None:
    done = site.run("salloc", "--quiet", "--nodes=2", "--ntasks-per-node=2", RUN_SH, *arguments)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert says in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert site.left_over() == ""


def test_an_srun_that_fails_is_said(site: Site, tmp_path: Path) -> None:
    srun = tmp_path / "srun"
    srun.write_text("#!/bin/sh\necho 'srun: error: the controller is away' >&2\nexit 1\n")
    srun.chmod(0o755)
    program = f'PATH={tmp_path}:$PATH exec "$0" -n 2 true'
    done = site.run("salloc", "--quiet", "--nodes=1", "--ntasks=2", "sh", "-c", program, RUN_SH)
    assert done.returncode == 2
    assert "run.sh: `srun --mpi=list` failed: srun: error: the controller is away" in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr


def test_an_srun_without_the_plug_in_makes_way_for_the_mpi_s_own_launcher(site: Site, tmp_path: Path) -> None:
    real = site.run("sh", "-c", "command -v srun").stdout.strip()
    srun = tmp_path / "srun"
    srun.write_text(f'#!/bin/sh\n[ "$1" = --mpi=list ] && echo "none cray_shasta" && exit\nexec {real} "$@"\n')
    srun.chmod(0o755)
    program = (
        "import os; from mpi4py import MPI; c = MPI.COMM_WORLD; "
        "os.write(1, f'<{c.rank} of {c.size} on {os.uname().nodename}>\\n'.encode())"
    )
    script, output = tmp_path / "job", tmp_path / "out"
    script.write_text(f'#!/bin/sh\nPATH={tmp_path}:$PATH\nexec {RUN_SH} python -c "{program}"\n')
    job = site.wait(site.submit("--nodes=2", "--ntasks-per-node=2", f"--output={output}", str(script)), output)
    assert job.state == "COMPLETED", job.output
    for rank in range(4):
        assert f"<{rank} of 4 on n{1 + rank // 2}>" in job.output
    assert "this srun has no --mpi=pm" in job.output


@pytest.mark.parametrize(
    ("lacking", "says"),
    [
        pytest.param("venv", "n2 cannot run {python}: ", id="no environment"),
        pytest.param("packages", "n2 has no mpi4py for {python}: ", id="an environment without the packages"),
    ],
)
def test_a_node_without_the_package_is_named(site: Site, tmp_path: Path, lacking: str, says: str) -> None:
    own = site.cluster.root / "own"  # on each node another folder
    folders = {node: site.cluster.root / f"own-{node}" for node in NODES}
    try:
        for node, folder in folders.items():
            if lacking != "venv" or node == "n1":
                subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
            if lacking != "packages" or node == "n1":
                (folder / "packages").symlink_to(sysconfig.get_path("purelib"))
        env = {"VIRTUAL_ENV": str(own / "venv"), "PYTHONPATH": str(own / "packages"), **libmpi()}
        script, output = tmp_path / "job", tmp_path / "out"
        script.write_text(f"#!/bin/sh\n{RUN_SH} python -c 'print(1)'\n")
        job_id = site.submit("--nodes=2", "--ntasks-per-node=2", f"--output={output}", str(script), env=env)
        job = site.wait(job_id, output)
    finally:
        for folder in folders.values():
            shutil.rmtree(folder / "venv", ignore_errors=True)
            (folder / "packages").unlink(missing_ok=True)
    assert (job.state, job.exit_code) == ("FAILED", "2:0"), job.output
    expected = says.format(python=own / "venv" / "bin" / "python3") + "the environment must be on a file system"
    assert job.output.startswith(f"run.sh: {expected}"), job.output
    assert job.output.count("\n") == 1, job.output
    assert site.left_over() == ""
