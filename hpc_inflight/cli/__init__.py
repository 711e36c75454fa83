"""The command ``hpc-inflight``: run it alone or under the MPI launcher; rank 0 speaks."""

from __future__ import annotations

import typer

from hpc_inflight.cli import bench, bench_registry, trace

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Tools for PyTorch jobs on hpc_inflight.")
bench.app.command()(bench_registry.registry)
app.add_typer(bench.app, name="bench")
app.command()(trace.trace)


@app.callback()
def main() -> None:
    """Tools for PyTorch jobs on hpc_inflight."""
