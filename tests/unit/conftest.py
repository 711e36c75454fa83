"""One rank's NCCL communicator on the stand-in."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from hpc_inflight.communicators.nccl import NCCLCommunicator
from tests.nccl import ALONE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpc_inflight.testing.fake_nccl import FakeRuntime


@pytest.fixture
def comm(runtime: FakeRuntime) -> Iterator[NCCLCommunicator]:
    made = NCCLCommunicator(ALONE, 0, "g", -1, 10.0)
    runtime.log.clear()
    yield made
    runtime.fail = lambda _name: None
    runtime.is_capturing = False
    made.shutdown(5.0)
    assert not runtime.open_groups()
