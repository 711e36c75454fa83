"""Ending NCCL's communicators beside captures, and beside graphs that have captured their collectives."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
import weakref
from typing import TYPE_CHECKING

import pytest
import torch

from hpc_inflight import _gate, capture, group_set
from hpc_inflight._cupy import _RELAXED as RELAXED
from hpc_inflight.communicators._nccl_p2p import Loopback
from hpc_inflight.communicators.nccl import NCCLCommunicator
from hpc_inflight.errors import CaptureError, DrainTimeout
from hpc_inflight.testing import wait_until
from tests.captures import Graph, Group
from tests.nccl import ALONE, SUM, closed_gate, issue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hpc_inflight.communicators._nccl_p2p import Message
    from hpc_inflight.testing.fake_nccl import FakeRuntime

LIFE = "hpc_inflight.communicators._nccl_life."


def of_two() -> NCCLCommunicator:
    made = NCCLCommunicator(ALONE, 0, "other", -1, 10.0)
    made.size = 2  # alone it would have no part in a graph
    return made


@pytest.fixture
def other(runtime: FakeRuntime) -> NCCLCommunicator:
    return of_two()


@contextlib.contextmanager
def capturing(runtime: FakeRuntime, graph: Graph) -> Iterator[None]:
    """Capture on a stream of its own."""
    runtime.use_stream(runtime.new_stream(-1))
    graph.capture_begin()
    runtime.is_capturing = True
    try:
        yield
    finally:
        runtime.is_capturing = False
        graph.capture_end()
        runtime.use_stream(None)


def captured(comm: NCCLCommunicator, runtime: FakeRuntime, graph: Graph) -> None:
    """Capture an operation."""
    tensor = torch.ones(4)
    with capturing(runtime, graph):
        work = issue(comm, tensor)
    wait_until(lambda: runtime.event_done(work.completion.event))  # the stand-in runs what it captures


@contextlib.contextmanager
def hanging(runtime: FakeRuntime, call: str) -> Iterator[tuple[threading.Event, Callable[[], None]]]:
    """Have NCCL not come back from a call; yield what is set when it is there, and what lets it return."""
    there, may_return = threading.Event(), threading.Event()

    def hang(name: str) -> None:
        if name == call:
            there.set()
            may_return.wait(30)

    runtime.fail = hang
    try:
        yield there, may_return.set
    finally:
        runtime.fail = lambda _name: None
        may_return.set()


def begin_in_thread(graph: Graph, timeout_s: float = 30.0) -> tuple[threading.Event, Callable[[], None]]:
    """Begin a capture in another thread; return what is set when it has begun, and what ends it."""
    begun, may_end = threading.Event(), threading.Event()

    def run() -> None:
        capture.begin(begun.set, graph, timeout_s, "test")
        may_end.wait(30)
        _gate.capture_ended(graph)

    thread = threading.Thread(target=run)
    thread.start()

    def end() -> None:
        may_end.set()
        thread.join(30)

    return begun, end


@contextlib.contextmanager
def destroying(comm: NCCLCommunicator) -> Iterator[None]:
    """Destroy in another thread."""
    thread = threading.Thread(target=comm.shutdown, args=(5.0,))
    thread.start()
    yield
    thread.join(30)


def ends(runtime: FakeRuntime) -> list[str]:
    return [how for how, _ in runtime.destroyed]


# beside graphs --------------------------------------------------------------------------------------------------


def test_beside_a_graph_that_captured_nccl_is_not_called(
    runtime: FakeRuntime, graph_class: type[Graph], group: Group, caplog: pytest.LogCaptureFixture
) -> None:
    """It would block until the graph is gone, and go on then, whatever is captured at that time."""
    caplog.set_level("INFO")
    comm = of_two()
    graph = graph_class()
    captured(comm, runtime, graph)
    token = weakref.ref(comm._token)  # replays of a captured barrier write to it
    started = time.monotonic()
    comm.shutdown(5.0)
    assert time.monotonic() - started < 1
    assert "group other: its NCCL communicators are left to the end of the process: a CUDA graph that" in caplog.text
    del graph, comm
    gc.collect()
    time.sleep(0.1)
    assert ends(runtime) == []
    assert token() is not None


@pytest.mark.parametrize("end", ["gone", "in a cycle", "reset"])
def test_after_the_graph_the_communicator_is_destroyed(
    end: str, other: NCCLCommunicator, runtime: FakeRuntime, graph_class: type[Graph], group: Group
) -> None:
    graph = graph_class()
    captured(other, runtime, graph)
    if end == "in a cycle":  # as those of torch.cuda.make_graphed_callables
        graph.seen.append(graph)
    if end != "reset":
        del graph
    else:
        graph.reset()
        captured(of_two(), runtime, graph)  # the same object, for another one
    other.shutdown(5.0)
    assert ends(runtime) == ["destroy"]


def test_a_graph_that_cannot_capture_again_holds_what_it_has(
    other: NCCLCommunicator, runtime: FakeRuntime, graph_class: type[Graph], group: Group
) -> None:
    graph = graph_class()
    captured(other, runtime, graph)
    graph.fails = True
    with pytest.raises(RuntimeError, match="capture refused"):
        graph.capture_begin()
    other.shutdown(5.0)
    assert ends(runtime) == []


def test_a_rank_alone_has_no_part_in_a_graph(
    runtime: FakeRuntime, comm: NCCLCommunicator, graph_class: type[Graph], group: Group
) -> None:
    graph = graph_class()
    captured(comm, runtime, graph)
    comm.shutdown(5.0)
    assert ends(runtime) == ["destroy"]
    assert graph is not None


def test_a_graph_that_refused_an_operation_has_no_part(
    other: NCCLCommunicator, runtime: FakeRuntime, graph_class: type[Graph], group: Group
) -> None:
    graph = graph_class()
    may_go = threading.Event()
    other._stream._stream.put(may_go.wait)
    tensor = torch.ones(4)
    with capturing(runtime, graph):
        runtime.is_capturing = False
        work = issue(other, tensor)
        runtime.is_capturing = True
        with pytest.raises(CaptureError, match="captured while 1 of its operations are enqueued"):
            issue(other, tensor)
    may_go.set()
    work.completion.block(5.0)
    other.shutdown(5.0)
    assert ends(runtime) == ["destroy"]
    assert graph is not None


def test_a_synchronous_operation_that_fails_behind_its_launch_is_in_the_graph(
    other: NCCLCommunicator, runtime: FakeRuntime, graph_class: type[Graph], group: Group
) -> None:
    def operation(_stream: int) -> Callable[[], None]:
        def copy_back() -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

        return copy_back

    graph = graph_class()
    with capturing(runtime, graph), pytest.raises(torch.OutOfMemoryError):
        other.run_now([operation])
    other.shutdown(5.0)
    assert ends(runtime) == []
    assert graph is not None


def test_an_abort_does_not_wait_for_graphs_as_nccl_does(
    other: NCCLCommunicator, runtime: FakeRuntime, graph_class: type[Graph], group: Group
) -> None:
    with pytest.MonkeyPatch.context() as patch, hanging(runtime, "abort") as (there, _):
        patch.setattr(LIFE + "_LAUNCH_S", 0.2)
        graph = graph_class()
        captured(other, runtime, graph)
        started = time.monotonic()
        other.abort()
        assert there.is_set()
        assert time.monotonic() - started < 5
        with capturing(runtime, graph_class()):  # the graph is there, so NCCL stays where it is
            alive = weakref.ref(graph)
            del graph
            assert alive() is not None
        assert alive() is None
        begun, end = begin_in_thread(graph_class())
        assert not begun.wait(0.2)  # the graph is gone: NCCL goes on
    assert begun.wait(30)
    end()
    assert ends(runtime) == ["abort"]


def test_an_abort_that_does_not_return_when_graphs_are_gone(
    other: NCCLCommunicator,
    runtime: FakeRuntime,
    graph_class: type[Graph],
    group: Group,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LIFE + "_LAUNCH_S", 0.2)
    monkeypatch.setattr(_gate, "_LINGERS_S", 0.5)
    graph = graph_class()
    captured(other, runtime, graph)
    with hanging(runtime, "abort"):
        other.abort()
        del graph
        with capturing(runtime, graph_class()):
            assert ends(runtime) == []


def test_a_graph_that_goes_while_an_abort_is_waited_for(
    other: NCCLCommunicator,
    runtime: FakeRuntime,
    graph_class: type[Graph],
    group: Group,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LIFE + "_LAUNCH_S", 0.5)
    graphs = [graph_class()]
    captured(other, runtime, graphs[0])
    with hanging(runtime, "abort") as (there, _):
        aborter = threading.Thread(target=other.abort)
        aborter.start()
        assert there.wait(30)
        graphs.clear()  # now NCCL goes on
        aborter.join(30)
        begun, end = begin_in_thread(graph_class())
        assert not begun.wait(0.2)
    assert begun.wait(30)
    end()


def test_what_keeps_an_abort_is_kept_though_another_capture_ends(
    other: NCCLCommunicator,
    runtime: FakeRuntime,
    graph_class: type[Graph],
    group: Group,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LIFE + "_LAUNCH_S", 0.1)
    graph = graph_class()
    captured(other, runtime, graph)
    with hanging(runtime, "abort"):
        other.abort()
        alive = weakref.ref(graph)
        with capturing(runtime, graph_class()):
            _gate.capture_ended(graph_class())  # of no capture
            del graph
            assert alive() is not None
    wait_until(lambda: not _gate.lingers())


def test_an_abort_that_lingers_outlives_the_last_group(
    other: NCCLCommunicator, runtime: FakeRuntime, graph_class: type[Graph], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LIFE + "_LAUNCH_S", 0.1)
    made = Group()
    ticket = group_set.add(made)
    graph = graph_class()
    captured(other, runtime, graph)
    with hanging(runtime, "abort"):
        other.abort()
        group_set.discard(ticket)
        graph.reset()  # now NCCL goes on
        begun = threading.Event()
        new = graph_class()

        def begin() -> None:
            new.capture_begin()
            begun.set()
            new.capture_end()

        thread = threading.Thread(target=begin)
        thread.start()
        assert not begun.wait(0.2)
    assert begun.wait(30)
    thread.join(30)
    ticket = group_set.add(made)  # and the hook goes with the next last group
    group_set.discard(ticket)
    assert graph_class.capture_begin is Graph.capture_begin


def test_what_was_captured_unseen_is_taken_for_a_graph_that_stays(
    other: NCCLCommunicator, runtime: FakeRuntime
) -> None:
    """As with the hook turned off: NCCL's destroy would wait for it."""
    tensor = torch.ones(4)
    with capturing(runtime, Graph()):
        work = issue(other, tensor)
    wait_until(lambda: runtime.event_done(work.completion.event))
    other.shutdown(5.0)
    assert ends(runtime) == []


def test_a_message_is_part_of_a_graph(
    other: NCCLCommunicator,
    runtime: FakeRuntime,
    graph_class: type[Graph],
    group: Group,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    issued = []

    def issue_message(_pair: Loopback, message: Message, *, captured: bool = False) -> Message:
        issued.append((message.op, captured))
        return message

    monkeypatch.setattr(Loopback, "issue", issue_message)
    monkeypatch.setattr(Loopback, "may_capture", lambda *_: None)
    graph = graph_class()
    with capturing(runtime, graph):
        other._message("send", 0, 5.0, torch.ones(4), None, None)
    assert issued == [("send", True)]
    other.shutdown(5.0)
    assert ends(runtime) == []


def test_a_message_that_is_refused_is_no_part_of_a_graph(
    other: NCCLCommunicator, runtime: FakeRuntime, graph_class: type[Graph], group: Group
) -> None:
    graph = graph_class()
    with capturing(runtime, graph):
        for peer, text in ((0, "a message to oneself"), (1, "the two ranks are not connected")):
            with pytest.raises(CaptureError, match=text):
                other.send(torch.ones(4), peer, 0, 5.0)
    other.shutdown(5.0)
    assert ends(runtime) == ["destroy"]
    assert graph is not None


# beside captures ------------------------------------------------------------------------------------------------


def test_who_captures_does_not_wait_for_what_is_in_flight_either(
    other: NCCLCommunicator, runtime: FakeRuntime, graph_class: type[Graph], group: Group
) -> None:
    may_go_on = threading.Event()
    other._stream._stream.put(may_go_on.wait)
    with capturing(runtime, graph_class()):
        runtime.is_capturing = False  # another stream than that of the capture
        work = issue(other, torch.ones(4))
        runtime.is_capturing = True
        started = time.monotonic()
        other.shutdown(30.0)
        assert time.monotonic() - started < 15
        may_go_on.set()
    assert ends(runtime) == []
    work.completion.block(30.0)


@pytest.mark.parametrize("how", ["asynchronous", "synchronous", "connecting", "message"])
def test_what_is_launched_beside_another_thread_s_capture_does_not_end_it(
    how: str, other: NCCLCommunicator, runtime: FakeRuntime, group: Group
) -> None:
    """NCCL's launch asks about an event of its own where a graph holds the communicator, and torch may allocate."""
    modes: list[int] = []

    def note(call: str) -> None:
        if call == {"connecting": "zeros", "message": "copy"}.get(how, "all_reduce"):
            modes.append(runtime.capture_mode())

    runtime.fail = note

    def launch() -> None:
        tensor = torch.ones(4)
        if how == "asynchronous":
            issue(other, tensor).wait()
        elif how == "synchronous":
            other.run_now([other.all_reduce(tensor, SUM)])
        elif how == "message":
            other.send(tensor, 0, 0, 5.0)
            other.recv(torch.ones(4), 0, 0, 5.0).wait()
        else:
            of_two().shutdown(5.0)

    begun, end = begin_in_thread(Graph())
    assert begun.wait(30)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LIFE + "_END_S", 0.1)
        launch()
    end()
    launch()
    assert modes == [RELAXED, RELAXED if how == "connecting" else 0]
    assert runtime.capture_mode() == 0


def test_a_communicator_is_destroyed_when_the_capture_has_ended(
    other: NCCLCommunicator, runtime: FakeRuntime, group: Group
) -> None:
    begun, end = begin_in_thread(Graph())
    assert begun.wait(30)
    with destroying(other):
        time.sleep(0.2)
        assert ends(runtime) == []
        end()
    assert ends(runtime) == ["destroy"]


@pytest.mark.parametrize("whose", ["own", "another thread's"])
def test_a_capture_that_does_not_end_is_left_alone(
    whose: str, other: NCCLCommunicator, runtime: FakeRuntime, graph_class: type[Graph], group: Group
) -> None:
    if whose == "own":
        with capturing(runtime, graph_class()):
            started = time.monotonic()
            other.shutdown(5.0)
            assert time.monotonic() - started < 5  # who captures cannot wait for its end
    else:
        begun, end = begin_in_thread(Graph())
        assert begun.wait(30)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LIFE + "_END_S", 0.2)
            other.shutdown(5.0)
        end()
    assert ends(runtime) == []


@pytest.mark.parametrize("when", ["before", "after the drain"])
def test_a_capture_waits_for_a_communicator_that_is_being_destroyed(
    when: str, other: NCCLCommunicator, runtime: FakeRuntime, group: Group
) -> None:
    graph, begun, settled = Graph(), threading.Event(), threading.Event()

    def begin() -> None:
        if when == "before":
            assert there.wait(30)
        capture.begin(begun.set, graph, 30.0, "test", settle)

    def settle() -> None:  # between the drain and the mark, as hi.graph waits for the device
        settled.set()
        if when != "before":
            assert there.wait(30)

    thread = threading.Thread(target=begin)
    with hanging(runtime, "destroy") as (there, may_return):
        thread.start()
        if when != "before":
            assert settled.wait(30)
        with destroying(other):
            assert there.wait(30)
            assert not begun.wait(0.2)
            with pytest.raises(DrainTimeout, match=r"after 0.05 s NCCL has not ended the communicators of group other"):
                capture.begin(lambda: None, Graph(), 0.05, "test")
            group_set.wait_for_all_pending_works(0.0)  # no work is pending
            assert not _gate.gate.closed  # others may enqueue
            may_return()
    assert begun.wait(30)
    thread.join(30)
    assert _gate.capturing()
    _gate.capture_ended(graph)
    assert ends(runtime) == ["destroy"]


def test_a_capture_does_not_wait_for_ever_for_nccl(
    other: NCCLCommunicator, runtime: FakeRuntime, group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LIFE + "_END_S", 0.5)
    with hanging(runtime, "destroy") as (there, _), destroying(other):
        assert there.wait(30)
        begun, end = begin_in_thread(Graph())
        assert not begun.wait(0.1)
        assert begun.wait(30)  # NCCL has still not returned
        end()


def test_a_capture_waits_for_an_abort_that_began_beside_another(
    other: NCCLCommunicator, runtime: FakeRuntime, group: Group
) -> None:
    first = Graph()
    _gate.capture_began(first)
    with hanging(runtime, "abort") as (there, _):
        aborter = threading.Thread(target=other.abort)
        aborter.start()
        assert there.wait(30)  # it does not wait for the capture
        _gate.capture_ended(first)
        begun, end = begin_in_thread(Graph())
        assert not begun.wait(0.2)
    assert begun.wait(30)
    end()
    aborter.join(30)


def test_a_capture_that_does_not_end_is_waited_for_once(
    runtime: FakeRuntime, group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LIFE + "_END_S", 0.5)
    stuck = Graph()
    _gate.capture_began(stuck)
    started = time.monotonic()
    for _ in range(20):
        of_two().shutdown(5.0)
    assert time.monotonic() - started < 5
    _gate.capture_ended(stuck)
    assert _gate.capture_began(stuck)  # another one, of which nobody knows yet that it does not end
    started = time.monotonic()
    of_two().shutdown(5.0)
    assert time.monotonic() - started >= 0.5
    _gate.capture_ended(stuck)
    assert ends(runtime) == []


def test_a_forked_child_knows_of_nothing_that_threads_were_at(group: Group) -> None:
    graph = Graph()
    with _gate.ending("g", 0.0), closed_gate():
        _gate.capture_began(graph)
        child = os.fork()
        if child == 0:
            os._exit(bool(_gate.being_ended() or _gate.capturing() or _gate.gate.closed))
        assert os.waitpid(child, 0)[1] == 0
        assert _gate.being_ended()
    _gate.capture_ended(graph)
