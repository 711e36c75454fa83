"""The completion, without a backend: threads and futures in every order."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch

from hpc_inflight.communicators._mpi_worker import Worker
from hpc_inflight.errors import CollectiveTimeout, DrainTimeout
from hpc_inflight.group_set import add, discard, groups, wait_for_all_pending_works
from hpc_inflight.testing import wait_until
from hpc_inflight.work import Completion, Work


def make(timeout_s: float = 60.0) -> tuple[Completion, Work]:
    completion = Completion("all_reduce", "g", 7, timeout_s)
    return completion, Work(completion, [torch.ones(2)])


def test_wait_blocks_until_finished() -> None:
    completion, work = make()
    assert not work.is_completed()
    threading.Timer(0.1, completion.finish).start()
    assert work.wait() is True
    assert work.is_completed()
    assert work.is_success()


def test_wait_raises_what_the_operation_raised_every_time() -> None:
    completion, work = make()
    error = ValueError("lost")
    completion.finish(error)
    for _ in range(2):
        with pytest.raises(ValueError, match="lost"):
            work.wait()
    assert work.is_completed()
    assert not work.is_success()
    assert work.exception() is error


@pytest.mark.parametrize("timeout", [timedelta(seconds=0.05), timedelta(0)], ids=["its own", "the group's"])
def test_wait_past_the_deadline(timeout: timedelta) -> None:
    _, work = make(timeout_s=0.05)
    with pytest.raises(CollectiveTimeout, match=r"all_reduce \(seq 7\) on group g: not complete 0.05 s into the wait"):
        work.wait(timeout)
    assert not work.is_completed()


def test_many_waiters() -> None:
    completion, work = make()
    done: list[bool] = []
    threads = [threading.Thread(target=lambda: done.append(work.wait())) for _ in range(8)]
    for thread in threads:
        thread.start()
    completion.finish()
    for thread in threads:
        thread.join(60)
    assert done == [True] * 8


@pytest.mark.parametrize("first", ["future", "finish"])
def test_future(first: str) -> None:
    completion, work = make()
    if first == "finish":
        completion.finish()
    future = work.get_future()
    if first == "future":
        assert future is work.get_future()
    chained = future.then(lambda done: done.value()[0] * 3)
    if first == "future":
        assert not future.done()
        completion.finish()
    assert chained.wait().tolist() == [3.0, 3.0]
    assert [t.tolist() for t in work.result()] == [[1.0, 1.0]]


def test_future_of_a_failure() -> None:
    completion, work = make()
    future = work.get_future()
    completion.finish(ValueError("lost"))
    with pytest.raises(ValueError, match="lost"):
        future.wait()


def test_worker_runs_in_order_and_survives_failures() -> None:
    worker = Worker("test", max_pending=4)
    seen: list[int] = []
    gate = threading.Event()
    completions = [Completion("op", "g", i, 60.0) for i in range(3)]

    def fail() -> None:
        raise ValueError("second")

    worker.submit(completions[0], [gate.wait, lambda: seen.append(0)])
    worker.submit(completions[1], [fail])
    worker.submit(completions[2], [lambda: seen.append(2)])
    assert not worker.run_inline([lambda: seen.append(-1)], wait_turn=False)
    assert worker.pending() == completions
    gate.set()
    completions[2].block(60)
    assert seen == [0, 2]
    assert isinstance(completions[1].exception, ValueError)
    assert worker.run_inline([lambda: seen.append(3)], wait_turn=False)
    assert seen == [0, 2, 3]
    worker.stop()


def test_worker_makes_the_issuer_wait_when_it_is_far_ahead() -> None:
    worker = Worker("test", max_pending=2)
    gate = threading.Event()
    lengths: list[int] = []

    def issue() -> None:
        for i in range(50):
            worker.wait_for_room(60.0)
            worker.submit(Completion("op", "g", i, 60.0), [lambda: (gate.wait(), None)[1]])
            lengths.append(len(worker.pending()))

    issuer = threading.Thread(target=issue)
    issuer.start()
    wait_until(lambda: len(lengths) == 2)
    gate.set()  # not before: the first two are still there when the third is issued
    issuer.join(60)
    assert len(lengths) == 50
    assert lengths[:2] == [1, 2]
    assert max(lengths) == 2
    worker.stop()


def test_a_callback_may_issue_on_the_same_group() -> None:
    worker = Worker("test", max_pending=1)
    seen: list[str] = []
    first = Completion("op", "g", 1, 60.0)
    gate = threading.Event()
    worker.submit(first, [lambda: (gate.wait(), None)[1]])

    def issue(_: object) -> None:
        assert worker.run_inline([lambda: seen.append("inline")], wait_turn=False)

    chained = first.future([]).then(issue)
    gate.set()
    chained.wait()
    assert seen == ["inline"]
    worker.stop()


class Group:
    def __init__(self, *works: Completion) -> None:
        self.works = works

    def pending_works(self) -> list[Completion]:
        return [work for work in self.works if not work.completed]

    def is_idle(self) -> bool:
        return not self.pending_works()

    def quiesce(self, timeout_s: float) -> bool:  # noqa: ARG002  # the protocol's
        return True

    def shape_of(self, _work: Completion) -> str:
        return ""

    def describe(self) -> str:
        return "group test (rank 0 of 2)"

    def block_synchronous(self, deadline: float) -> None:
        """Do nothing: there is no GPU."""

    def forked(self) -> None:
        self.works = ()


def test_drain_waits_for_every_group_and_names_what_is_late() -> None:
    fast, late = Completion("broadcast", "a", 1, 60.0), Completion("all_to_all", "b", 9, 60.0)
    first, second = Group(fast), Group(late)
    tickets = [add(first), add(second)]
    try:
        assert groups()[-2:] == [first, second]
        fast.finish()
        with pytest.raises(
            DrainTimeout, match=r"1 pending after 0.2 s on group test \(rank 0 of 2\), the oldest all_to_all \(seq 9\)"
        ):
            wait_for_all_pending_works(0.2)
        threading.Timer(0.05, late.finish).start()
        wait_for_all_pending_works(60)
        assert late.completed
    finally:
        for ticket in tickets:
            discard(ticket)


def test_a_dropped_group_leaves_the_set() -> None:
    group = Group()
    add(group)
    assert group in groups()
    del group
    assert not any(isinstance(g, Group) for g in groups())
