"""``hpc-inflight bench nccl``: what issuing a collective on CUDA tensors costs, beside torch's own ProcessGroupNCCL."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Annotated, Any
from unittest import mock

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table
from torch.distributed import distributed_c10d as c10d

import hpc_inflight as hi
from hpc_inflight import _cupy, _mpi
from hpc_inflight._torch_compat import BaseWork
from hpc_inflight.dtypes import nccl_spec
from hpc_inflight.errors import UnsupportedError
from hpc_inflight.work import DoneWork

if TYPE_CHECKING:
    from collections.abc import Callable

    Issue = Callable[[Any, bool], Any]

_BATCH = 20  # fewer than what makes a launch wait for the device
_ELEMENTS = 1024


def _collectives(size: int, device: torch.device) -> dict[str, tuple[Issue, Issue]]:
    """Return, per collective, c10d's function and the group's method below it; they take a group and async_op."""
    one, whole = torch.zeros(_ELEMENTS, device=device), torch.zeros(_ELEMENTS * size, device=device)
    other = torch.zeros_like(whole)

    def options(name: str) -> tuple[Any, Any]:
        made = getattr(c10d, name)(), getattr(c10d, name)()
        made[0].asyncOp, made[1].asyncOp = False, True
        return made

    reduce, gather, scatter = options("AllreduceOptions"), options("AllgatherOptions"), options("ReduceScatterOptions")
    exchange, spread = options("AllToAllOptions"), options("BroadcastOptions")
    return {
        "all_reduce": (
            lambda group, later: dist.all_reduce(one, group=group, async_op=later),
            lambda group, later: group.allreduce([one], reduce[later]),
        ),
        "all_gather_into_tensor": (
            lambda group, later: dist.all_gather_into_tensor(whole, one, group, later),
            lambda group, later: _method(group, "all_gather_single", "_allgather_base")(whole, one, gather[later]),
        ),
        "reduce_scatter_tensor": (
            lambda group, later: dist.reduce_scatter_tensor(one, whole, group=group, async_op=later),
            lambda group, later: _method(group, "reduce_scatter_single", "_reduce_scatter_base")(
                one, whole, scatter[later]
            ),
        ),
        "all_to_all_single": (
            lambda group, later: dist.all_to_all_single(other, whole, group=group, async_op=later),
            lambda group, later: _method(group, "all_to_all_single", "alltoall_base")(
                other, whole, [], [], exchange[later]
            ),
        ),
        "broadcast": (
            lambda group, later: dist.broadcast(one, 0, group, later),
            lambda group, later: group.broadcast([one], spread[later]),
        ),
    }


def _method(group: Any, new: str, old: str) -> Any:
    """Return a method that torch 2.13 has renamed."""
    return getattr(group, new if hasattr(dist.ProcessGroup, new) else old)


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
    """Return the median of each group, or of whatever ``issue`` takes for one; they take turns."""
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


def _parts(group: Any, rank: int, size: int, rounds: int) -> dict[str, float]:
    """Return what issuing an all_reduce takes in us, and what of that no backend like this one can save.

    **Collective:** over the group's ranks. The parts take turns with the whole: c10d's Python above a group's method,
    the bare calls that order, launch and mark a collective, and the object that c10d wants back.
    """
    runtime, comm = _cupy.runtime(), _mpi.control_comm()
    index, done, hollow = torch.cuda.current_device(), DoneWork(), dist.new_group()
    one, stream = torch.zeros(_ELEMENTS, device=torch.device("cuda", index)), runtime.new_stream(index)
    nccl = runtime.communicator(size, comm.bcast(runtime.unique_id() if rank == 0 else None), rank)
    record, wait, launch = runtime.event_record, runtime.stream_wait, nccl.allReduce
    current, raw = runtime.current_stream(index), runtime.raw_stream(stream)
    start, end = runtime.event_create(), runtime.event_create()
    address, spec = one.data_ptr(), nccl_spec("bench", "SUM", one.dtype)

    def at_once(*_: Any) -> DoneWork:
        return done

    def calls() -> None:
        record(start, current)
        wait(raw, start)
        launch(address, address, _ELEMENTS, spec.nccl_type, spec.nccl_op, raw)
        record(end, raw)

    cases = {
        "in all": lambda: dist.all_reduce(one, group=group, async_op=True),
        "c10d's Python": lambda: dist.all_reduce(one, group=hollow, async_op=True),
        "CUDA's and NCCL's calls": calls,
        "torch's Work": BaseWork,
    }
    with mock.patch.object(hollow, "allreduce", at_once):
        parts = _interleaved(lambda case, _later: case(), cases, "issue", rounds)
    runtime.destroy(nccl)
    return parts


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
    for name, levels in _collectives(world.world_size, world.device).items():
        for level, issue in zip((f"dist.{name}", "the group's method"), levels, strict=True):
            cells = []
            for how in hows:
                us = _interleaved(issue, groups, how, rounds)
                cells.append(f"{us['nccl']:.1f}, {us['ours']:.1f} ({us['ours'] / us['nccl']:.2f})")
            table.add_row(level, *cells)
    parts = _parts(groups["ours"], world.rank, world.world_size, rounds)
    if world.rank == 0:
        version = _cupy.runtime().nccl_version
        typer.echo(
            f"{world.world_size} ranks, {torch.cuda.get_device_name()}, torch {torch.__version__}, NCCL {version}, "
            f"{_ELEMENTS} float32 per rank, batches of {_BATCH}, {rounds} rounds"
        )
        Console(width=120).print(table)
        typer.echo(f"dist.all_reduce, issue: {', '.join(f'{part} {us:.1f}' for part, us in parts.items())}")
    dist.destroy_process_group(groups["nccl"])
    hi.finalize()
