"""``hpc-inflight bench registry``: what registering a collective in flight costs, beside the same one unregistered."""

from __future__ import annotations

import contextlib
import statistics
import time
from typing import TYPE_CHECKING, Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table

import hpc_inflight as hi
from hpc_inflight import _torch_compat as compat
from hpc_inflight.process_group import ProcessGroupInflight
from hpc_inflight.work import Completion, Work

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_BATCH = 50  # short enough that some batches run without being interrupted
_REGISTERS = "_issued"  # the method that the registry code is in
_CROWDS = (10, 100_000)


def _sides(tensor: torch.Tensor) -> dict[str, Callable[[], None]]:
    """Return what is compared; each issues one all_reduce and waits for it."""
    allow, stock = hi.allow_inflight_collective_as_graph_input(), compat.wait_tensor_op

    def without_registry(_self: ProcessGroupInflight, work: Any, _outputs: object) -> Any:
        return work

    def outside() -> None:
        dist.all_reduce(tensor, async_op=True).wait()

    def inside(wait: Callable[[Any], object]) -> None:
        with allow:
            work = dist.all_reduce(tensor, async_op=True)
        wait(work)

    def batch_of(call: Callable[[], object], around: Callable[[], Any] = contextlib.nullcontext) -> Callable[[], None]:
        def run() -> None:
            with around():
                for _ in range(_BATCH):
                    call()

        return run

    @contextlib.contextmanager
    def removed() -> Iterator[None]:
        # not by mock.patch, which would be a part of what is measured
        original = getattr(ProcessGroupInflight, _REGISTERS)
        setattr(ProcessGroupInflight, _REGISTERS, without_registry)
        try:
            yield
        finally:
            setattr(ProcessGroupInflight, _REGISTERS, original)

    return {
        "registry code removed": batch_of(outside, removed),
        "outside the context": batch_of(outside),
        "inside, work.wait()": batch_of(lambda: inside(lambda work: work.wait())),
        "inside, hi.wait_tensor": batch_of(lambda: inside(lambda _: hi.wait_tensor(tensor))),
        "inside, torch's wait_tensor": batch_of(lambda: inside(lambda _: stock(tensor))),
    }


def _by_hand(tensor: torch.Tensor, *, registered: bool) -> Callable[[], None]:
    """Return what makes, registers and waits a batch of works without any communication around them."""

    def run() -> None:
        for _ in range(_BATCH):
            completion = Completion("bench", "none", 1, 1.0)
            work = Work(completion, ())
            completion.finish()
            if registered:
                hi.register_work(tensor, work)
            work.wait()

    return run


def _interleaved(sides: Mapping[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Return the time of one call in us in every batch, the fastest first; the sides take turns."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, run in sides.items():
            started = time.perf_counter()
            run()
            times[name].append(1e6 * (time.perf_counter() - started) / _BATCH)
    return {name: sorted(values) for name, values in times.items()}


def _in_a_crowd(count: int, rounds: int) -> float:
    """Return what registering and waiting one work costs while ``count`` others are in flight."""
    crowd = []
    for _ in range(count):
        completion, other = Completion("crowd", "none", 1, 1.0), torch.empty(1)
        hi.register_work(other, Work(completion, ()))
        crowd.append((completion, other))
    us = _interleaved({"one": _by_hand(torch.empty(1), registered=True)}, rounds)["one"][0]
    for completion, other in crowd:
        completion.finish()
        hi.wait_tensor(other)
    return us


def registry(
    *,
    repeat: Annotated[float, typer.Option(min=0.01, help="Multiplies the number of rounds.")] = 1.0,
) -> None:
    """Compare an asynchronous all_reduce and its wait with and without the in-flight registry.

    Differences are those of the fastest batches: whatever else runs on the machine can only make a batch slower.
    """
    world = hi.init(device="cpu", on_unwaited="ignore")
    rounds = max(3, int(240 * repeat))
    times = _interleaved(_sides(torch.ones(16)), rounds)
    table = Table(title=f"all_reduce of 64 bytes + wait, {world.world_size} ranks, us, in batches of {_BATCH}")
    for column in ("", "median", "fastest", "over the first line", "over the second"):
        table.add_column(column, justify="right")
    first, second = times["registry code removed"][0], times["outside the context"][0]
    for name, us in times.items():
        best = us[0]
        table.add_row(
            name, f"{statistics.median(us):.2f}", f"{best:.2f}", f"{best - first:+.2f}", f"{best - second:+.2f}"
        )
    hand = {
        name: _by_hand(torch.ones(16), registered=name == "registered") for name in ("not registered", "registered")
    }
    alone = _interleaved(hand, rounds)
    extra = alone["registered"][0] - alone["not registered"][0]
    crowds = {count: _in_a_crowd(count, max(3, rounds // 6)) for count in _CROWDS}
    if world.rank == 0:
        Console(width=120).print(table)
        typer.echo(f"register + work.wait() alone, without communication: {extra:+.2f} us")
        few, many = (crowds[count] for count in _CROWDS)
        typer.echo(
            f"register + wait beside {_CROWDS[0]} works in flight: {few:.2f} us; beside {_CROWDS[1]}: {many:.2f} us "
            f"(ratio {many / few:.2f})"
        )
    hi.finalize()
