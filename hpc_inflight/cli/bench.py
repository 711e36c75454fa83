"""``hpc-inflight bench``: what this package costs on this machine, always beside what it is compared with.

Machines are noisy: the sides of a comparison take turns in one run, and medians and ratios are printed.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table

import hpc_inflight as hi
from hpc_inflight import _mpi, work_registry

if TYPE_CHECKING:
    from collections.abc import Callable

app = typer.Typer(no_args_is_help=True, help="Measure what this package costs on this machine.")

_MIB = 1024 * 1024
_WARM_UP = 10_000
_SIZES = ((4, "4 B", 3000), (2**18, "256 KiB", 400), (2**22, "4 MiB", 100), (2**25, "32 MiB", 20))


def _resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / _MIB


@app.command()
def unwaited(
    *,
    count: Annotated[int, typer.Option(min=_WARM_UP + 1, help="Collectives to issue and never wait for.")] = 1_000_000,
    context: Annotated[bool, typer.Option(help="Issue them under the in-flight context.")] = False,
) -> None:
    """Issue asynchronous all_reduces that nobody waits for, and print how the resident memory grows."""
    world = hi.init()
    started, first = time.perf_counter(), 0.0
    with hi.allow_inflight_collective_as_graph_input() if context else contextlib.nullcontext():
        for i in range(count):
            dist.all_reduce(torch.ones(16), async_op=True)
            if i == _WARM_UP:
                first = _resident_mib()
    hi.wait_for_all_pending_works(timeout_s=60)
    seconds = time.perf_counter() - started
    work_registry.sweep()
    grown = torch.tensor([_resident_mib() - first])
    dist.all_reduce(grown, op=dist.ReduceOp.MAX)
    if world.rank == 0:
        typer.echo(
            f"{world.world_size} ranks, {count} un-waited all_reduces of 64 bytes {'inside' if context else 'outside'} "
            f"the context: resident memory grew by at most {grown.item():.1f} MiB after the first {_WARM_UP}, "
            f"{1e6 * seconds / count:.1f} us each, {len(hi.inflight())} left in flight"
        )
    hi.finalize()


def _sides(buffer: torch.Tensor, gloo: Any) -> dict[str, Callable[[], object]]:
    module = _mpi.mpi()
    comm = _mpi.control_comm()
    raw = [module.buffer.fromaddress(buffer.data_ptr(), buffer.nbytes), buffer.numel(), module.FLOAT]
    half = torch.zeros(buffer.numel() * 2, dtype=torch.bfloat16)
    op = dist.ReduceOp.MAX  # values stay what they are, however often it runs
    return {
        "raw": lambda: comm.Allreduce(module.IN_PLACE, raw, module.MAX),
        "sync": lambda: dist.all_reduce(buffer, op=op),
        "async": lambda: dist.all_reduce(buffer, op=op, async_op=True).wait(),
        "bf16": lambda: dist.all_reduce(half, op=op),
        "gloo": lambda: dist.all_reduce(buffer, op=op, group=gloo),
    }


@app.command("all-reduce")
def all_reduce(
    *,
    repeat: Annotated[float, typer.Option(min=0.01, help="Multiplies the number of rounds.")] = 1.0,
) -> None:
    """Compare float32 all_reduce with mpi4py's own Allreduce on the same buffer, and with Gloo."""
    world = hi.init()
    gloo = dist.new_group(backend="gloo")
    table = Table(title=f"float32 all_reduce, {world.world_size} ranks, medians in us (ratio to raw Allreduce)")
    for column in ("size", "raw mpi4py", "sync", "async + wait", "bf16, as many bytes (ratio to sync)", "Gloo"):
        table.add_column(column, justify="right")
    for size, label, rounds in _SIZES:
        sides = _sides(torch.zeros(size // 4), gloo)
        times: dict[str, list[float]] = {name: [] for name in sides}
        for i in range(max(3, int(rounds * repeat)) + 3):
            for name, call in sides.items():
                started = time.perf_counter()
                call()
                if i >= 3:  # noqa: PLR2004  # the first rounds warm up
                    times[name].append(1e6 * (time.perf_counter() - started))
        us = {name: statistics.median(values) for name, values in times.items()}
        table.add_row(
            label,
            f"{us['raw']:.1f}",
            f"{us['sync']:.1f} ({us['sync'] / us['raw']:.2f})",
            f"{us['async']:.1f} (+{us['async'] - us['sync']:.1f})",
            f"{us['bf16']:.1f} ({us['bf16'] / us['sync']:.2f})",
            f"{us['gloo']:.1f}",
        )
    if world.rank == 0:
        Console(width=120).print(table)
    hi.finalize()
