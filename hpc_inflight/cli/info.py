"""``hpc-inflight info``: who runs where with what, and what is wrong with it."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

import hpc_inflight as hi
from hpc_inflight import launchers
from hpc_inflight._mpi_agree import allgather
from hpc_inflight.cli import _info_checks, _info_facts
from hpc_inflight.cli._info_checks import Status

if TYPE_CHECKING:
    from collections.abc import Sequence

_TIMEOUT_S = 60.0
_WIDTH = 120  # a launcher's output is no terminal, whatever reads it
_STYLES = {Status.PASS: "green", Status.WARN: "yellow", Status.FAIL: "red"}


def info(
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print the facts and checks as JSON.")] = False,
) -> None:
    """Show who runs where with what, check it, and do a real all_reduce of each kind. Exit code 1 when a check fails.

    Run it alone or under the launcher of a job, in the job's place: `srun --mpi=pmix ... hpc-inflight info`.
    """
    try:
        world = hi.init(timeout_s=_TIMEOUT_S)
    except hi.InflightError as error:
        _report_no_world(error, as_json=as_json)
        return
    facts = allgather(_info_facts.gather(world), _TIMEOUT_S, "info")
    # the same on every rank, for they are collectives: init() refuses a world in which some ranks have a GPU
    kinds = ["cpu", *(["cuda"] if world.device.type == "cuda" else [])]
    mine = [_info_facts.time_all_reduce(world, kind) for kind in kinds]
    timings = allgather(mine, _TIMEOUT_S, "info")
    rank = world.rank
    hi.finalize(timeout_s=_TIMEOUT_S)
    if rank == 0:
        _report(facts, _info_checks.checks(facts, timings), as_json=as_json)


def _report_no_world(error: hi.InflightError, *, as_json: bool) -> None:
    """Report what is known without MPI; of N processes that are each alone, the launcher's rank 0 speaks."""
    launcher = launchers.launcher_from_env(os.environ)
    # the others end well, so that a launcher that stops a job at the first failure lets rank 0 speak
    if launcher is None or launcher.rank == 0:
        facts = _info_facts.gather(None)
        _report([facts], _info_checks.without_world(facts, str(error)), as_json=as_json)


def _report(facts: Sequence[_info_facts.Facts], checks: Sequence[_info_checks.Check], *, as_json: bool) -> None:
    failed = any(check.status is Status.FAIL for check in checks)
    if as_json:
        whole: dict[str, Any] = {
            "ok": not failed,
            "ranks": [asdict(rank) for rank in facts],
            "checks": [asdict(check) for check in checks],
        }
        typer.echo(json.dumps(whole, indent=2))
    else:
        # mpirun gives its ranks a terminal also where its own output is a file, which no colours should be in
        launched = launchers.launcher_from_env(os.environ) is not None
        console = Console(width=_WIDTH, highlight=False, force_terminal=False if launched else None)
        for table in (_ranks_table(facts), _versions_table(facts), _checks_table(checks)):
            console.print(table)
    if failed:
        raise typer.Exit(code=1)


def _ranks_table(facts: Sequence[_info_facts.Facts]) -> Table:
    table = Table(title="Ranks")
    for column in ("rank", "host", "node", "local rank", "device", "UUID", "cores bound", "threads"):
        table.add_column(column, justify="right" if column in {"rank", "node", "local rank", "threads"} else "left")
    for rank in facts:
        table.add_row(
            str(rank.rank),
            rank.hostname,
            str(rank.node_rank),
            f"{rank.local_rank} of {rank.local_world_size}",
            f"{rank.device} {rank.device_name}".strip(),
            rank.device_uuid or "-",
            f"{_info_checks.numbers(rank.cores)} of {rank.cpus_of_node}",
            str(rank.threads),
        )
    return table


def _versions_table(facts: Sequence[_info_facts.Facts]) -> Table:
    table = Table(title="Software", show_header=False)
    rows = {
        "launcher": [rank.launcher for rank in facts],
        "MPI library": [f"{rank.mpi} ({rank.mpi_path})" if rank.mpi else "none" for rank in facts],
        "MPI threads": [rank.thread_level or "none" for rank in facts],
        "hpc_inflight, mpi4py": [f"{rank.hpc_inflight}, {rank.mpi4py or 'none'}" for rank in facts],
        "Python": [rank.python for rank in facts],
        "torch": [f"{rank.torch} (CUDA {rank.torch_cuda or 'none'})" for rank in facts],
        "CuPy": [rank.cupy or "none" for rank in facts],
        "NCCL": [f"{rank.nccl} ({rank.nccl_path})" if rank.nccl else "none" for rank in facts],
        "NCCL variables": [" ".join(f"{n}={v}" for n, v in rank.nccl_env.items()) or "none" for rank in facts],
        "CUDA_VISIBLE_DEVICES": [rank.cuda_visible_devices or "''" for rank in facts],
    }
    for name, values in rows.items():
        table.add_row(name, _info_checks.spread(values))
    return table


def _checks_table(checks: Sequence[_info_checks.Check]) -> Table:
    table = Table("check", "", "found", "what to do", title="Checks")
    for check in checks:
        style = _STYLES[check.status]
        table.add_row(check.name, f"[{style}]{check.status.value}[/]", check.found, check.remedy)
    return table
