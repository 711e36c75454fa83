"""``hpc-inflight bench drain``: what the drain adds to the beginning of a capture when nothing is in flight."""

from __future__ import annotations

import statistics
import threading
import time
from typing import Annotated

import torch
import torch.distributed as dist
import typer

import hpc_inflight as hi
from hpc_inflight import _gate, capture

_GROUPS = (1, 64)
_BATCH = 100


def drain(
    *,
    rounds: Annotated[int, typer.Option(min=3, help="Batches of 100 drains.")] = 30,
    device: Annotated[
        str, typer.Option(help="cpu, or cuda to have each group use its NCCL communicator once.")
    ] = "cpu",
) -> None:
    """Measure the drain and the marks of a capture, without the capture itself, with 1 group and with 64."""
    world = hi.init(device="cpu" if device == "cpu" else None)
    groups = [dist.group.WORLD]
    for count in _GROUPS:
        groups += [dist.new_group(list(range(world.world_size))) for _ in range(count - len(groups))]
        for group in groups:
            dist.all_reduce(torch.ones(4, device=world.device), group=group)
            dist.barrier(group)
        stand_in = threading.Event()  # for a graph: nothing is captured
        times = []
        for _ in range(rounds):
            started = time.perf_counter()
            for _ in range(_BATCH):
                capture.begin(lambda: None, stand_in, 10.0, "bench")
                _gate.capture_ended(stand_in)
            times.append(1e6 * (time.perf_counter() - started) / _BATCH)
        if world.rank == 0:
            typer.echo(f"drain of {count} groups on {device}: median {statistics.median(times):.1f} us")
    hi.finalize()
