"""Checkpoints of the flights example without Slurm: another number of ranks, other options, a broken one."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from hpc_inflight.testing.launch import run_plain, run_ranks

if TYPE_CHECKING:
    from pathlib import Path

PROGRAM = ["-m", "hpc_inflight.examples.flights", "--no-evaluate", "--backend", "eager", "--steps", "24"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], Path]:
    """The losses of two ranks, and the checkpoint that they wrote after step 20 of 24."""
    folder = tmp_path_factory.mktemp("flights")
    losses, checkpoint = folder / "losses.json", folder / "checkpoint"
    options = ["--checkpoint", str(checkpoint), "--checkpoint-every", "10", "--losses-json", str(losses)]
    run_ranks(2, [*PROGRAM, *options], timeout_s=300, check=True)
    assert sorted(path.name for path in checkpoint.iterdir()) == ["latest.json", "step-20"]
    return json.loads(losses.read_text()), checkpoint


def test_another_number_of_ranks_goes_on_from_it(two_ranks: tuple[list[float], Path], tmp_path: Path) -> None:
    expected, checkpoint = two_ranks
    shutil.copytree(checkpoint, tmp_path / "checkpoint")
    losses = tmp_path / "losses.json"
    options = ["--checkpoint", str(tmp_path / "checkpoint"), "--losses-json", str(losses)]
    run = run_plain([*PROGRAM, *options], timeout_s=300, check=True)
    assert "resumed after step 20" in run.stdout
    found = json.loads(losses.read_text())
    assert found[:20] == expected[:20]
    assert found[20:] == pytest.approx(expected[20:], abs=1e-4)
    # without the restored optimizers and rates they would be others
    assert len(set(found)) == 24


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--lr", "0.5"], "holds a training with lr 0.001, found 0.5; use the same options, or another folder"),
        ([], "a checkpoint's description is expected"),
    ],
)
def test_what_cannot_be_resumed_is_said(
    two_ranks: tuple[list[float], Path], tmp_path: Path, options: list[str], says: str
) -> None:
    shutil.copytree(two_ranks[1], tmp_path / "checkpoint")
    if not options:
        (tmp_path / "checkpoint" / "latest.json").write_text("[]")
    run = run_plain([*PROGRAM, *options, "--checkpoint", str(tmp_path / "checkpoint")], timeout_s=300)
    assert run.returncode == 2
    assert says in run.stderr
    assert "Traceback" not in run.stderr


def test_the_signal_stops_with_a_checkpoint(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    command = [sys.executable, "-u", *PROGRAM[:-2], "--checkpoint", str(checkpoint)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        try:
            while not (line := job.stdout.readline()).startswith("step "):
                assert line, "it ended before its first line of progress"
            job.send_signal(signal.SIGUSR1)
            rest = job.stdout.read()
            assert job.wait(timeout=500) == 0
        finally:
            job.kill()
    assert "stopped by SIGUSR1 after step" in rest
    assert (checkpoint / "latest.json").exists()
