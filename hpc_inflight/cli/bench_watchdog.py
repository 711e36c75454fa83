"""``hpc-inflight bench watchdog``: what the watchdog adds to a training step."""

from __future__ import annotations

import statistics
import time
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from torch.nn.parallel import DistributedDataParallel

import hpc_inflight as hi
from hpc_inflight.watchdog import watchdog

_LOOKS = 1000


def watch(
    *,
    rounds: Annotated[int, typer.Option(min=4, help="Rounds with the watchdog and without, in turns.")] = 40,
    seconds: Annotated[float, typer.Option(min=0.1, help="Length of a round.")] = 1.0,
    groups: Annotated[int, typer.Option(min=0, help="Groups to watch beside the default one.")] = 8,
) -> None:
    """Train with and without the watchdog in turns, and print how their median steps compare and what a look takes."""
    world = hi.init(device="cpu")
    others = [dist.new_group(list(range(world.world_size))) for _ in range(groups)]
    torch.manual_seed(0)
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = torch.randn(64, 256)

    def step() -> None:
        optimizer.zero_grad()
        model(data).square().mean().backward()
        for group in others[:2]:
            dist.all_reduce(torch.ones(8), group=group, async_op=True)
        optimizer.step()

    began = time.perf_counter()
    for _ in range(20):
        step()
    count = torch.tensor(max(1, int(20 * seconds / (time.perf_counter() - began))))
    dist.broadcast(count, 0)  # all ranks take as many steps

    def step_s() -> float:
        dist.barrier()
        times = []
        for _ in range(int(count)):
            began = time.perf_counter()
            step()
            times.append(time.perf_counter() - began)
        dist.barrier()
        return statistics.median(times)

    added, alone = [], []
    for turn in range(rounds):
        took = {}
        for watched in (True, False) if turn % 2 else (False, True):
            (watchdog.start if watched else watchdog.stop)()
            took[watched] = step_s()
        added.append(100 * (took[True] / took[False] - 1))
        alone.append(took[False])
    watchdog.start()
    look = _look_s()
    if world.rank == 0:
        low, middle, high = statistics.quantiles(added, n=4)
        typer.echo(
            f"{world.world_size} ranks, {groups + 1} groups, a step of {1e3 * statistics.median(alone):.2f} ms: the "
            f"watchdog adds {middle:+.2f} % (half of {rounds} turns: {low:+.2f} to {high:+.2f} %); a look takes "
            f"{1e6 * look:.0f} us of a processor, {100 * look / watchdog.period_s:.3f} % of the time between two"
        )
    hi.finalize()


def _look_s() -> float:
    """Return the processor time of one look, with a work pending."""
    watchdog.stop()
    work = dist.all_reduce(torch.ones(1 << 20), async_op=True)
    began = time.thread_time()
    for _ in range(_LOOKS):
        watchdog.look()
    took = (time.thread_time() - began) / _LOOKS
    if work is not None:
        work.wait()
    return took
