from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING

import pytest
import torch

from hpc_inflight import topology

if TYPE_CHECKING:
    from collections.abc import Iterator

    import hpc_inflight as hi

STARTED = int(os.environ.get("OMPI_COMM_WORLD_SIZE", os.environ.get("PMI_SIZE", "1")))


def missing() -> str:
    """Return why these tests cannot run here; empty if they can."""
    if not torch.cuda.is_available():
        return f"no GPU that torch {torch.__version__} can use"
    if importlib.util.find_spec("cupy") is None:
        return "no CuPy; pip install hpc_inflight[cuda12] or [cuda13]"
    return ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = missing()
    for item in items:
        if "gpu" in item.path.parts:
            if item.get_closest_marker("mpi") is None:
                item.add_marker(pytest.mark.mpi)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def rank(world: hi.World) -> int:
    assert world.world_size == STARTED
    return world.rank


@pytest.fixture(scope="session")
def size(world: hi.World) -> int:
    return world.world_size


@pytest.fixture(scope="session")
def gpu(world: hi.World) -> torch.device:
    """This rank's device, which is the current one from here on, whether or not the world is on the CPU."""
    index = topology.device_index(torch.cuda.device_count(), world.local_rank)
    assert index is not None
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


@pytest.fixture(autouse=True)
def _every_test(gpu: torch.device, fully_collective: None) -> Iterator[None]:
    torch.manual_seed(0)
    yield
    torch.cuda.synchronize()
