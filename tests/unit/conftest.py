"""One rank's NCCL communicator on the stand-in, and what captures there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from hpc_inflight import _gate, group_set
from hpc_inflight.communicators.nccl import NCCLCommunicator
from tests.captures import Graph, Group
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


@pytest.fixture
def graph_class(monkeypatch: pytest.MonkeyPatch) -> type[Graph]:
    methods = {name: getattr(Graph, name) for name in ("capture_begin", "capture_end", "reset")}
    made = type("CUDAGraph", (Graph,), methods)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", made)
    return made


@pytest.fixture
def group(graph_class: type[Graph]) -> Iterator[Group]:
    made = Group()
    ticket = group_set.add(made)  # the first group: the hook comes
    yield made
    group_set.discard(ticket)
    assert graph_class.capture_begin is Graph.capture_begin
    assert not _gate.capturing()
    assert not _gate.gate.closed
