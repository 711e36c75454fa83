"""Predict, as a flight leaves, whether it will arrive more than 15 minutes late.

Run it alone (a world of one) or under a launcher::

    python -m hpc_inflight.examples.flights
    mpirun -n 4 python -m hpc_inflight.examples.flights

The model (``flights_model``) is a small DLRM with its embedding tables split over the ranks. In every step eager code
issues the all_to_all of the rows, the bottom MLP runs meanwhile, and a ``torch.compile(fullgraph=True)`` region waits
for the rows: the overlap that ``allow_inflight_collective_as_graph_input`` is for. The same batch size and seed give
the same losses for any number of ranks, up to rounding. With ``--checkpoint DIR`` it stops at SIGUSR1 with a checkpoint
there, and goes on from it when started again.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from dataclasses import asdict, dataclass, field
from enum import Enum
from itertools import islice
from pathlib import Path  # noqa: TC003  # typer reads the annotations at run time
from statistics import median
from typing import TYPE_CHECKING, Annotated

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import hpc_inflight as hi
from hpc_inflight import work_registry
from hpc_inflight.examples.flights_checkpoint import CheckpointError, Checkpoints, StopSignal
from hpc_inflight.examples.flights_data import Examples, FlightsData, FlightsDataError, load_flights
from hpc_inflight.examples.flights_model import ShardedDLRM, TableSharding

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TABLE_LR_FACTOR = 3.0
"""Adagrad's steps on the tables shrink quickly, so they start larger than Adam's on the dense layers."""

PLAIN_LINES = 10
"""Progress lines in all when the output is not a terminal."""


class Device(str, Enum):
    """Where the model is trained."""

    CPU = "cpu"
    CUDA = "cuda"


class Backend(str, Enum):
    """Backends of ``torch.compile`` that the over-arch may be compiled with."""

    EAGER = "eager"
    AOT_EAGER = "aot_eager"
    INDUCTOR = "inductor"


@dataclass(frozen=True)
class Options:
    """What the command line sets for the training."""

    epochs: int
    batch: int
    steps: int | None
    lr: float
    dim: int
    seed: int
    backend: Backend
    evaluate: bool
    device: torch.device
    checkpoint: Path | None = None
    checkpoint_every: int | None = None


@dataclass
class Training:
    """What the training loop measured, one entry a step; the losses are global, the times this rank's.

    Attributes:
        losses: Those of the steps before a resumed checkpoint, too.
        stopped: The checkpoint with which a signal ended the training before its end.
    """

    losses: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    wait_s: list[float] = field(default_factory=list)
    stopped: Path | None = None


@dataclass(frozen=True)
class Quality:
    """How well the held-out flights are predicted, beside two baselines."""

    auc: float
    log_loss: float
    logistic_auc: float
    logistic_log_loss: float
    base_rate_log_loss: float


@dataclass(frozen=True)
class Report:
    """The final numbers; the waits and works are summed over the ranks, the times are those of rank 0."""

    ranks: int
    backend: str
    steps: int
    flights_total: int
    flights_train: int
    flights_test: int
    flights_cancelled: int
    flights_diverted: int
    compiled_waits: int
    compiled_waits_found: int
    works_unwaited: int
    works_inflight: int
    step_ms_median: float
    wait_ms_median: float
    total_s: float
    quality: Quality | None


def train(model: ShardedDLRM, data: Examples, options: Options, console: Console) -> Training:
    """Train on shuffled global batches; each rank takes its contiguous slice of every batch."""
    optimizers: tuple[torch.optim.Optimizer, ...] = (
        torch.optim.Adam(model.dense_parameters(), lr=options.lr),
        torch.optim.Adagrad(model.tables.parameters(), lr=TABLE_LR_FACTOR * options.lr),
    )
    total = options.epochs * (len(data) // options.batch)
    total = total if options.steps is None else min(total, options.steps)
    schedules = [torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.05, total_iters=total) for o in optimizers]
    checkpoints = stop = None
    done = Training()
    if options.checkpoint is not None:
        shared = {name: getattr(options, name) for name in ("epochs", "batch", "steps", "lr", "dim", "seed")}
        checkpoints = Checkpoints(options.checkpoint, shared, model, optimizers, schedules)
        stop = StopSignal()
        done.losses += checkpoints.load()
        if done.losses:
            console.print(f"resumed after step {len(done.losses)}")
    with _progress(console, total) as show:
        for batch in islice(_batches(len(data), options), len(done.losses), total):
            started, waited_s = time.perf_counter(), work_registry.counts().wait_s
            batch = batch.to(options.device)  # noqa: PLW2901  # the same rows, where the data is
            own = batch[model.sharding.own_slice]
            loss = model.forward_backward(data.dense[own], data.sparse[batch], data.late[own])
            for optimizer, schedule in zip(optimizers, schedules, strict=True):
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
            done.losses.append(loss.item())
            done.step_s.append(time.perf_counter() - started)
            done.wait_s.append(work_registry.counts().wait_s - waited_s)
            show(done)
            steps = len(done.losses)
            if checkpoints is None or stop is None or steps == total:
                continue
            if stop.on_any_rank():
                done.stopped = checkpoints.save(done.losses)
                break
            if options.checkpoint_every is not None and steps % options.checkpoint_every == 0:
                checkpoints.save(done.losses)
    return done


def predict(model: ShardedDLRM, data: Examples, batch: int) -> torch.Tensor | None:
    """Return the logits of all flights on rank 0 and None on the others; every rank predicts its slices."""
    parts = []
    for start in range(0, len(data), batch):
        # The compiled region has static shapes, so the last batch repeats the last flight.
        rows = torch.arange(start, start + batch, device=data.late.device).clamp_(max=len(data) - 1)
        parts.append(model.predict(data.dense[rows[model.sharding.own_slice]], data.sparse[rows]))
    own = torch.stack(parts)
    is_root = model.sharding.rank == 0
    gathered = [torch.empty_like(own) for _ in range(model.sharding.world_size)] if is_root else None
    dist.gather(own, gathered, dst=0)
    return torch.cat(gathered, dim=1).flatten()[: len(data)].cpu() if gathered is not None else None


def measure(logits: torch.Tensor, data: FlightsData) -> Quality:
    """Score the logits of the held-out flights, and two baselines fitted to the training flights."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import log_loss, roc_auc_score

    late = data.test.late.numpy()
    predicted = torch.sigmoid(logits.double()).numpy()
    logistic = LogisticRegression(max_iter=1000).fit(data.train.dense.numpy(), data.train.late.numpy())
    logistic_predicted = logistic.predict_proba(data.test.dense.numpy())[:, 1]
    base_rate = torch.full_like(data.test.late, data.train.late.double().mean().item(), dtype=torch.float64)
    return Quality(
        auc=float(roc_auc_score(late, predicted)),
        log_loss=float(log_loss(late, predicted)),
        logistic_auc=float(roc_auc_score(late, logistic_predicted)),
        logistic_log_loss=float(log_loss(late, logistic_predicted)),
        base_rate_log_loss=float(log_loss(late, base_rate.numpy())),
    )


def _batches(flights: int, options: Options) -> Iterator[torch.Tensor]:
    """Yield the rows of every global batch; the order hangs on the seed alone. A ragged last batch is dropped."""
    for epoch in range(options.epochs):
        generator = torch.Generator().manual_seed(1000 * options.seed + epoch)
        order = torch.randperm(flights, generator=generator)
        yield from order[: flights - flights % options.batch].split(options.batch)


@contextlib.contextmanager
def _progress(console: Console, total: int) -> Iterator[Callable[[Training], None]]:
    """Give a function that shows the newest step: in a progress bar on a terminal, else a line now and then."""
    if not console.is_terminal:
        every = max(1, total // PLAIN_LINES)

        def show_line(done: Training) -> None:
            step = len(done.losses)
            if step % every == 0 or step == total:
                console.print(f"step {step}/{total}  loss {done.losses[-1]:.4f}  {1e3 * done.step_s[-1]:.1f} ms")

        yield show_line
        return
    columns = (*Progress.get_default_columns(), TimeElapsedColumn(), TextColumn("loss {task.fields[loss]:.4f}"))
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("training", total=total, loss=float("nan"))
        yield lambda done: bar.update(task, completed=len(done.losses), loss=done.losses[-1])


def show_report(report: Report, console: Console) -> None:
    """Print the final numbers."""
    rows = [
        ("ranks, backend", f"{report.ranks}, {report.backend}"),
        ("flights used", f"{report.flights_train:,} for training, {report.flights_test:,} held out"),
        ("flights left out", f"{report.flights_cancelled:,} cancelled, {report.flights_diverted:,} diverted"),
        ("step, median", f"{report.step_ms_median:.2f} ms over {report.steps} steps"),
        ("of which waiting for rows", f"{report.wait_ms_median:.3f} ms"),
        ("compiled waits that found their work", f"{report.compiled_waits_found} of {report.compiled_waits}"),
        ("works never waited for", f"{report.works_unwaited}, and {report.works_inflight} left in flight"),
        ("time in all", f"{report.total_s:.1f} s"),
    ]
    if report.quality is not None:
        q = report.quality
        rows += [
            ("AUC", f"{q.auc:.4f} (logistic regression {q.logistic_auc:.4f})"),
            ("log loss", f"{q.log_loss:.4f} (logistic regression {q.logistic_log_loss:.4f})"),
            ("log loss of the base rate", f"{q.base_rate_log_loss:.4f}"),
        ]
    table = Table(title="Late arrivals, New York City 2013", show_header=False)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def run(data: FlightsData, options: Options, world: hi.World, console: Console) -> tuple[Report, Training]:
    """Train and evaluate; every rank calls it, and rank 0's report is the one to read."""
    started, before = time.perf_counter(), work_registry.counts()
    local_batch = options.batch // world.world_size
    sharding = TableSharding(len(data.table_rows), options.dim, local_batch, world.rank, world.world_size)
    features = data.train.dense.shape[1]
    model = ShardedDLRM(
        features,
        data.table_rows,
        sharding,
        backend=options.backend.value,
        seed=options.seed,
        device=options.device,
    )
    training = train(model, data.train.to(options.device), options, console)
    found = work_registry.counts().waited_by_tensor - before.waited_by_tensor
    test = data.test.to(options.device)
    logits = predict(model, test, options.batch) if options.evaluate and training.stopped is None else None
    work_registry.sweep()  # Otherwise unwaited works are counted only as others are issued.
    unwaited = work_registry.counts().unwaited - before.unwaited
    tally = torch.tensor([len(training.step_s), found, unwaited, len(hi.inflight())])
    dist.all_reduce(tally)
    waits, waits_found, works_unwaited, works_inflight = (int(number) for number in tally)
    report = Report(
        ranks=world.world_size,
        backend=options.backend.value,
        steps=len(training.losses),
        flights_total=data.total,
        flights_train=len(data.train),
        flights_test=len(data.test),
        flights_cancelled=data.cancelled,
        flights_diverted=data.diverted,
        compiled_waits=waits,
        compiled_waits_found=waits_found,
        works_unwaited=works_unwaited,
        works_inflight=works_inflight,
        step_ms_median=1e3 * median(training.step_s or [0.0]),  # a finished training that is resumed has none
        wait_ms_median=1e3 * median(training.wait_s or [0.0]),
        quality=measure(logits, data) if logits is not None else None,
        total_s=time.perf_counter() - started,
    )
    return report, training


def _stop(message: str, world: hi.World) -> typer.Exit:
    """End the world over a mistake that every rank sees; rank 0 speaks, before a launcher can stop it."""
    if world.rank == 0:
        typer.echo(f"flights: {message}", err=True)
    hi.finalize()
    return typer.Exit(code=2)


def _start(device: Device, batch: int) -> hi.World:
    """Make the world, if its ranks have the device and can share the batch."""
    world = hi.init(timeout_s=600, device="cpu" if device is Device.CPU else None)
    if world.device.type != device.value:
        raise _stop("--device: a GPU on every rank is expected for cuda, found none; leave it out for cpu", world)
    if batch % world.world_size:
        raise _stop(
            f"--batch: a multiple of the {world.world_size} ranks is expected, found {batch}; "
            f"use {batch + -batch % world.world_size}, or another number of ranks",
            world,
        )
    if device is Device.CUDA:
        torch.cuda.set_device(world.device)
    return world


def main(
    *,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the training flights.")] = 3,
    batch: Annotated[int, typer.Option(min=1, help="Global batch: a multiple of the number of ranks.")] = 2048,
    steps: Annotated[int | None, typer.Option(min=1, help="Stop after this many steps.")] = None,
    lr: Annotated[float, typer.Option(help="Adam's learning rate; the tables' is 3 times that.")] = 1e-3,
    dim: Annotated[int, typer.Option(min=1, help="Width of the embeddings.")] = 16,
    seed: Annotated[int, typer.Option(help="Seed of the initial weights and of the order of the flights.")] = 0,
    backend: Annotated[Backend, typer.Option(help="Backend of torch.compile.")] = Backend.INDUCTOR,
    device: Annotated[Device, typer.Option(help="cuda trains on each rank's GPU, over NCCL.")] = Device.CPU,
    evaluate: Annotated[bool, typer.Option(help="Predict the held-out flights and fit the baselines.")] = True,
    validate: Annotated[
        bool, typer.Option(help="Hold out September instead of October to December: to choose options.")
    ] = False,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Stop at SIGUSR1 with a checkpoint in this folder, and resume from one there.")
    ] = None,
    checkpoint_every: Annotated[int | None, typer.Option(min=1, help="Write one every so many steps, too.")] = None,
    losses_json: Annotated[Path | None, typer.Option(help="Write the global loss of every step here.")] = None,
    report_json: Annotated[Path | None, typer.Option(help="Write the final numbers here.")] = None,
) -> None:
    """Predict which flights from New York City arrive late, with embedding tables split over the ranks."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # The ranks share the node's cores, and the matrices are small.
    world = _start(device, batch)
    options = Options(
        epochs, batch, steps, lr, dim, seed, backend, evaluate, world.device, checkpoint, checkpoint_every
    )
    try:
        data = load_flights(validate=validate)
    except FlightsDataError as error:
        raise _stop(str(error), world) from error
    if batch > len(data.train):
        raise _stop(f"--batch: at most the {len(data.train)} training flights are expected, found {batch}", world)
    # Open MPI gives a rank a pseudo-terminal for its output even where mpirun writes to a file, but not for errors.
    is_terminal = sys.stdout.isatty() and sys.stderr.isatty()
    console = Console(quiet=world.rank != 0, force_terminal=is_terminal)
    try:
        report, training = run(data, options, world, console)
    except CheckpointError as error:
        raise _stop(str(error), world) from error
    if training.stopped is not None:
        console.print(f"stopped by SIGUSR1 after step {len(training.losses)}; start again to go on")
    elif world.rank == 0:
        show_report(report, console)
        if losses_json is not None:
            losses_json.write_text(json.dumps(training.losses), encoding="utf-8")
        if report_json is not None:
            report_json.write_text(json.dumps(asdict(report), indent=2), encoding="utf-8")
    hi.finalize(timeout_s=600)  # The other ranks are here while rank 0 fits the baselines.


if __name__ == "__main__":
    typer.run(main)
