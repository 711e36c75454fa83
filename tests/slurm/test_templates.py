"""The batch scripts in slurm/, as they are, and the one that `hpc-inflight slurm` prints."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hpc_inflight.topology import Place, device_index, device_problem
from tests.slurm.cluster import GPUS

if TYPE_CHECKING:
    from tests.slurm.conftest import Job, Site

ROOT = Path(__file__).resolve().parents[2]
TRAINING = ["--no-evaluate", "--backend", "eager"]
LONG = 200

pytestmark = pytest.mark.timeout(1800)


def submit(site: Site, output: Path, template: str, *arguments: str, options: tuple[str, ...] = ()) -> str:
    return site.submit(*options, f"--output={output}", str(ROOT / "slurm" / template), *arguments)


def completed(job: Job) -> str:
    assert (job.state, job.exit_code) == ("COMPLETED", "0:0"), job.output
    return job.output


@pytest.fixture(scope="module")
def uninterrupted(site: Site, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of a training on 2 nodes with 2 ranks each, started by train.sbatch."""
    folder = tmp_path_factory.mktemp("train")
    losses, output = folder / "losses.json", folder / "out"
    program = ["python", "-m", "hpc_inflight.examples.flights", "--steps", str(LONG), "--losses-json", str(losses)]
    text = completed(site.wait(submit(site, output, "train.sbatch", *program, *TRAINING), output))
    assert re.search(r"ranks, backend +│ 4, eager", text), text
    found: list[float] = json.loads(losses.read_text())
    assert len(found) == LONG
    return found


@pytest.mark.slow
def test_train_trains(uninterrupted: list[float]) -> None:
    assert sum(uninterrupted[:5]) / 5 > 0.65
    assert sum(uninterrupted[-5:]) / 5 < 0.5


@pytest.mark.slow
def test_requeue_stops_queues_again_and_goes_on(site: Site, uninterrupted: list[float], tmp_path: Path) -> None:
    losses, output = tmp_path / "losses.json", tmp_path / "out"
    arguments = ["--steps", str(LONG), "--checkpoint", str(tmp_path / "checkpoint"), "--losses-json", str(losses)]
    job = submit(site, output, "requeue.sbatch", *arguments, *TRAINING)

    def until(what: str, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not re.search(what, output.read_text() if output.exists() else ""):
            assert site.field(job, "JobState") in {"PENDING", "RUNNING"}, output.read_text()
            assert time.monotonic() < deadline, f"no {what}:\n{output.read_text() if output.exists() else ''}"
            time.sleep(0.1)

    until(rf"step {LONG // 10}/{LONG} ", 500)
    # what Slurm does before the time limit, which it looks at twice a minute only
    assert site.run("scancel", "--batch", "--signal=USR1", job).returncode == 0
    until(r"stopped by SIGUSR1 after step \d+;", 500)
    stopped = int(re.findall(r"after step (\d+);", output.read_text())[0])
    assert LONG // 10 <= stopped < LONG
    deadline = time.monotonic() + 300
    while site.field(job, "JobState") != "PENDING":
        assert time.monotonic() < deadline, site.run("scontrol", "show", "job", job).stdout
        time.sleep(0.1)
    # a requeued job is held for two minutes; started in the second of its requeueing, its credential is refused
    time.sleep(2)
    assert site.run("scontrol", "update", f"jobid={job}", "starttime=now").returncode == 0
    text = completed(site.wait(job, output))
    assert f"resumed after step {stopped}" in text
    assert json.loads(losses.read_text()) == uninterrupted


def test_test_runs_the_tests(site: Site, tmp_path: Path) -> None:
    output = tmp_path / "out"
    job = submit(site, output, "test.sbatch", "-q", "-k", "world_facts", "tests/mpi/test_groups.py")
    assert "1 passed" in completed(site.wait(job, output))


@pytest.mark.slow
def test_array_sweeps(site: Site, tmp_path: Path) -> None:
    job = submit(
        site,
        tmp_path / "out-%a",
        "array.sbatch",
        # the script names a report in the folder it was submitted from; of two names the later one counts
        *["--steps", "3", "--report-json", str(tmp_path / "report.json"), *TRAINING],
        options=("--array=0-1",),
    )
    for task, rate in ((0, "3e-4"), (1, "1e-3")):
        text = completed(site.wait(f"{job}_{task}", tmp_path / f"out-{task}"))
        assert f"learning rate {rate}" in text
        assert "step 3/3" in text


# one file a rank: lines of several nodes in one file may be cut
SHOW = 'echo "${CUDA_VISIBLE_DEVICES-unset}" >"$0/$SLURM_PROCID"'


@pytest.mark.parametrize(
    ("options", "wrapper", "masks"),
    [
        pytest.param((), (), ["0", "1", "0", "1"], id="one GPU each: --gpus-per-task=1"),
        pytest.param(
            ("--gpus-per-node=2",), (), ["0,1"] * 4, id="all see all: --gpus-per-node in place of --gpus-per-task"
        ),
        pytest.param(("--gpus-per-node=2", "--gpu-bind=none"), (), ["unset"] * 4, id="not bound: no mask at all"),
        pytest.param(
            ("--gpus-per-node=2",), (str(ROOT / "launch" / "bind_gpu.sh"),), ["0", "1", "0", "1"], id="bind_gpu.sh"
        ),
    ],
)
def test_every_rank_finds_a_gpu_of_its_own(
    site: Site, tmp_path: Path, options: tuple[str, ...], wrapper: tuple[str, ...], masks: list[str]
) -> None:
    template = tmp_path / "train.sbatch"
    text = (ROOT / "slurm" / "train.sbatch").read_text()
    if options:
        assert "#SBATCH --gpus-per-task=1\n" in text
        text = text.replace("#SBATCH --gpus-per-task=1\n", "")
    template.write_text(text)
    output = tmp_path / "out"
    program = [*wrapper, "sh", "-c", SHOW, str(tmp_path)]
    job = site.submit(*options, f"--output={output}", str(template), *program)
    completed(site.wait(job, output))
    found = [(tmp_path / str(rank)).read_text().strip() for rank in range(4)]
    assert found == masks
    every = ",".join(map(str, range(GPUS)))  # what CUDA shows without a mask
    seen = [every if mask == "unset" else mask for mask in found]
    places = [
        Place(
            rank - rank % 2,
            rank % 2,
            f"n{rank // 2}",
            len(gpus.split(",")),
            None if found[rank] == "unset" else gpus,
            "",
        )
        for rank, gpus in enumerate(seen)
    ]
    assert device_problem(places) is None
    used = [seen[r].split(",")[device_index(p.visible, p.local_rank) or 0] for r, p in enumerate(places)]
    assert used == ["0", "1", "0", "1"]


def test_the_printed_script_runs_info_on_two_nodes(site: Site, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hpc_inflight"]
    program = [*command, "info", "--json"]
    printed = site.run(*command, "slurm", "--nodes", "2", "--ranks-per-node", "2", "--name", "doctor", *program)
    assert printed.returncode == 0, printed.stderr
    script, output, errors = tmp_path / "doctor.sbatch", tmp_path / "out", tmp_path / "err"
    script.write_text(printed.stdout)
    text = completed(site.wait(site.submit(f"--output={output}", f"--error={errors}", str(script)), output))
    report = json.loads(text)
    assert report["ok"] is True
    assert [(rank["hostname"], rank["node_rank"], rank["local_rank"]) for rank in report["ranks"]] == [
        ("n1", 0, 0),
        ("n1", 0, 1),
        ("n2", 1, 0),
        ("n2", 1, 1),
    ]
    assert {rank["launcher"] for rank in report["ranks"]} <= {"srun --mpi=pmix", "srun --mpi=pmi2"}
