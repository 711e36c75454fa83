"""The hook around CUDA graph captures, on a stand-in for torch.cuda.CUDAGraph: who waits for whom needs no GPU."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import pytest
import torch

from hpc_inflight import _gate, capture, group_set
from hpc_inflight.config import config
from hpc_inflight.errors import CommunicatorAborted, DrainTimeout
from tests.captures import Graph, Group


def test_a_capture_waits_for_what_is_in_flight(graph_class: type[Graph], group: Group) -> None:
    work = group.issue()
    timer = threading.Timer(0.2, work.finish)
    timer.start()
    graph = graph_class()
    graph.capture_begin("pool", capture_error_mode="relaxed")
    assert work.completed
    assert graph.seen == [("pool", "relaxed", True, True)]  # the mark is there, and nobody may enqueue, when it begins
    assert _gate.capturing()
    assert not _gate.gate.closed  # other threads' CPU works go on during the capture
    graph.capture_end()
    assert not _gate.capturing()


def test_a_drain_that_times_out_begins_no_capture_and_names_the_work(
    graph_class: type[Graph], group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = group.issue("all_to_all")
    graph = graph_class()
    with pytest.raises(
        DrainTimeout,
        match=r"capture: 1 pending after 0.05 s on group test \(rank 0 of 2\).*all_to_all \(seq 1\), "
        r"shape \(4,\), torch.float32, issued 0\.\d s ago",
    ):
        capture.begin(lambda: graph.capture_begin(), graph, 0.05, "capture")  # noqa: PLW0108  # the hook's is meant
    assert graph.seen == []
    assert not _gate.capturing()
    work.finish()
    graph.capture_begin()
    graph.capture_end()


def test_a_failed_capture_leaves_no_mark(graph_class: type[Graph], group: Group) -> None:
    graph = graph_class()
    graph.fails = True
    with pytest.raises(RuntimeError, match="refused"):
        graph.capture_begin()
    assert not _gate.capturing()
    graph.fails = False
    graph.capture_begin()
    graph.fails = True
    with pytest.raises(RuntimeError, match="invalidated"):
        graph.capture_end()
    assert not _gate.capturing()
    graph.fails = False
    graph.capture_begin()
    del graph  # its owner gave up between begin and end
    gc.collect()
    assert not _gate.capturing()


def test_an_aborted_group_makes_the_capture_fail_at_once(graph_class: type[Graph], group: Group) -> None:
    group.issue()
    group.failure = CommunicatorAborted("group test was aborted")
    with pytest.raises(CommunicatorAborted, match="group test was aborted"):
        graph_class().capture_begin()


def test_what_other_threads_enqueue_waits_until_the_capture_has_begun(graph_class: type[Graph], group: Group) -> None:
    gate, order = _gate.gate, []
    began, may_begin = threading.Event(), threading.Event()

    def begin() -> None:
        began.set()
        may_begin.wait(30)
        order.append("captured")

    graph = graph_class()
    graph.during = begin
    capturer = threading.Thread(target=graph.capture_begin)
    capturer.start()
    assert began.wait(30)

    def enqueue() -> None:
        gate.wait(600, "all_reduce")  # it is told, and does not find out as its time is over
        order.append("enqueued")

    issuer = threading.Thread(target=enqueue, daemon=True)
    issuer.start()
    issuer.join(0.2)
    assert issuer.is_alive()
    with pytest.raises(DrainTimeout, match=r"all_reduce: not enqueued within 0\.01 s, while another thread drained"):
        gate.wait(0.01, "all_reduce")
    may_begin.set()
    capturer.join(30)
    issuer.join(30)
    assert order == ["captured", "enqueued"]
    graph.capture_end()


def test_two_captures_at_once(graph_class: type[Graph], group: Group) -> None:
    one, two = graph_class(), graph_class()
    one.capture_begin()
    two.capture_begin()
    one.capture_end()
    assert _gate.capturing()
    two.capture_end()
    assert not _gate.capturing()


def test_the_hook_composes_with_another_wrapper(graph_class: type[Graph], group: Group) -> None:
    ours = graph_class.capture_begin
    calls = []

    def theirs(self: Any, *args: Any, **kwargs: Any) -> None:
        calls.append("theirs")
        ours(self, *args, **kwargs)

    graph_class.capture_begin = theirs  # type: ignore[method-assign]
    graph_class().capture_begin()
    capture._hook.remove()  # with the last group: ours stays below theirs, and does nothing
    work = group.issue()
    graph = graph_class()
    graph.capture_begin()
    assert not work.completed
    assert graph.seen == [(None, "global", False, False)]
    capture._hook.install()
    work.finish()
    graph_class().capture_begin()
    assert calls == ["theirs"] * 3
    graph_class.capture_begin = ours  # type: ignore[method-assign]
    capture._hook.remove()
    assert graph_class.capture_begin is Graph.capture_begin
    assert graph_class.capture_end is Graph.capture_end


def test_the_first_half_of_an_end_ends_the_capture(graph_class: type[Graph], monkeypatch: pytest.MonkeyPatch) -> None:
    """From torch 2.14 on it can be called by itself."""
    monkeypatch.setattr(graph_class, "capture_end_pre", lambda _graph: None, raising=False)
    made = Group()
    ticket = group_set.add(made)
    graph: Any = graph_class()
    graph.capture_begin()
    graph.capture_end_pre()
    assert not _gate.capturing()
    group_set.discard(ticket)


def test_the_hook_can_be_turned_off(graph_class: type[Graph], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPC_INFLIGHT_CAPTURE_DRAIN", "0")
    config.cache_clear()
    try:
        capture._hook.install()
        assert graph_class.capture_begin is Graph.capture_begin
    finally:
        monkeypatch.delenv("HPC_INFLIGHT_CAPTURE_DRAIN")
        config.cache_clear()


def test_the_hook_comes_with_the_first_group_and_goes_with_the_last() -> None:
    seen: list[str] = []
    group_set.watch(lambda: seen.append("first"), lambda: seen.append("last"))
    try:
        groups = [Group(), Group()]
        tickets = [group_set.add(made) for made in groups]
        group_set.discard(tickets[0])
        assert seen == ["first"]
        group_set.discard(tickets[1])
        group_set.discard(tickets[1])
        assert seen == ["first", "last"]
    finally:
        group_set._watchers.pop()


def test_a_group_that_is_being_destroyed_is_not_listed_but_counts() -> None:
    seen: list[str] = []
    group_set.watch(lambda: seen.append("first"), lambda: seen.append("last"))
    try:
        groups = [Group(), Group()]
        tickets = [group_set.add(made) for made in groups]
        for ticket in tickets:
            group_set.unlist(ticket)
        assert group_set.groups() == []
        group_set.discard(tickets[1])
        assert seen == ["first"]
        group_set.discard(tickets[0])
        assert seen == ["first", "last"]
        group_set.discard(tickets[0])
        assert seen == ["first", "last"]
    finally:
        group_set._watchers.pop()


def test_the_last_group_goes_during_a_capture(graph_class: type[Graph]) -> None:
    made = Group()
    ticket = group_set.add(made)
    graph = graph_class()
    graph.capture_begin()
    group_set.discard(ticket)  # by another thread, or in the body
    assert _gate.capturing()
    graph.capture_end()
    assert not _gate.capturing()  # though the graph lives on, for its replays
    assert graph_class.capture_begin is Graph.capture_begin


def test_a_drain_has_its_deadline_while_a_callback_runs(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """The work is complete by then, so nothing is pending; but more may be issued by the callback."""
    returned = threading.Event()
    monkeypatch.setattr(group, "is_idle", returned.is_set)
    used = time.thread_time()
    with pytest.raises(DrainTimeout, match=r"after 0.2 s a callback of a work on group test \(rank 0 of 2\) has not"):
        group_set.wait_for_all_pending_works(0.2)
    assert time.thread_time() - used < 0.1  # it sleeps
    threading.Timer(0.2, returned.set).start()
    group_set.wait_for_all_pending_works(30)


def test_what_a_callback_issues_on_a_group_that_was_looked_at_is_waited_for(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = Group()
    ticket = group_set.add(second)

    def call_back() -> None:
        with _gate.gate.runs_callbacks():
            assert _gate.gate.may_pass()
            group.issue("broadcast")

    def is_idle() -> bool:  # the callback's own group, looked at after the other one
        if not group.works:
            worker = threading.Thread(target=call_back)
            worker.start()
            worker.join(30)
        return True

    monkeypatch.setattr(second, "is_idle", is_idle)
    try:
        with pytest.raises(DrainTimeout, match="broadcast"):
            group_set.wait_for_all_pending_works(0.05)
    finally:
        group_set.discard(ticket)


def test_a_drain_that_gives_up_leaves_the_caller_s_stream(
    graph_class: type[Graph], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.cuda.graph changes it before the capture begins."""
    streams = ["mine"]

    class Entered(Context):
        def __enter__(self) -> None:
            streams.append("of the capture")
            super().__enter__()

    monkeypatch.setattr(torch.cuda, "graph", Entered)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: streams[-1])
    monkeypatch.setattr(torch.cuda, "set_stream", streams.append)
    enter = Entered.__enter__
    made = Group()
    ticket = group_set.add(made)
    monkeypatch.setattr(made, "failure", CommunicatorAborted("group test was aborted"))
    graph: Any = graph_class()
    with pytest.raises(CommunicatorAborted), torch.cuda.graph(graph):
        pass
    assert streams == ["mine", "of the capture", "mine"]
    group_set.discard(ticket)
    assert Entered.__enter__ is enter


class Context:
    """torch.cuda.graph, as far as the order of things goes."""

    def __init__(self, graph: Graph, **options: Any) -> None:
        self.graph, self.options = graph, options

    def __enter__(self) -> None:
        self.graph.capture_begin(**self.options)

    def __exit__(self, *_raised: object) -> None:
        self.graph.capture_end()


def test_the_explicit_form(graph_class: type[Graph], group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "graph", Context)
    graph = graph_class()
    with capture.graph(graph, timeout_s=5, capture_error_mode="thread_local"):
        assert _gate.capturing()
    assert not _gate.capturing()
    assert graph.seen == [(None, "thread_local", True, True)]
    work = group.issue()
    with pytest.raises(DrainTimeout, match=r"graph: 1 pending after 0\.05 s"), capture.graph(graph, timeout_s=0.05):
        pass
    work.finish()
    with pytest.raises(KeyError, match="body"), capture.graph(graph):
        raise KeyError("body")
    assert not _gate.capturing()


def test_the_explicit_form_blocks_for_the_device_where_the_watchdog_looks_on(
    graph_class: type[Graph], group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch synchronizes as its context begins; a kernel may be waiting for a rank that is missing."""
    seen: list[tuple[bool, bool]] = []

    def may_poll() -> bool:
        taken = threading.Event()

        def take() -> None:
            if _gate.polling.acquire(timeout=0.1):
                taken.set()
                _gate.polling.release()

        thread = threading.Thread(target=take)
        thread.start()
        thread.join()
        return taken.is_set()

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: seen.append((_gate.capturing(), may_poll())))
    monkeypatch.setattr(torch.cuda, "graph", Context)
    with capture.graph(graph_class()):
        pass
    assert seen == [(False, True)]
