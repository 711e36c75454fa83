"""Launches that fail, block or meet the end of their communicator, and what one leaves to the next."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from hpc_inflight import _gate
from hpc_inflight.communicators._nccl_connect import Meeting, connect
from hpc_inflight.communicators._nccl_p2p import Message, Pair
from hpc_inflight.communicators._nccl_stream import Stream
from hpc_inflight.errors import CollectiveTimeout, CommunicatorAborted, DrainTimeout, NCCLError
from hpc_inflight.testing import wait_until
from tests.nccl import SUM, closed_gate, issue

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpc_inflight.communicators.nccl import NCCLCommunicator
    from hpc_inflight.testing.fake_nccl import FakeRuntime


def test_an_empty_first_message_leaves_nccls_first_call_to_the_thread(runtime: Any) -> None:
    """NCCL's first call blocks until the peer makes its own, which in a ring comes behind the peer's own send."""
    peer_came = threading.Event()
    nccl = SimpleNamespace(send=lambda *_: peer_came.wait(30))
    pair = Pair(Stream(runtime, -1, lambda: None), lambda: nccl, is_sender=True, until="rank 1", in_thread=True)

    def send(tensor: torch.Tensor) -> Any:
        return pair.issue(Message("send", "g", 1, 30.0, tensor.data_ptr(), tensor.nbytes, None, tensor, 0))

    empty = send(torch.ones(0))
    empty.wait()
    assert pair._thread is not None
    pair._thread.join(30)
    issuing = threading.Thread(target=send, args=(torch.ones(4),), daemon=True)
    issuing.start()
    issuing.join(2)
    blocked = issuing.is_alive()
    peer_came.set()
    issuing.join(30)
    assert not blocked


@contextlib.contextmanager
def synchronous_in_flight(comm: NCCLCommunicator, runtime: FakeRuntime) -> Iterator[None]:
    """Have a synchronous all_reduce of two ranks wait on its stream until the end of the block."""
    held, tensor = threading.Event(), torch.ones(4)  # no launch keeps the tensor of a synchronous one
    side = runtime.new_stream(-1)
    side.put(held.wait)
    runtime.use_stream(side)
    operation = comm.all_reduce(tensor, SUM)
    comm.size = 2
    comm.run_now([operation])
    mark = runtime.event_create()
    runtime.event_record(mark, side.handle)
    runtime.use_stream(None)
    try:
        yield
    finally:
        held.set()
        wait_until(lambda: runtime.event_done(mark))


def test_destroying_waits_for_synchronous_operations(comm: NCCLCommunicator, runtime: FakeRuntime) -> None:
    """NCCL's destroy waits for the kernel, whose peer may never come; 10 s later it would be left behind with it."""
    with synchronous_in_flight(comm, runtime):
        with pytest.raises(DrainTimeout, match="destroying group g"):
            comm.shutdown(0.05)
        assert [how for how, _ in runtime.destroyed] == ["abort"]


@pytest.mark.parametrize("why", ["aborted", "capture"])
def test_destroying_does_not_wait_where_nothing_can_end_the_wait(
    comm: NCCLCommunicator, runtime: FakeRuntime, why: str
) -> None:
    graph = threading.Event()  # stands for one
    with synchronous_in_flight(comm, runtime):
        if why == "aborted":
            comm.abort()
        else:
            _gate.capture_began(graph)
        began = time.monotonic()
        try:
            comm.shutdown(30.0)
        finally:
            _gate.capture_ended(graph)
        assert time.monotonic() - began < 20


def test_a_synchronous_operation_waits_for_the_gate(comm: NCCLCommunicator, runtime: FakeRuntime) -> None:
    """hi.graph synchronizes the device once more while a capture begins, where no deadline would end that."""
    operation = comm.all_reduce(torch.ones(4), SUM)
    runtime.log.clear()
    with closed_gate() as may_open:
        issuing = threading.Thread(target=comm.run_now, args=([operation],))
        issuing.start()
        issuing.join(0.2)
        assert issuing.is_alive()
        assert runtime.log == []
        assert comm.is_idle()  # a drain does not wait for what waits for it
        with _gate.gate.runs_callbacks():
            comm.run_now([operation])
        comm._timeout_s = 0.05
        with pytest.raises(DrainTimeout, match=r"a synchronous collective on group g: not enqueued within 0\.05 s"):
            comm.run_now([operation])
        runtime.log.clear()
        may_open()
        issuing.join(30)
    assert runtime.log


def after_launch(name: str) -> None:
    if name == "group_end":
        raise NCCLError("NCCL status 1")


def test_tensors_of_a_block_that_fails_are_kept_until_the_device_is_past_it(
    comm: NCCLCommunicator, runtime: FakeRuntime
) -> None:
    gate = threading.Event()
    comm._stream._stream.put(gate.wait)
    tensor = torch.ones(4)
    alive = weakref.ref(tensor)
    comm.begin_block()
    works = [issue(comm, tensor), issue(comm, torch.ones(4))]
    runtime.fail = after_launch
    with pytest.raises(NCCLError, match="status 1"):
        comm.end_block()
    runtime.fail = lambda _name: None
    del tensor, works
    comm.pending_works()  # as the watchdog asks for
    gc.collect()
    assert alive() is not None
    gate.set()
    wait_until(lambda: comm.pending_works() == [])
    gc.collect()
    assert alive() is None


def test_tensors_of_a_late_message_that_fails_are_kept_until_the_device_is_past_it(runtime: Any) -> None:
    stream = Stream(runtime, -1, lambda: None)
    gate = threading.Event()
    stream._stream.put(gate.wait)
    nccl = SimpleNamespace(recv=lambda _a, _n, _t, _p, raw: runtime.enqueue(raw, lambda: None))

    def run_on(*_: object) -> None:
        raise RuntimeError("no memory for the copy")

    runtime.run_on = run_on
    pair = Pair(stream, lambda: nccl, is_sender=False, until="rank 1", in_thread=True)
    tensor = torch.ones(4)
    alive = weakref.ref(tensor)
    late: Any = pair.issue(Message("recv", "g", 1, 30.0, tensor.data_ptr(), tensor.nbytes, lambda: None, tensor, 0))
    wait_until(lambda: late.exception is not None)
    del tensor
    assert pair._thread is not None
    pair._thread.join(30)
    gc.collect()
    assert alive() is not None
    gate.set()
    wait_until(late.poll)
    gc.collect()
    assert alive() is None


def test_tensors_stay_where_a_launch_returns_while_an_abort_is_under_way(
    comm: NCCLCommunicator, runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launch did not return in time, and does just before the abort has ended what it launched."""
    monkeypatch.setattr("hpc_inflight.communicators._nccl_life._LAUNCH_S", 0.1)
    inside, aborting, go_on = (threading.Event() for _ in range(3))

    def hold(name: str) -> None:
        if name == "all_reduce":
            inside.set()
            aborting.wait(30)
        if name == "abort":
            aborting.set()
            go_on.wait(30)

    runtime.fail = hold
    gone: list[bool] = []

    def launch() -> None:
        tensor = torch.ones(4)
        alive = weakref.ref(tensor)
        with contextlib.suppress(CommunicatorAborted):
            issue(comm, tensor)
        del tensor
        gc.collect()
        gone.append(alive() is None)
        go_on.set()

    issuer = threading.Thread(target=launch)
    issuer.start()
    assert inside.wait(30)
    comm.abort()
    issuer.join(30)
    assert gone == [False]


def test_a_block_that_another_thread_finds_complete_before_it_is_noted(comm: NCCLCommunicator) -> None:
    """Its future is completed under the stream's lock, which that takes, too."""
    comm.begin_block()
    work = issue(comm, torch.ones(4))
    work.get_future()
    late = work.completion
    real = late.launched
    done: list[bool] = []

    def launched() -> None:  # what another thread may do just before
        def other() -> None:
            issue(comm, torch.ones(4)).completion.block(5.0)
            comm._stream.look_after(100, 5.0)
            done.append(True)

        thread = threading.Thread(target=other, daemon=True)
        thread.start()
        thread.join(3)
        if not done:  # for the end of the test
            comm._stream.lock.release()
            thread.join(3)
            raise AssertionError("deadlock")
        real()

    late.launched = launched
    comm.end_block()
    assert done


class Mail:
    """Two ranks' MPI communicator: what nobody has received stays, as where MPI uses a freed one's number again."""

    def __init__(self, rank: int, boxes: dict[tuple[int, int, int], list[Any]]) -> None:
        self.rank, self.size, self._boxes = rank, 2, boxes

    def isend(self, value: Any, to: int, tag: int) -> Any:
        self._boxes.setdefault((self.rank, to, tag), []).append(value)
        return SimpleNamespace(Test=lambda: True)

    def improbe(self, source: int, tag: int) -> Any:
        box = self._boxes.get((source, self.rank, tag))
        return SimpleNamespace(recv=lambda: box.pop(0)) if box else None


def test_a_group_of_the_same_name_hears_nothing_of_one_whose_meeting_failed(runtime: FakeRuntime) -> None:
    """`init` after `finalize` names its groups as before."""
    runtime.shared = True
    runtime.communicator = lambda *_: "made"  # type: ignore[assignment,method-assign]
    boxes: dict[tuple[int, int, int], list[Any]] = {}

    def meet(rank: int, seconds: float, life: int) -> Any:
        deadline = time.monotonic() + seconds
        return connect(Meeting(Mail(rank, boxes), range(2), 0, "NCCL for group 0", deadline, life=life), runtime, -1)  # type: ignore[arg-type]

    for rank in (0, 1):  # one after the other: rank 1 comes too late
        with pytest.raises(CollectiveTimeout, match="rank 1 did not come in time"):
            meet(rank, 0.05, 0)
    found: list[Any] = []
    other = threading.Thread(target=lambda: found.append(meet(1, 2.0, 1)))
    other.start()
    try:
        found.append(meet(0, 2.0, 1))
    finally:
        other.join(30)
    assert found == ["made", "made"]


def test_streams_are_used_again(runtime: Any) -> None:
    first = Stream(runtime, -1, lambda: None)
    raw = first.raw
    second = Stream(runtime, -1, lambda: None)
    assert second.raw != raw
    del first
    gc.collect()
    assert Stream(runtime, -1, lambda: None).raw == raw
