"""What goes wrong on the NCCL path only when things meet: an abort and a waiter, a launch and a destroy."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from hpc_inflight import _cupy, _gate, group_set
from hpc_inflight.communicators.nccl import NCCLCommunicator
from hpc_inflight.errors import (
    CommunicatorAborted,
    DrainTimeout,
    GroupDestroyedError,
    InvalidArgumentError,
    NCCLError,
)
from hpc_inflight.testing import wait_until
from hpc_inflight.testing.fake_nccl import FakeRuntime
from tests.nccl import ALONE, SUM, closed_gate, issue

if TYPE_CHECKING:
    from collections.abc import Iterator


# aborts ---------------------------------------------------------------------------------------------------------


def test_what_an_abort_ends_has_failed(comm: NCCLCommunicator, runtime: FakeRuntime) -> None:
    """NCCL's abort ends the kernel, and with it the event: whoever polls then must not take that for a result."""
    gate = threading.Event()
    comm._stream._stream.put(gate.wait)
    work = issue(comm, torch.ones(4))

    def end(name: str) -> None:
        if name == "abort":
            gate.set()
            wait_until(lambda: runtime.event_done(work.completion.event))
            work.is_completed()

    runtime.fail = end
    comm.abort()
    with pytest.raises(CommunicatorAborted, match="group g was aborted"):
        work.wait(timedelta(seconds=5))


def test_what_was_pending_when_a_group_was_destroyed_has_failed(comm: NCCLCommunicator, runtime: FakeRuntime) -> None:
    gate = threading.Event()
    comm._stream._stream.put(gate.wait)
    work = issue(comm, torch.ones(4))
    with pytest.raises(DrainTimeout, match="destroying group g"):
        comm.shutdown(0.05)
    gate.set()
    wait_until(lambda: runtime.event_done(work.completion.event))
    with pytest.raises(GroupDestroyedError, match="group g was destroyed"):
        work.wait(timedelta(seconds=5))


def test_tensors_stay_while_an_abort_hangs(
    comm: NCCLCommunicator, runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpc_inflight.communicators._nccl_life._END_S", 0.1)
    gate = threading.Event()
    comm._stream._stream.put(gate.wait)
    tensor = torch.ones(4)
    alive = weakref.ref(tensor)
    issue(comm, tensor)
    runtime.fail = lambda name: gate.wait() if name == "abort" else None  # type: ignore[assignment]
    comm.abort()
    del tensor
    comm.pending_works()  # as the watchdog asks for, twice a second
    gc.collect()
    assert alive() is not None
    gate.set()


def test_tensors_stay_when_nccl_reports_an_error(comm: NCCLCommunicator, runtime: FakeRuntime) -> None:
    """An error of the network is no end of the kernel, which goes on reading and writing until it is aborted."""
    gate = threading.Event()
    comm._stream._stream.put(gate.wait)
    tensor = torch.ones(4)
    alive = weakref.ref(tensor)
    work = issue(comm, tensor)
    del tensor

    def fail(name: str) -> None:
        if name == "check":
            raise NCCLError("an operation in flight: NCCL status 6")

    runtime.fail = fail
    with pytest.raises(NCCLError, match="status 6"):
        work.wait(timedelta(seconds=5))
    del work
    comm.pending_works()
    gc.collect()
    assert alive() is not None
    comm.shutdown(5.0)
    assert [how for how, _ in runtime.destroyed] == ["abort"]  # NCCL would wait for the kernel to end
    gate.set()


def test_an_end_that_fails_is_said_and_ends_no_thread(
    comm: NCCLCommunicator,
    runtime: FakeRuntime,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a job an exception that leaves a thread ends the job."""
    lost: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", lost.append)

    def fail(name: str) -> None:
        if name == "destroy":
            raise NCCLError("NCCL status 6")

    runtime.fail = fail
    comm.shutdown(5.0)
    assert lost == []
    assert "group g: NCCL failed to end a communicator: NCCL status 6" in caplog.text


# launches and ends ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("synchronous", [False, True])
def test_what_waits_for_its_turn_while_the_group_is_destroyed_touches_nothing(
    runtime: FakeRuntime, synchronous: bool
) -> None:
    """It has passed the check for a destroyed group; the events and the communicator may be another's by now."""
    comm = NCCLCommunicator(ALONE, 0, "g", -1, 10.0)
    caught: list[BaseException] = []

    def launch() -> None:
        try:
            if synchronous:
                comm.run_now([comm.all_reduce(torch.ones(4), SUM)])
            else:
                issue(comm, torch.ones(4))
        except GroupDestroyedError as error:
            caught.append(error)

    with closed_gate() as open_gate:
        lock = comm._stream.lock
        if synchronous:
            lock.acquire()
        issuer = threading.Thread(target=launch)
        issuer.start()
        issuer.join(0.2)
        assert issuer.is_alive()
        if synchronous:
            ending = threading.Thread(target=comm.shutdown, args=(5.0,))
            ending.start()
            wait_until(lambda: comm._unusable is not None)
            lock.release()
            ending.join(30)
        else:
            comm.shutdown(5.0)
        runtime.log.clear()
        open_gate()
        issuer.join(30)
    assert len(caught) == 1
    assert runtime.log == []


def test_nccl_is_not_ended_under_a_launch(comm: NCCLCommunicator, runtime: FakeRuntime) -> None:
    inside, go_on, order = threading.Event(), threading.Event(), []

    def hold(name: str) -> None:
        if name == "all_reduce":
            inside.set()
            go_on.wait(30)
            order.append("launched")
        elif name in {"abort", "destroy"}:
            order.append("ended")

    runtime.fail = hold
    works: list[Any] = []
    issuer = threading.Thread(target=lambda: works.append(issue(comm, torch.ones(4))))
    issuer.start()
    assert inside.wait(30)
    threading.Timer(0.2, go_on.set).start()
    comm.abort()
    issuer.join(30)
    assert order == ["launched", "ended"]
    with pytest.raises(CommunicatorAborted, match="group g was aborted"):
        works[0].wait(timedelta(seconds=5))


def test_an_abort_does_not_wait_for_a_launch_that_blocks(
    comm: NCCLCommunicator, runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL blocks a first use until the other ranks come, and only an abort ends that."""
    monkeypatch.setattr("hpc_inflight.communicators._nccl_life._LAUNCH_S", 0.1)
    inside, aborted = threading.Event(), threading.Event()

    def hold(name: str) -> None:
        if name == "all_reduce":
            inside.set()
            aborted.wait(30)
            raise NCCLError("NCCL status 6")
        if name == "abort":
            aborted.set()

    runtime.fail = hold
    caught: list[BaseException] = []

    def launch() -> None:
        try:
            issue(comm, torch.ones(4))
        except CommunicatorAborted as error:
            caught.append(error)

    issuer = threading.Thread(target=launch)
    issuer.start()
    assert inside.wait(30)
    comm.abort()
    issuer.join(30)
    assert aborted.is_set()
    assert len(caught) == 1


def test_a_drain_does_not_wait_for_a_launch_that_blocks(comm: NCCLCommunicator, runtime: FakeRuntime) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def hold(name: str) -> None:
        if name == "all_reduce":
            inside.set()
            go_on.wait(30)

    runtime.fail = hold
    issuer = threading.Thread(target=issue, args=(comm, torch.ones(4)))
    issuer.start()
    assert inside.wait(30)
    group: Any = comm
    group.describe = lambda: "group g"
    ticket = group_set.add(group)
    drained: list[BaseException] = []

    def drain() -> None:
        try:
            group_set.wait_for_all_pending_works(0.05)
        except DrainTimeout as error:
            drained.append(error)

    drainer = threading.Thread(target=drain, daemon=True)
    drainer.start()
    drainer.join(10)
    over = not drainer.is_alive()
    go_on.set()
    issuer.join(30)
    drainer.join(30)
    group_set.discard(ticket)
    assert over
    assert "after 0.05 s a thread that issues on group g has not returned" in str(drained[0])


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


# messages to oneself --------------------------------------------------------------------------------------------


def test_a_message_that_is_complete_does_not_speak_for_one_that_has_no_other_end(comm: NCCLCommunicator) -> None:
    into = [torch.zeros(1) for _ in range(20)]
    received = [comm.recv(tensor, 0, 0, 5.0) for tensor in into]
    for i in range(20):
        comm.send(torch.full((1,), i + 1.0), 0, 0, 5.0).completion.block(5.0)
        assert not any(work.completion.completed for work in received[i + 1 :]), i
    for work in received:
        work.wait()
    assert [t.item() for t in into] == [i + 1.0 for i in range(20)]


def test_the_two_ends_of_a_message_to_oneself_have_one_size(comm: NCCLCommunicator) -> None:
    received = comm.recv(torch.zeros(6), 0, 0, 5.0)
    with pytest.raises(InvalidArgumentError, match=r"send of 16 bytes to this rank itself .* meets a receive of 24"):
        comm.send(torch.ones(4), 0, 0, 5.0)
    with pytest.raises(InvalidArgumentError, match="send of 16 bytes"):
        received.wait()
    assert comm.pending_works() == []


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


@pytest.mark.parametrize("call", ["all_gather", "reduce_scatter"])
def test_a_part_of_its_own_that_is_not_quite_in_place(
    comm: NCCLCommunicator, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """NCCL works in place where both begin at one address, and not on memory that only overlaps."""
    comm.size = 2
    used: list[tuple[int, int, int]] = []
    monkeypatch.setattr(
        comm._nccl, "broadcast", lambda source, target, _n, _t, root, _s: used.append((source, target, root))
    )
    monkeypatch.setattr(
        comm._nccl, "reduce", lambda source, target, _n, _t, _o, root, _s: used.append((source, target, root))
    )
    memory, other = torch.zeros(8), torch.zeros(2)
    for shift, in_place in ((0, True), (1, False)):
        one, two = memory[:4], memory[shift : shift + 4]
        operation = (
            comm.all_gather([one, other], two) if call == "all_gather" else comm.reduce_scatter(one, [two, other], SUM)
        )
        work = comm.enqueue(call, [operation], (), 10.0)
        work.completion.block(5.0)
        ((source, target, _),) = [entry for entry in used if entry[2] == 0]
        used.clear()
        assert (source == target) == in_place
        assert in_place or abs(source - target) >= one.nbytes


# devices, captures, blocks --------------------------------------------------------------------------------------


class Devices(FakeRuntime):
    """Knows which device is the current one where an event is made; 5 is the caller's."""

    def __init__(self) -> None:
        super().__init__()
        self.current = 5
        self.made_on: list[int] = []

    def current_device(self) -> int:
        return self.current

    def event_create(self) -> int:
        self.made_on.append(self.current)
        return super().event_create()

    @contextlib.contextmanager
    def on_device(self, index: int) -> Iterator[None]:
        before, self.current = self.current, index
        yield
        self.current = before


def test_events_are_made_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA refuses to record an event on a stream of another device."""
    runtime = Devices()
    monkeypatch.setattr(_cupy, "_runtime", runtime)
    comm = NCCLCommunicator(ALONE, 0, "g", -1, 10.0)
    issue(comm, torch.ones(4)).wait()
    comm.run_now([comm.all_reduce(torch.ones(4), SUM)])
    comm.send(torch.ones(1), 0, 0, 5.0)
    comm.recv(torch.ones(1), 0, 0, 5.0).wait()
    comm.fence(5.0)()
    comm.begin_block()
    runtime.events[-1].clear()
    issue(comm, torch.ones(4))
    comm.end_block()
    assert set(runtime.made_on) == {-1}
    assert runtime.current == 5
    comm.shutdown(5.0)


def test_a_graph_takes_tensors_that_are_kept_until_the_capture_has_ended(
    comm: NCCLCommunicator, runtime: FakeRuntime
) -> None:
    """Their memory would be given to what is captured next, which nothing orders after the collective."""
    side = runtime.new_stream(-1)
    runtime.use_stream(side)
    capture = threading.Event()  # anything will do
    _gate.capture_began(capture)
    runtime.is_capturing = True
    tensor = torch.ones(4)
    alive = weakref.ref(tensor)
    issue(comm, tensor)
    del tensor
    gc.collect()
    assert alive() is not None
    (_, event, _) = runtime.log[-1]
    wait_until(lambda: runtime.event_done(event))  # the stand-in runs what it captures
    runtime.is_capturing = False
    _gate.capture_ended(capture)
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
    with _gate.polling:  # as a capture that begins
        waiting = threading.Thread(target=fence)
        waiting.start()
        waiting.join(0.1)
        assert asked == []
    gate.set()
    waiting.join(30)
    assert asked


@pytest.mark.parametrize("kind", ["asynchronous", "synchronous"])
def test_nobody_asks_between_looking_for_a_capture_and_its_begin(
    kind: str, comm: NCCLCommunicator, runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever polls has seen no capture, and is overtaken by one that begins."""
    work = issue(comm, torch.zeros(4))
    comm._left = 1  # as a synchronous operation leaves it, with more than one rank
    asked, capturing = [], _gate.capturing
    looked, begun, over = threading.Event(), threading.Event(), threading.Event()

    def look() -> bool:
        found = capturing()
        if not looked.is_set():
            looked.set()
            begun.wait(0.2)  # it cannot: nobody may begin a capture here
        return found

    def begin() -> None:
        looked.wait(30)
        with _gate.polling:
            begun.set()
            asked.append("capture")
        over.set()

    real = runtime.event_done

    def ask(event: int) -> bool:
        asked.append("event")
        return real(event)

    monkeypatch.setattr(runtime, "event_done", ask)
    monkeypatch.setattr(_gate, "capturing", look)
    thread = threading.Thread(target=begin)
    thread.start()
    if kind == "asynchronous":
        work.is_completed()
    else:
        comm.synchronous("all_reduce", 10.0)
    assert over.wait(30)
    thread.join(30)
    assert asked[0] == "event"


def test_a_block_is_ordered_after_every_stream_that_issued_in_it(comm: NCCLCommunicator, runtime: FakeRuntime) -> None:
    one, two = runtime.new_stream(-1), runtime.new_stream(-1)
    gate = threading.Event()
    tensors = [torch.zeros(4), torch.zeros(4)]
    comm.begin_block()
    for stream, tensor in zip((one, two), tensors, strict=True):
        runtime.use_stream(stream)
        stream.put(gate.wait)
        issue(comm, tensor)
    alive = weakref.ref(tensors[0])
    runtime.use_stream(two)
    work = comm.end_block()
    assert work is not None
    waits = {entry[2] for entry in runtime.log if entry[0] == "wait"}
    recorded = {entry[2] for entry in runtime.log if entry[0] == "record" and entry[1] in waits}
    assert {one.handle, two.handle} <= recorded
    work.wait()  # on one of the two: the other's memory is not its own
    del tensors, work, tensor
    gc.collect()
    assert alive() is not None
    runtime.use_stream(None)
    gate.set()
    wait_until(lambda: comm.pending_works() == [])


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
