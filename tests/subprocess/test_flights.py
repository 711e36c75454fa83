"""The flights program as a whole job: one result on 1, 2 and 4 ranks, true gradients. Needs the examples extra."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from hpc_inflight.testing.launch import run_ranks

if TYPE_CHECKING:
    from pathlib import Path

PROGRAM = ["-m", "hpc_inflight.examples.flights"]
STEPS = 50
RUNS = {1: "eager", 2: "inductor", 4: "aot_eager"}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[list[float], dict[str, Any]]]:
    """Losses and report of a job of 1, 2 and 4 ranks; the smaller two predict the held-out flights too."""
    folder = tmp_path_factory.mktemp("flights")
    results = {}
    for ranks, backend in RUNS.items():
        losses, report = folder / f"losses{ranks}.json", folder / f"report{ranks}.json"
        options = ["--steps", str(STEPS), "--backend", backend, "--losses-json", losses, "--report-json", report]
        if ranks == 4:
            options.append("--no-evaluate")
        run_ranks(ranks, [*PROGRAM, *map(str, options)], timeout_s=900, check=True)
        results[ranks] = (json.loads(losses.read_text()), json.loads(report.read_text()))
    return results


def test_losses_agree_on_any_number_of_ranks(jobs: dict[int, tuple[list[float], dict[str, Any]]]) -> None:
    alone = jobs[1][0]
    assert len(alone) == STEPS
    for ranks in (2, 4):
        assert jobs[ranks][0] == pytest.approx(alone, abs=1e-4)


def test_losses_decrease(jobs: dict[int, tuple[list[float], dict[str, Any]]]) -> None:
    for losses, _ in jobs.values():
        # An untrained model is near ln 2 = 0.693; always predicting the base rate gives 0.554.
        assert sum(losses[:5]) / 5 > 0.65
        assert sum(losses[-5:]) / 5 < 0.5


def test_every_compiled_wait_found_its_work(jobs: dict[int, tuple[list[float], dict[str, Any]]]) -> None:
    for ranks, (_, report) in jobs.items():
        assert report["ranks"] == ranks
        assert report["backend"] == RUNS[ranks]
        assert report["steps"] == STEPS
        assert report["compiled_waits"] == STEPS * ranks
        assert report["compiled_waits_found"] == STEPS * ranks
        assert report["works_unwaited"] == 0
        assert report["works_inflight"] == 0


def test_evaluation_agrees_and_keeps_the_order_of_flights(
    jobs: dict[int, tuple[list[float], dict[str, Any]]],
) -> None:
    alone, two = jobs[1][1]["quality"], jobs[2][1]["quality"]
    assert alone["auc"] > 0.8  # In any other order of flights it is 0.5.
    for name in ("auc", "log_loss"):
        assert two[name] == pytest.approx(alone[name], abs=1e-4)
    # 59,340 of 244,737 are late in training (p = 0.24246), 18,290 of 82,609 held out (q = 0.22140):
    # -(q ln p + (1 - q) ln(1 - p)) = 0.529910
    assert two["base_rate_log_loss"] == pytest.approx(0.529910, abs=1e-5)
    assert jobs[4][1]["quality"] is None


def test_batch_that_the_ranks_do_not_divide_is_an_error() -> None:
    job = run_ranks(2, [*PROGRAM, "--batch", "2047", "--steps", "1"])
    assert job.returncode != 0
    assert "--batch: a multiple of the 2 ranks is expected, found 2047; use 2048" in job.stderr
    assert "Traceback" not in job.stderr + job.stdout


def test_a_device_that_is_not_there_is_an_error() -> None:
    job = run_ranks(None, [*PROGRAM, "--device", "cuda"], env={"CUDA_VISIBLE_DEVICES": ""})
    assert job.returncode == 2
    assert "--device: a GPU on every rank is expected for cuda, found none" in job.stderr
    assert "Traceback" not in job.stderr + job.stdout


GRADIENTS = """
import sys, time
import torch
import hpc_inflight as hi
from hpc_inflight.examples.flights_model import ShardedDLRM, TableSharding

world = hi.init(device="cpu")
rows, dim, local, features = [5, 7], 4, 6, 3
batch = local * world.world_size
inputs = torch.Generator().manual_seed(1)
dense = torch.randn(batch, features, generator=inputs)
sparse = torch.stack([torch.randint(0, n, (batch,), generator=inputs) for n in rows], dim=1)
late = torch.randint(0, 2, (batch,), generator=inputs).float()

# The reference: all tables on one rank, no exchange, no cut in the graph, nothing compiled.
alone = TableSharding(len(rows), dim, batch, 0, 1)
reference = ShardedDLRM(features, rows, alone, backend="eager", seed=3)
tables = reference.tables.weight.detach().clone().requires_grad_()
bottom = reference.bottom(dense)
first, second = tables[:5][sparse[:, 0]], tables[5:][sparse[:, 1]]
dots = [(bottom * first).sum(1), (bottom * second).sum(1), (first * second).sum(1)]
logits = reference.over_arch.mlp(torch.cat([bottom, first, second, torch.stack(dots, 1)], 1)).squeeze(1)
loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, late)
loss.backward()

sharding = TableSharding(len(rows), dim, local, world.rank, world.world_size)
model = ShardedDLRM(features, rows, sharding, backend=sys.argv[1], seed=3)
for late_rank in range(world.world_size):
    # Every rank comes late once: on the others, only a wait that found its work sees the rows.
    time.sleep(0.3 * (world.rank == late_rank))
    own = sharding.own_slice
    for parameter in (*model.dense_parameters(), model.tables.weight):
        parameter.grad = None
    got = model.forward_backward(dense[own], sparse, late[own])
    torch.testing.assert_close(got, loss.detach())
    for mine, expected in zip(model.dense_parameters(), reference.dense_parameters(), strict=True):
        torch.testing.assert_close(mine.grad, expected.grad)
    low, high = (0, 5, 12)[sharding.own.start], (0, 5, 12)[sharding.own.stop]
    torch.testing.assert_close(model.tables.weight.detach(), tables.detach()[low:high])
    torch.testing.assert_close(model.tables.weight.grad, tables.grad[low:high])
assert hi.inflight() == [], hi.inflight()
hi.finalize()
print("gradients agree")
"""


@pytest.mark.parametrize(("ranks", "backend"), [(1, "inductor"), (3, "aot_eager"), (2, "eager")])
def test_gradients_are_those_of_the_unsharded_model(ranks: int, backend: str, tmp_path: Path) -> None:
    """With 3 ranks and 2 tables one rank owns none."""
    program = tmp_path / "gradients.py"
    program.write_text(GRADIENTS)
    job = run_ranks(ranks, [str(program), backend], check=True)
    assert job.stdout.count("gradients agree") == ranks
