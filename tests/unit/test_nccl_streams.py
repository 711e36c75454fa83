"""What the NCCL communicator launches on which stream, in which order, and what it keeps: on a recorded stand-in."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
import weakref
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from hpc_inflight import _cupy, _gate, flight_recorder
from hpc_inflight.communicators._nccl_stream import LARGE
from hpc_inflight.communicators.base import Reduction
from hpc_inflight.communicators.nccl import NCCLCommunicator
from hpc_inflight.errors import (
    CaptureError,
    CollectiveTimeout,
    DrainTimeout,
    GroupDestroyedError,
    InflightError,
    InvalidArgumentError,
    NCCLError,
    NCCLUnavailableError,
    UnsupportedError,
)
from hpc_inflight.flight_recorder import Lane
from hpc_inflight.process_group import ProcessGroupInflight
from hpc_inflight.testing import wait_until
from tests.nccl import SUM, closed_gate, issue

if TYPE_CHECKING:
    from hpc_inflight.testing.fake_nccl import FakeRuntime


def test_an_asynchronous_operation_is_ordered_on_both_sides(comm: NCCLCommunicator, runtime: FakeRuntime) -> None:
    side = runtime.new_stream(-1)
    runtime.use_stream(side)
    work = issue(comm, torch.ones(4))
    raw = comm._stream.raw
    (_, start, issuer), waits, launch, (_, end, on) = runtime.log
    assert issuer == side.handle
    assert waits == ("wait", raw, start)
    assert launch == ("all_reduce", raw)
    assert on == raw
    runtime.log.clear()
    runtime.use_stream(None)
    work.wait()
    assert runtime.log == [("wait", 0, end)]


def test_a_synchronous_operation_is_on_the_current_stream_and_needs_no_event(
    comm: NCCLCommunicator, runtime: FakeRuntime
) -> None:
    side = runtime.new_stream(-1)
    runtime.use_stream(side)
    work = comm.run_now([comm.all_reduce(torch.ones(4), SUM)])
    assert runtime.log == [("all_reduce", side.handle)]
    assert work.is_completed()
    runtime.use_stream(None)


def test_copies_back_come_after_the_group_on_the_same_stream(comm: NCCLCommunicator, runtime: FakeRuntime) -> None:
    work = issue(comm, torch.ones(4, 2).t(), torch.ones(3))
    raw = comm._stream.raw
    names = [entry[0] for entry in runtime.log]
    assert names == ["record", "wait", "group_start", "all_reduce", "all_reduce", "group_end", "run_on", "record"]
    assert all(entry[-1] == raw for entry in runtime.log if entry[0] in {"all_reduce", "run_on"})
    work.wait()


@pytest.mark.parametrize("fails", ["all_reduce", "group_end"])
def test_a_group_is_closed_and_the_next_operation_works(
    comm: NCCLCommunicator, runtime: FakeRuntime, fails: str
) -> None:
    calls = 0

    def fail(name: str) -> None:
        nonlocal calls
        calls += name == fails
        if name == fails and calls == (2 if fails == "all_reduce" else 1):
            raise KeyError(6)  # what CuPy makes of a status that its table lacks

    runtime.fail = fail
    with pytest.raises(NCCLError, match=r"all_reduce: NCCL status 6: .*ncclRemoteError"):
        issue(comm, torch.ones(4), torch.ones(4), torch.ones(4))
    assert not runtime.open_groups()
    assert runtime.log[-1][0] == "record"  # its tensors are kept until the stream is past it
    runtime.fail = lambda _name: None
    issue(comm, torch.ones(4)).wait()


def test_an_invalid_operation_is_refused_before_anything_is_launched(
    comm: NCCLCommunicator, runtime: FakeRuntime
) -> None:
    with pytest.raises(UnsupportedError, match=r"NCCL has no ReduceOp\.BAND; expected one of"):
        comm.all_reduce(torch.ones(2, dtype=torch.int32), Reduction("BAND"))
    with pytest.raises(UnsupportedError, match="no reduction"):
        comm.all_reduce(torch.ones(2).to(torch.float8_e4m3fn), SUM)
    with pytest.raises(UnsupportedError, match=r"layout torch\.sparse_coo"):
        comm.all_reduce(torch.ones(2).to_sparse(), SUM)
    assert runtime.log == []


def test_a_block_of_calls_is_one_group(comm: NCCLCommunicator, runtime: FakeRuntime) -> None:
    comm.begin_block()
    first, second = torch.ones(4), torch.ones(3)
    works = [issue(comm, first), issue(comm, second)]
    assert runtime.log == []
    with pytest.raises(InflightError, match="not issued before its block of coalesced calls ends"):
        works[0].wait()
    elsewhere: list[Any] = []
    thread = threading.Thread(target=lambda: elsewhere.append(issue(comm, torch.ones(1))))
    thread.start()
    thread.join()
    assert [entry[0] for entry in runtime.log] == ["record", "wait", "all_reduce", "record"]
    runtime.log.clear()
    whole = comm.end_block()
    assert whole is not None
    names = [entry[0] for entry in runtime.log]
    assert names == ["record", "wait", "group_start", "all_reduce", "all_reduce", "group_end", "record"]
    assert [t.numel() for t in whole.result()] == [4, 3]
    for work in (*works, whole):
        work.wait()
    assert comm.end_block() is None


def test_tensors_are_kept_until_the_device_is_through(runtime: FakeRuntime, comm: NCCLCommunicator) -> None:
    gate = threading.Event()
    comm._stream._stream.put(gate.wait)
    tensor = torch.ones(4)
    alive = weakref.ref(tensor)
    side = runtime.new_stream(-1)
    work = issue(comm, tensor)
    runtime.use_stream(side)
    work.wait()  # another stream than the one that issued: the memory is not its own
    runtime.use_stream(None)
    del tensor, work
    gc.collect()
    assert alive() is not None
    assert [w.op for w in comm.pending_works()] == ["all_reduce"]
    gate.set()
    comm._stream.pending[0].block(5.0)
    assert comm.pending_works() == []
    assert alive() is None


def test_tensors_go_when_the_issuing_stream_has_waited(runtime: FakeRuntime, comm: NCCLCommunicator) -> None:
    gate = threading.Event()
    comm._stream._stream.put(gate.wait)
    issuer = runtime.new_stream(-1)
    runtime.use_stream(issuer)
    tensor = torch.ones(4)
    alive = weakref.ref(tensor)
    work = issue(comm, tensor)
    del tensor
    work.wait()
    runtime.use_stream(None)
    del work
    gc.collect()
    assert alive() is None
    assert len(comm.pending_works()) == 1
    gate.set()


def test_wait_with_a_timeout_blocks_and_raises(runtime: FakeRuntime, comm: NCCLCommunicator) -> None:
    gate = threading.Event()
    comm._stream._stream.put(gate.wait)
    work = issue(comm, torch.ones(4))
    with pytest.raises(CollectiveTimeout, match=r"all_reduce \(seq 1\) on group g: not complete 0.05 s into the wait"):
        work.wait(timedelta(seconds=0.05))
    assert not work.is_completed()
    gate.set()
    work.wait(timedelta(seconds=5))
    assert work.is_completed()


def test_what_nccl_finds_wrong_ends_the_wait(runtime: FakeRuntime, comm: NCCLCommunicator) -> None:
    gate = threading.Event()
    comm._stream._stream.put(gate.wait)
    work = issue(comm, torch.ones(4))

    def fail(name: str) -> None:
        if name == "check":
            raise NCCLError("an operation in flight: NCCL status 6")

    runtime.fail = fail
    for _ in range(2):
        with pytest.raises(NCCLError, match="status 6"):
            work.wait(timedelta(seconds=5))
    gate.set()


def test_an_event_is_reused_only_when_nobody_can_wait_for_it(comm: NCCLCommunicator) -> None:
    work = issue(comm, torch.ones(4))
    event = work.completion.event
    work.completion.block(5.0)
    for _ in range(40):
        other = issue(comm, torch.ones(4))
        assert other.completion.event != event
        other.completion.block(5.0)
    assert event not in comm._stream.events
    comm.pending_works()
    del work
    assert event in comm._stream.events


def test_what_is_in_flight_is_bounded_and_few_events_are_asked(runtime: FakeRuntime, comm: NCCLCommunicator) -> None:
    gate = threading.Event()
    comm._max_pending = 20
    comm._stream._stream.put(gate.wait)
    threading.Timer(0.2, gate.set).start()
    for _ in range(100):
        issue(comm, torch.ones(4))
        assert len(comm._stream.pending) <= 20 + 8
    asked = 0
    real = runtime.event_done

    def count(event: int) -> bool:
        nonlocal asked
        asked += 1
        return real(event)

    runtime.event_done = count  # type: ignore[method-assign]
    comm.pending_works()
    asked = 0
    for _ in range(80):
        issue(comm, torch.ones(4)).wait()
    assert asked <= 30
    for _ in range(10):
        issue(comm, torch.ones(LARGE // 4)).wait()
        assert len(comm._stream.pending) <= 20


def test_nothing_is_asked_or_kept_in_a_capture(runtime: FakeRuntime, comm: NCCLCommunicator) -> None:
    before = issue(comm, torch.ones(4))
    before.completion.block(5.0)
    other = issue(comm, torch.ones(4))
    side = runtime.new_stream(-1)
    runtime.use_stream(side)
    runtime.is_capturing = True
    assert not other.is_completed()
    with pytest.raises(CaptureError, match="all_reduce on group g: captured while 1 of its operations are enqueued"):
        issue(comm, torch.ones(4))
    with pytest.raises(CaptureError, match="a synchronous collective on group g: captured while 1 of its"):
        comm.run_now([comm.all_reduce(torch.ones(4), Reduction("SUM"))])
    runtime.is_capturing = False
    other.completion.block(5.0)
    runtime.is_capturing = True
    captured = issue(comm, torch.ones(4))
    assert captured.completion not in comm._stream.pending
    captured.wait()
    runtime.is_capturing = False
    runtime.use_stream(None)
    runtime.log.clear()
    captured.wait()  # outside, there is nothing to wait for
    assert runtime.log == []
    other = issue(comm, torch.ones(4))
    capture = threading.Event()  # anything will do
    _gate.capture_began(capture)  # by another thread
    assert not other.is_completed()
    _gate.capture_ended(capture)
    other.completion.block(5.0)
    fresh: Any = SimpleNamespace(rank=0, size=1)
    runtime.is_capturing = True
    with pytest.raises(InvalidArgumentError, match="none can be made while a CUDA graph is captured"):
        NCCLCommunicator(fresh, 0, "other", -1, 1.0)
    runtime.is_capturing = False


def test_nothing_slips_between_a_drain_and_what_it_is_for(
    comm: NCCLCommunicator, runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that has looked at the gate, and has not taken its lock yet, when another closes it and looks."""
    lock, gate, stopped = comm._stream.lock, _gate.gate, threading.Event()

    class Lock:
        """Closes the gate just before it is taken for the first time, in another thread."""

        def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
            if not stopped.is_set():
                drain = threading.Thread(target=gate.close)
                drain.start()
                drain.join()
                assert comm.is_idle()
                stopped.set()
            return lock.acquire(blocking, timeout)

        release, locked, __exit__ = lock.release, lock.locked, lock.__exit__

        def __enter__(self) -> bool:
            return self.acquire()

    monkeypatch.setattr(comm._stream, "lock", Lock())
    issuing = threading.Thread(target=issue, args=(comm, torch.ones(4)), daemon=True)
    issuing.start()
    try:
        assert stopped.wait(30)
        issuing.join(0.2)
        assert issuing.is_alive()
        assert runtime.log == []
    finally:
        gate._closers.clear()
        with gate._opened:
            gate.closed = False
            gate._opened.notify_all()
    issuing.join(30)
    assert not issuing.is_alive()
    assert runtime.log


def test_futures(runtime: FakeRuntime, comm: NCCLCommunicator) -> None:
    gate = threading.Event()
    comm._stream._stream.put(gate.wait)
    tensor = torch.ones(4)
    work = issue(comm, tensor)
    future = work.get_future()
    assert future is work.get_future()
    chained = future.then(lambda done: done.value()[0] * 2)
    assert not chained.done()
    gate.set()
    assert chained.wait().tolist() == [2.0] * 4
    work.completion.block(5.0)
    assert work.get_future().wait()[0] is tensor


def test_a_message_to_oneself(runtime: FakeRuntime, comm: NCCLCommunicator) -> None:
    into = torch.zeros(2, 3).t()
    received = comm.recv(into, 0, 0, 5.0)
    assert not received.is_completed()
    future = received.get_future()
    sent = comm.send(torch.arange(6.0), 0, 0, 5.0)
    received.wait()
    sent.wait()
    assert into.flatten().tolist() == [0, 1, 2, 3, 4, 5]
    assert future.wait()[0] is into
    assert received.source_rank() == 0
    with pytest.raises(CollectiveTimeout, match="it waits for rank 0 to issue the other end"):
        comm.send(torch.ones(1), 0, 0, 0.05).wait()
    comm.recv(torch.ones(1), 0, 0, 5.0).wait()


def test_destroying(runtime: FakeRuntime) -> None:
    alone: Any = SimpleNamespace(rank=0, size=1)
    comm = NCCLCommunicator(alone, 0, "g", -1, 10.0)
    issue(comm, torch.ones(4))
    comm.shutdown(5.0)
    assert [how for how, _ in runtime.destroyed] == ["destroy"]
    with pytest.raises(GroupDestroyedError, match="was destroyed"):
        issue(comm, torch.ones(4))
    comm = NCCLCommunicator(alone, 0, "g", -1, 10.0)
    gate = threading.Event()
    comm._stream._stream.put(gate.wait)
    issue(comm, torch.ones(4))
    with pytest.raises(DrainTimeout, match=r"destroying group g: all_reduce \(seq 1\)"):
        comm.shutdown(0.05)
    assert [how for how, _ in runtime.destroyed] == ["destroy", "abort"]
    gate.set()


def test_destroying_after_an_abort_ends_nothing_twice(runtime: FakeRuntime) -> None:
    """A second end gave NCCL's handle and the streams' events up twice: to whoever had got them since."""
    alone: Any = SimpleNamespace(rank=0, size=1)
    comm = NCCLCommunicator(alone, 0, "g", -1, 10.0)
    issue(comm, torch.ones(4)).wait()
    comm.send(torch.ones(1), 0, 0, 5.0)  # a second stream
    comm.abort()
    comm.abort()
    comm.shutdown(5.0)
    comm.shutdown(5.0)
    assert [how for how, _ in runtime.destroyed] == ["abort"]
    del comm
    gc.collect()
    unused = runtime.events[-1]
    assert len(unused) > 2
    assert len(set(unused)) == len(unused)


def real_runtime(monkeypatch: pytest.MonkeyPatch, communicator: object = None) -> _cupy.Runtime:
    """Return what CuPy gives where there is no GPU."""
    cuda = SimpleNamespace(eventRecord=None, streamWaitEvent=None, eventQuery=None, memcpyAsync=None)
    nccl = SimpleNamespace(get_version=lambda: 22809, groupStart=None, groupEnd=None, NcclCommunicator=communicator)
    monkeypatch.setattr(_cupy, "_import_cupy", lambda: (cuda, nccl))
    monkeypatch.setattr("hpc_inflight._torch_compat.cuda_functions", lambda: (None, None, None))
    return _cupy.Runtime()


def no_driver(_name: str) -> None:
    raise OSError("libcuda.so.1: cannot open shared object file")


@pytest.mark.parametrize("driver", ["missing", "refuses", "there"])
def test_the_watchdog_outlives_a_driver_that_is_missing(monkeypatch: pytest.MonkeyPatch, driver: str) -> None:
    """CuPy can be imported there, and a first CUDA tensor fails; CPU tensors go on."""
    monkeypatch.setattr(_cupy, "_runtime", real_runtime(monkeypatch))
    modes = [0]

    def exchange(held: Any) -> int:
        if driver == "refuses":
            return 201  # CUDA_ERROR_INVALID_CONTEXT
        mode = held._obj
        modes.append(mode.value)
        mode.value = modes[-2]
        return 0

    library = SimpleNamespace(cuThreadExchangeStreamCaptureMode=exchange)
    monkeypatch.setattr(ctypes, "CDLL", no_driver if driver == "missing" else lambda _: library)
    assert _cupy.relax_captures() == (driver == "there")
    with _cupy.apart_from_captures(_cupy.runtime()):
        pass
    assert modes == ([0, 1, 2, 1] if driver == "there" else [0])  # global, thread-local, relaxed, as before


def test_a_handle_is_let_go_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Handle:
        def __init__(self, *_: object) -> None:
            self.calls: list[str] = []

        def destroy(self) -> None:
            self.calls.append("destroy")

        def abort(self) -> None:
            self.calls.append("abort")

    made = real_runtime(monkeypatch, Handle)
    handle = made.communicator(1, b"", 0)
    held = sys.getrefcount(handle)
    made.abort(handle)
    assert sys.getrefcount(handle) == held - 1
    made.abort(handle)
    made.destroy(handle)
    assert sys.getrefcount(handle) == held - 1


def test_an_abort_that_hangs_is_left_behind(
    runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("hpc_inflight.communicators._nccl_life._END_S", 0.1)
    alone: Any = SimpleNamespace(rank=0, size=1)
    comm = NCCLCommunicator(alone, 0, "g", -1, 10.0)
    gate = threading.Event()

    def hang(name: str) -> None:
        if name == "abort":
            gate.wait()

    runtime.fail = hang
    comm.abort()
    comm.abort()
    assert "group g: NCCL did not end 1 of 1 communicators within 0.1 s; they are left behind" in caplog.text
    gate.set()


def test_without_cupy_the_error_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_cupy, "_runtime", None)
    monkeypatch.setitem(__import__("sys").modules, "cupy.cuda", None)
    with pytest.raises(NCCLUnavailableError, match=r"pip install 'hpc_inflight\[cuda1\d\]'"):
        _cupy.runtime()


def test_what_passed_the_gate_before_it_closed_is_seen_by_the_drain(
    comm: NCCLCommunicator, runtime: FakeRuntime
) -> None:
    # the launch is held where it is: the drain must neither begin its capture nor miss what comes of the launch
    inside, go_on = threading.Event(), threading.Event()

    def hold(name: str) -> None:
        if name == "all_reduce":
            inside.set()
            go_on.wait(30)

    runtime.fail = hold
    issuer = threading.Thread(target=issue, args=(comm, torch.ones(4)))
    issuer.start()
    assert inside.wait(30)
    _gate.gate.close()
    try:
        assert not comm.is_idle()
        runtime.fail = lambda _name: None
        go_on.set()
        issuer.join(30)
        assert not comm.is_idle()  # it may be complete, but nobody has looked
        (work,) = [*comm._stream.pending]
        work.block(30)
    finally:
        _gate.gate.open()


@pytest.mark.parametrize("op", ["collective", "message"])
def test_what_comes_to_the_closed_gate_is_launched_when_it_opens(
    comm: NCCLCommunicator, runtime: FakeRuntime, op: str
) -> None:
    call = {"collective": lambda: issue(comm, torch.ones(4)), "message": lambda: comm.send(torch.ones(4), 0, 0, 10.0)}
    with closed_gate() as open_gate:
        issuer = threading.Thread(target=call[op])
        issuer.start()
        issuer.join(0.2)
        assert issuer.is_alive()
        assert comm.is_idle()
        open_gate()
        issuer.join(30)
    assert not comm.is_idle()
    if op == "message":
        comm.recv(torch.ones(4), 0, 0, 10.0)


def test_the_watchdog_sees_what_synchronous_operations_leave_on_their_stream(
    comm: NCCLCommunicator, runtime: FakeRuntime
) -> None:
    comm.size = 2  # alone nobody waits for anybody
    held = threading.Event()
    side = runtime.new_stream(-1)
    side.put(held.wait)
    runtime.use_stream(side)
    tensor = torch.ones(4)

    def run() -> None:
        comm.run_now([comm.all_reduce(tensor, SUM)])

    assert comm.synchronous("all_reduce", 5.0) is None
    run()
    run()
    seen = comm.synchronous("all_reduce", 5.0)
    assert seen is not None
    assert (seen.op, seen.seq, seen.device_type, seen.timeout_s) == ("all_reduce", 2, "cuda", 5.0)
    assert comm.synchronous("all_reduce", 5.0) is seen  # so that it ages
    assert comm.pending_works() == []  # a drain waits for what is enqueued alone
    run()
    later = comm.synchronous("all_reduce", 5.0)
    assert later is not None
    assert later.seq == 3
    held.set()
    wait_until(lambda: comm.synchronous("all_reduce", 5.0) is None)
    runtime.use_stream(None)


def test_the_watchdog_sees_a_block_of_calls_whose_launch_waits_for_other_ranks(
    comm: NCCLCommunicator, runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers_come = threading.Event()
    end = runtime.group_end
    monkeypatch.setattr(runtime, "group_end", lambda: (peers_come.wait(30), end()))
    mpi, lane = SimpleNamespace(called_at=0.0), Lane(flight_recorder.Group(0, 2, 10.0), "nccl")
    group: Any = SimpleNamespace(_comm=mpi, _nccl=comm, _nccl_lane=lane, _timeout_s=10.0, _coalescing=[])
    group._coalesces, group.issued = lambda: True, lambda _: comm.seq

    def launch() -> None:
        comm.begin_block()
        for _ in range(2):
            lane.called = "all_reduce"
            ProcessGroupInflight._issued(group, issue(comm, torch.ones(4)), ())
        comm.end_block()

    assert ProcessGroupInflight.running(group) is None
    thread = threading.Thread(target=launch)
    thread.start()
    wait_until(lambda: ProcessGroupInflight.running(group) is not None)
    running = ProcessGroupInflight.running(group)
    assert running is not None
    assert (running[0], running[1], *running[3:]) == ("coalesced", 1, 10.0, "cuda")
    assert ProcessGroupInflight.op_of(group, 1, "cuda") == "coalesced"  # what it would answer another rank
    peers_come.set()
    thread.join(30)
    assert ProcessGroupInflight.running(group) is None


def test_the_watchdog_names_the_operation_on_the_tensors_that_it_asks_about() -> None:
    nccl, mpi = (Lane(flight_recorder.Group(0, 2, 10.0), transport) for transport in ("nccl", "mpi"))
    group: Any = SimpleNamespace(_lane=mpi, _nccl_lane=nccl, issued=lambda kind: {"cuda": 1, "cpu": 2}[kind])
    nccl.begin("all_reduce", [torch.ones(1)])
    mpi.begin("broadcast", [torch.ones(1)])
    mpi.begin("barrier", ())  # of a group on both
    assert [ProcessGroupInflight.op_of(group, *at) for at in ((1, "cuda"), (2, "cpu"), (1, "cpu"))] == [
        "all_reduce",
        "barrier",
        "",
    ]


def test_the_watchdog_looks_at_works_while_another_thread_is_inside_a_launch(comm: NCCLCommunicator) -> None:
    issue(comm, torch.ones(4)).wait()
    with comm._stream.lock:
        comm.pending_works()
