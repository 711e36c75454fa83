"""``hpc-inflight bench nccl``: what issuing a collective on CUDA tensors costs, beside torch's own ProcessGroupNCCL."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table

import hpc_inflight as hi
from hpc_inflight import _cupy, _mpi
from hpc_inflight.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable

    Issue = Callable[[Any, bool], Any]

_BATCH = 20  # fewer than what makes a launch wait for the device
_ELEMENTS = 1024


def _collectives(size: int, device: torch.device) -> dict[str, Issue]:
    """Return calls that take a group and ``async_op``."""
    one, whole = torch.zeros(_ELEMENTS, device=device), torch.zeros(_ELEMENTS * size, device=device)
    other = torch.zeros_like(whole)
    return {
        "all_reduce": lambda group, later: dist.all_reduce(one, group=group, async_op=later),
        "all_gather_into_tensor": lambda group, later: dist.all_gather_into_tensor(whole, one, group, later),
        "reduce_scatter_tensor": lambda group, later: dist.reduce_scatter_tensor(
            one, whole, group=group, async_op=later
        ),
        "all_to_all_single": lambda group, later: dist.all_to_all_single(other, whole, group=group, async_op=later),
        "broadcast": lambda group, later: dist.broadcast(one, 0, group, later),
    }


def _batch(issue: Issue, group: Any, how: str) -> float:
    """Return the host's time for one call in us; what is issued is complete before and after."""
    kept = []
    started = time.perf_counter()
    if how == "issue":
        for _ in range(_BATCH):
            kept.append(issue(group, True))  # noqa: PERF401  # as a program would
    elif how == "issue + wait":
        for _ in range(_BATCH):
            issue(group, True).wait()
    else:
        for _ in range(_BATCH):
            issue(group, False)
    return 1e6 * (time.perf_counter() - started) / _BATCH


def _interleaved(issue: Issue, groups: dict[str, Any], how: str, rounds: int) -> dict[str, float]:
    """Return the median of each group; they take turns."""
    comm = _mpi.control_comm()
    times: dict[str, list[float]] = {name: [] for name in groups}
    for turn in range(rounds + 3):
        for name, group in groups.items():
            torch.cuda.synchronize()
            comm.Barrier()
            us = _batch(issue, group, how)
            if turn >= 3:  # noqa: PLR2004  # the first ones connect
                times[name].append(us)
    torch.cuda.synchronize()
    return {name: statistics.median(values) for name, values in times.items()}


def nccl(
    *,
    repeat: Annotated[float, typer.Option(min=0.01, help="Multiplies the number of rounds.")] = 1.0,
) -> None:
    """Compare the host's time for collectives of 1024 floats with ProcessGroupNCCL's, with one NCCL library."""
    world = hi.init()
    if world.device.type != "cuda":
        msg = "bench nccl: this rank has no GPU that torch can use; run it where there is one"
        raise UnsupportedError(msg)
    torch.cuda.set_device(world.device)
    groups = {"ours": dist.group.WORLD, "nccl": dist.new_group(backend="nccl")}
    rounds = max(5, int(50 * repeat))
    table = Table(title="medians in us: ProcessGroupNCCL, ours (ratio)")
    hows = ("issue", "issue + wait", "async_op=False")
    for column in ("", *hows):
        table.add_column(column, justify="right")
    for name, issue in _collectives(world.world_size, world.device).items():
        cells = []
        for how in hows:
            us = _interleaved(issue, groups, how, rounds)
            cells.append(f"{us['nccl']:.1f}, {us['ours']:.1f} ({us['ours'] / us['nccl']:.2f})")
        table.add_row(name, *cells)
    if world.rank == 0:
        version = _cupy.runtime().nccl_version
        typer.echo(
            f"{world.world_size} ranks, {torch.cuda.get_device_name()}, torch {torch.__version__}, NCCL {version}, "
            f"{_ELEMENTS} float32 per rank, batches of {_BATCH}, {rounds} rounds"
        )
        Console(width=120).print(table)
    dist.destroy_process_group(groups["nccl"])
    hi.finalize()
