"""What all tests share."""

from __future__ import annotations

import pytest

from hpc_inflight import _cupy
from hpc_inflight.testing.fake_nccl import FakeRuntime

pytest_plugins = ["hpc_inflight.testing.plugin"]


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    """The stand-in for CUDA and NCCL, in place of CuPy's."""
    made = FakeRuntime()
    monkeypatch.setattr(_cupy, "_runtime", made)
    return made
