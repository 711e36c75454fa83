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
    from collections.abc import Callable, Mapping

app = typer.Typer(no_args_is_help=True, help="Measure what this package costs on this machine.")

_MIB = 1024 * 1024
_WARM_UP = 10_000
_SIZES = ((4, "4 B", 3000), (2**18, "256 KiB", 400), (2**22, "4 MiB", 100), (2**25, "32 MiB", 50))


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


def _interleaved(sides: Mapping[str, Callable[[], object]], rounds: int, repeat: float) -> dict[str, float]:
    """Return the median time of each call in us; the sides take turns in batches that start together."""
    comm, batch = _mpi.control_comm(), 10
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(max(5, int(rounds * repeat / batch))):
        for name, call in sides.items():
            call()  # the first one finds the other side's memory in the caches
            comm.Barrier()
            started = time.perf_counter()
            for _ in range(batch):
                call()
            times[name].append(1e6 * (time.perf_counter() - started) / batch)
    return {name: statistics.median(values) for name, values in times.items()}


def _sides(buffer: torch.Tensor, gloo: Any) -> dict[str, Callable[[], object]]:
    module = _mpi.mpi()
    comm = _mpi.control_comm()
    raw = [module.buffer.fromaddress(buffer.data_ptr(), buffer.nbytes), buffer.numel(), module.FLOAT]
    half = torch.zeros(buffer.numel() * 2, dtype=torch.bfloat16)
    op = dist.ReduceOp.SUM  # of zeros, however often it runs
    return {
        "raw": lambda: comm.Allreduce(module.IN_PLACE, raw, module.SUM),
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
        us = _interleaved(_sides(torch.zeros(size // 4), gloo), rounds, repeat)
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


def _pairs(size: int, world_size: int) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """Return, per collective, mpi4py's own call and ours on the same buffers of ``size`` bytes per rank."""
    module, comm = _mpi.mpi(), _mpi.control_comm()
    part = torch.zeros(max(1, size // 4))
    whole = torch.zeros(part.numel() * world_size)
    pair, third = whole.clone(), whole.clone()
    parts, others = (
        [torch.zeros_like(part) for _ in range(world_size)],
        [torch.zeros_like(part) for _ in range(world_size)],
    )

    def raw(tensor: torch.Tensor, blocks: int = 1) -> list[Any]:
        memory = module.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)
        return [memory, tensor.numel() // blocks, module.FLOAT]

    one, all_, sent, again = raw(part), raw(whole, world_size), raw(pair, world_size), raw(third, world_size)

    def exchange() -> None:
        comm.Alltoall(sent, again)
        _ = third  # a buffer is an address and keeps nothing alive

    return {
        "broadcast": (lambda: comm.Bcast(one, 0), lambda: dist.broadcast(part, 0)),
        "all_gather_into_tensor": (
            lambda: comm.Allgather(one, all_),
            lambda: dist.all_gather_into_tensor(whole, part),
        ),
        "reduce_scatter_tensor": (
            lambda: comm.Reduce_scatter_block(all_, one, module.SUM),
            lambda: dist.reduce_scatter_tensor(part, whole, op=dist.ReduceOp.SUM),
        ),
        "all_to_all_single": (lambda: comm.Alltoall(sent, all_), lambda: dist.all_to_all_single(whole, pair)),
        "all_gather (list)": (lambda: comm.Allgather(one, all_), lambda: dist.all_gather(others, part)),
        "all_to_all (list)": (exchange, lambda: dist.all_to_all(others, parts)),
    }


@app.command()
def collectives(
    *,
    repeat: Annotated[float, typer.Option(min=0.01, help="Multiplies the number of rounds.")] = 1.0,
) -> None:
    """Compare the other synchronous collectives with mpi4py's own call on the same float32 buffers."""
    world = hi.init()
    table = Table(title=f"{world.world_size} ranks, medians in us: raw mpi4py, ours (ratio)")
    table.add_column("bytes per rank")
    for _, label, _ in _SIZES:
        table.add_column(label, justify="right")
    cells: dict[str, list[str]] = {}
    for size, _, rounds in _SIZES:
        pairs = _pairs(size, world.world_size)
        sides = {f"{side} {name}": call for name, pair in pairs.items() for side, call in zip("ab", pair, strict=True)}
        us = _interleaved(sides, rounds, repeat)
        for name in pairs:
            raw, ours = us[f"a {name}"], us[f"b {name}"]
            cells.setdefault(name, []).append(f"{raw:.1f}, {ours:.1f} ({ours / raw:.2f})")
    for name, row in cells.items():
        table.add_row(name, *row)
    if world.rank == 0:
        Console(width=120).print(table)
    hi.finalize()
