"""What launch/run.sh runs: print, one a line, the words that go in front of the command."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType

if __name__ == "__main__":
    # The package without its __init__, which imports torch: seconds that nothing here needs.
    sys.modules["hpc_inflight"] = package = ModuleType("hpc_inflight")
    package.__path__ = [str(Path(__file__).parent)]
    del sys.path[0]  # that same folder, in which no import outside of the package should look

from hpc_inflight.errors import LaunchError
from hpc_inflight.launch_command import plan_here
from hpc_inflight.launch_plan import Wanted


def main(arguments: list[str]) -> int:
    """Print the plan for the numbers and the binding that run.sh read, empty where nothing was said.

    **Local:** starts short processes; MPI is not initialised.

    Args:
        arguments: the launcher's process id, ranks, nodes, ranks per node, GPUs per rank, binding.

    Returns:
        The exit code: 2 when nothing can be started.
    """
    pid, ranks, nodes, per_node, gpus = (int(a) if a else None for a in arguments[:5])
    try:
        launch = plan_here(Wanted(ranks, nodes, per_node, gpus, arguments[5]), os.environ, pid)
    except LaunchError as error:
        sys.stderr.write(f"run.sh: {error}\n")
        return 2
    sys.stderr.write(f"run.sh: {', '.join(launch.notes)}\n")
    unset = (word for name in launch.unset for word in ("-u", name))
    words = [*unset, *(f"{name}={value}" for name, value in launch.env.items()), *launch.argv]
    sys.stdout.write("\n".join(words))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
