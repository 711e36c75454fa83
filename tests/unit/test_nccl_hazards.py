"""What goes wrong on the NCCL path only when things meet: an abort and a waiter, a launch and a destroy."""

from __future__ import annotations

import gc
import threading
import weakref
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from hpc_inflight import _cupy, group_set
from hpc_inflight.communicators.base import Reduction
from hpc_inflight.communicators.nccl import NCCLCommunicator
from hpc_inflight.testing.fake_nccl import FakeRuntime

if TYPE_CHECKING:
    from collections.abc import Iterator

SUM = Reduction("SUM")
ALONE: Any = SimpleNamespace(rank=0, size=1)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    made = FakeRuntime()
    monkeypatch.setattr(_cupy, "_runtime", made)
    return made


@pytest.fixture
def comm(runtime: FakeRuntime) -> Iterator[NCCLCommunicator]:
    made = NCCLCommunicator(ALONE, 0, "g", -1, 10.0)
    runtime.log.clear()
    yield made
    runtime.fail = lambda _name: None
    runtime.is_capturing = False
    made.shutdown(5.0)
    assert not runtime.open_groups()


def issue(comm: NCCLCommunicator, *tensors: torch.Tensor) -> Any:
    return comm.enqueue("all_reduce", [comm.all_reduce(t, SUM) for t in tensors], tensors, 10.0)


# launches and ends ----------------------------------------------------------------------------------------------


def test_nothing_is_asked_of_a_communicator_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL frees it before CuPy forgets its address."""
    asked: list[str] = []
    made: list[Any] = []

    class Handle:
        def __init__(self, *_: object) -> None:
            pass

        def check_async_error(self) -> None:
            asked.append("check")

        def destroy(self) -> None:
            made[0].check(self)

        abort = destroy

    cuda = SimpleNamespace(eventRecord=None, streamWaitEvent=None, eventQuery=None, memcpyAsync=None)
    nccl = SimpleNamespace(get_version=lambda: 22809, groupStart=None, groupEnd=None, NcclCommunicator=Handle)
    monkeypatch.setattr(_cupy, "_import_cupy", lambda: (cuda, nccl))
    monkeypatch.setattr("hpc_inflight._torch_compat.cuda_functions", lambda: (None, None, None))
    made.append(_cupy.Runtime())
    handle = made[0].communicator(1, b"", 0)
    made[0].check(handle)
    assert asked == ["check"]
    made[0].abort(handle)
    made[0].check(handle)
    assert asked == ["check"]


# shared memory --------------------------------------------------------------------------------------------------


def addresses(comm: NCCLCommunicator, monkeypatch: pytest.MonkeyPatch, operation: Any) -> tuple[set[int], set[int]]:
    """Return the addresses that an operation of rank 0 of 2 sends from and receives at."""
    sent: set[int] = set()
    received: set[int] = set()
    monkeypatch.setattr(comm._nccl, "send", lambda address, *_: sent.add(address))
    monkeypatch.setattr(comm._nccl, "recv", lambda address, *_: received.add(address))
    work = comm.enqueue("exchange", [operation()], (), 10.0)
    work.completion.block(5.0)
    return sent, received


def test_nothing_is_sent_from_where_something_arrives(comm: NCCLCommunicator, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL sends and receives at once: such memory may be overwritten before it was sent."""
    comm.size = 2
    tensors = [torch.ones(4), torch.ones(4)]
    for outputs in (tensors, tensors[::-1]):
        sent, received = addresses(comm, monkeypatch, lambda outputs=outputs: comm.all_to_all(outputs, tensors))
        assert sent
        assert not sent & received


def test_a_scatter_into_one_of_its_inputs(comm: NCCLCommunicator, monkeypatch: pytest.MonkeyPatch) -> None:
    """The root's own part is copied first, over what is to be sent."""
    comm.size = 2
    inputs = [torch.ones(4), torch.full((4,), 2.0)]
    sent, _ = addresses(comm, monkeypatch, lambda: comm.scatter(inputs[1], inputs, 0))
    assert inputs[1].data_ptr() not in sent


# devices, captures, blocks --------------------------------------------------------------------------------------


def test_a_graph_takes_tensors_that_are_kept_until_the_capture_has_ended(
    comm: NCCLCommunicator, runtime: FakeRuntime
) -> None:
    """Their memory would be given to what is captured next, which nothing orders after the collective."""
    side = runtime.new_stream(-1)
    runtime.use_stream(side)
    capture = threading.Event()  # anything will do
    group_set.capture_began(capture)
    runtime.is_capturing = True
    tensor = torch.ones(4)
    alive = weakref.ref(tensor)
    issue(comm, tensor)
    del tensor
    gc.collect()
    assert alive() is not None
    runtime.is_capturing = False
    group_set.capture_ended(capture)
    gc.collect()
    assert alive() is None
    runtime.use_stream(None)


def test_a_barrier_asks_nothing_while_a_capture_begins(comm: NCCLCommunicator, runtime: FakeRuntime) -> None:
    """A drain does not wait for it, and the mark that a capture is under way may come just after it has looked."""
    gate = threading.Event()
    side = runtime.new_stream(-1)
    side.put(gate.wait)
    runtime.use_stream(side)
    fence = comm.fence(10.0)
    runtime.use_stream(None)
    asked: list[int] = []
    real = runtime.event_done

    def ask(event: int) -> bool:
        asked.append(event)
        return real(event)

    runtime.event_done = ask  # type: ignore[method-assign]
    with group_set.polling:  # as a capture that begins
        waiting = threading.Thread(target=fence)
        waiting.start()
        waiting.join(0.1)
        assert asked == []
    gate.set()
    waiting.join(30)
    assert asked


def test_a_future_that_is_asked_for_as_the_operation_ends(comm: NCCLCommunicator) -> None:
    work = issue(comm, torch.ones(4))
    first = work.get_future()
    completion = work.completion
    held = completion._future

    class Ending:
        """The operation ends between the look at its future and the use of it."""

        looks = 0

        def __get__(self, _completion: object, _kind: type | None = None) -> Any:
            self.looks += 1
            return held if self.looks == 1 else None

        def __set__(self, _completion: object, _value: object) -> None:
            pass

    kind = type("Racing", (type(completion),), {"_future": Ending()})
    completion.__class__ = kind
    assert completion.future([]) is first
