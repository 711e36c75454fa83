"""The batch scripts that `hpc-inflight slurm` prints."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

from hpc_inflight.cli import app
from hpc_inflight.cli.slurm import Script, slurm_script

PLAIN = Script(mpi="pmix", command=("python", "train.py"), nodes=2, ranks_per_node=4)


def test_a_whole_script() -> None:
    assert slurm_script(replace(PLAIN, gpus_per_rank=1, cpus_per_rank=8, setup=("module load openmpi",))) == (
        "#!/usr/bin/env bash\n"
        "#SBATCH --job-name=train\n"
        "#SBATCH --nodes=2\n"
        "#SBATCH --ntasks-per-node=4\n"
        "#SBATCH --cpus-per-task=8\n"
        "#SBATCH --gpus-per-task=1\n"
        "#SBATCH --time=01:00:00\n"
        "#SBATCH --output=%x-%j.out\n"
        "set -euo pipefail\n"
        "\n"
        "module load openmpi\n"
        "export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}\n"
        "exec srun --mpi=pmix --kill-on-bad-exit=1 --cpus-per-task=8 python train.py\n"
    )


@pytest.mark.parametrize(
    ("changes", "has", "has_not"),
    [
        ({}, ["--mpi=pmix", "exec srun"], ["gpus", "cpus-per-task=", "requeue", "array", "partition", "account"]),
        ({"mpi": "pmi2"}, ["srun --mpi=pmi2"], ["pmix"]),
        ({"array": "0-3"}, ["#SBATCH --array=0-3", "--output=%x-%A_%a.out"], ["%j"]),
        ({"partition": "gpu", "account": "a1"}, ["#SBATCH --partition=gpu", "#SBATCH --account=a1"], []),
        (
            {"requeue_s": 90},
            [
                "#SBATCH --signal=B:USR1@90",
                "#SBATCH --requeue",
                "#SBATCH --open-mode=append",
                "scontrol requeue",
                "train.py &",
            ],
            ["exec srun"],
        ),
        ({"command": ("python", "a b.py", "--x=$HOME")}, ["python 'a b.py' '--x=$HOME'"], []),
    ],
)
def test_options(changes: dict[str, Any], has: list[str], has_not: list[str]) -> None:
    text = slurm_script(replace(PLAIN, **changes))
    for part in has:
        assert part in text
    for part in has_not:
        assert part not in text
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0  # noqa: S607  # bash it is


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck comes with the dev extra")
def test_shellcheck_has_nothing_to_say() -> None:
    text = slurm_script(replace(PLAIN, requeue_s=90, cpus_per_rank=2))
    done = subprocess.run(["shellcheck", "-"], input=text, text=True, capture_output=True, check=False)  # noqa: S607
    assert done.returncode == 0, done.stdout


def test_the_command_s_own_options_are_its_own() -> None:
    done = CliRunner().invoke(app, ["slurm", "--mpi", "pmi2", "--nodes", "3", "python", "x.py", "--nodes", "7", "-v"])
    assert done.exit_code == 0, done.output
    assert "#SBATCH --nodes=3\n" in done.output
    assert done.output.endswith("srun --mpi=pmi2 --kill-on-bad-exit=1 python x.py --nodes 7 -v\n")


@pytest.mark.parametrize(
    "arguments", [["--nodes", "0"], ["--time", "an hour"], ["--name", "a b"], ["--partition", "x\n#SBATCH --y"]]
)
def test_bad_options_are_refused(arguments: list[str]) -> None:
    assert CliRunner().invoke(app, ["slurm", "--mpi", "pmi2", *arguments]).exit_code == 2
