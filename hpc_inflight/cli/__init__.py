"""The command ``hpc-inflight``: run it alone or under the MPI launcher; rank 0 speaks."""

from __future__ import annotations

import typer

from hpc_inflight.cli import bench, bench_drain, bench_nccl, bench_registry, bench_watchdog, trace
from hpc_inflight.cli.info import info
from hpc_inflight.cli.slurm import slurm

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Tools for PyTorch jobs on hpc_inflight.")
bench.app.command()(bench_registry.registry)
bench.app.command()(bench_drain.drain)
bench.app.command(name="watchdog")(bench_watchdog.watch)
bench.app.command()(bench_nccl.nccl)
app.add_typer(bench.app, name="bench")
app.command()(info)
app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})(slurm)
app.command()(trace.trace)


@app.callback()
def main() -> None:
    """Tools for PyTorch jobs on hpc_inflight."""
