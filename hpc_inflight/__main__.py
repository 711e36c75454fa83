"""``python -m hpc_inflight`` is the command ``hpc-inflight``."""

from hpc_inflight.cli import app

if __name__ == "__main__":
    app()
