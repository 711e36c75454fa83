from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import torch

from hpc_inflight.launchers import launcher_from_env

if TYPE_CHECKING:
    import hpc_inflight as hi

# What the launcher said, not what MPI says: a world of N singletons must not pass as N ranks.
LAUNCHER = launcher_from_env(os.environ)
STARTED = 1 if LAUNCHER is None else LAUNCHER.size


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "mpi" in item.path.parts and item.get_closest_marker("mpi") is None:
            item.add_marker(pytest.mark.mpi)


@pytest.fixture(scope="session")
def rank(world: hi.World) -> int:
    assert world.world_size == STARTED
    return world.rank


@pytest.fixture(scope="session")
def size(world: hi.World) -> int:
    return world.world_size


@pytest.fixture(autouse=True)
def _every_test(fully_collective: None) -> None:
    torch.manual_seed(0)
