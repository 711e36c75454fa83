"""What the watchdog does about its own mistakes: nothing of a program may end by them."""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

import pytest

from hpc_inflight import _gate, group_set, watchdog
from hpc_inflight.errors import CollectiveTimeout
from hpc_inflight.work import Completion

if TYPE_CHECKING:
    from collections.abc import Iterator


class Group:
    """A group of two, whose looks may fail."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.looks = 0
        self.fails = False

    def watched_works(self) -> list[Completion]:
        self.looks += 1
        if self.fails:
            raise KeyError(f"a mistake about {self.name}")
        return []

    def describe(self) -> str:
        return f"group {self.name} (rank 0 of 2)"

    def key(self) -> tuple[tuple[int, ...], int]:
        return (0, 1), 0

    def running(self) -> None:
        return None

    failed = running


class Rounds:
    """Lets the loop go round some times, in the calling thread."""

    def __init__(self, rounds: int) -> None:
        self.left = rounds

    def wait(self, _seconds: float) -> bool:
        self.left -= 1
        return self.left < 0


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Group]]:
    monkeypatch.setattr(watchdog, "_rank", lambda: 0)
    monkeypatch.setattr(group_set, "_watchers", [])
    made = [Group("bad"), Group("good")]
    tickets = [group_set.add(group) for group in made]  # type: ignore[arg-type]  # as far as it is used
    yield made
    for ticket in tickets:
        group_set.discard(ticket)


def looked(rounds: int) -> watchdog.Watchdog:
    dog = watchdog.Watchdog()
    loop: Any = dog
    loop._reports.serve = lambda: None
    loop._stop = Rounds(rounds)
    loop._loop()
    return dog


def test_a_mistake_at_one_group_ends_its_watching_alone_and_is_said_once(
    groups: list[Group], capsys: pytest.CaptureFixture[str]
) -> None:
    bad, good = groups
    bad.fails = True
    looked(5)
    assert (bad.looks, good.looks) == (1, 5)
    said = capsys.readouterr().err
    assert said.startswith(
        "hpc_inflight: rank 0: the watchdog has failed at group bad (rank 0 of 2) and does not watch it any more; "
    )
    assert said.count("KeyError: 'a mistake about bad'") == 1


def test_a_mistake_while_hearing_other_ranks_is_said_once_and_all_groups_are_watched_on(
    groups: list[Group], capsys: pytest.CaptureFixture[str]
) -> None:
    dog: Any = watchdog.Watchdog()

    def serve() -> None:
        raise EOFError("half a message")

    dog._reports.serve = serve
    dog._stop = Rounds(3)
    dog._loop()
    assert [group.looks for group in groups] == [3, 3]
    said = capsys.readouterr().err
    assert said.startswith("hpc_inflight: rank 0: the watchdog failed to hear other ranks, and goes on:\n")
    assert said.count("EOFError: half a message") == 1


def test_an_id_that_is_used_again_is_watched(groups: list[Group]) -> None:
    gone = Group("gone")
    gone.fails = True
    ticket = group_set.add(gone)  # type: ignore[arg-type]
    dog: Any = looked(1)
    assert dog._done_with == {id(gone)}
    group_set.discard(ticket)
    del gone
    assert not dog._done_with


def test_it_does_not_look_at_works_during_a_capture(groups: list[Group]) -> None:
    class Graph:
        """A graph, as far as captures are noted."""

    graph = Graph()
    _gate.capture_began(graph)
    looked(3)
    assert [group.looks for group in groups] == [0, 0]
    _gate.capture_ended(graph)
    looked(3)
    assert [group.looks for group in groups] == [3, 3]


def test_a_deadline_behind_an_older_work_is_seen(groups: list[Group], monkeypatch: pytest.MonkeyPatch) -> None:
    works = [Completion("recv", "good", 1, 600.0), Completion("all_reduce", "good", 1, 0.1)]
    for work in works:
        work.issued_at -= 10
    monkeypatch.setattr(groups[1], "watched_works", lambda: works)
    monkeypatch.setattr(groups[1], "check", lambda: None, raising=False)
    late = watchdog.Watchdog()._late(groups[1])  # type: ignore[arg-type]  # as above
    assert late is not None
    assert (late.op, late.timeout_s) == ("all_reduce", 0.1)


def test_a_rank_that_has_ended_is_waited_for_if_it_had_not_issued_it(groups: list[Group]) -> None:
    dog, now = watchdog.Watchdog(), time.monotonic()
    dog._reports.left[1] = now - 10
    dog._reports.last[1] = {watchdog._place(groups[0], "cpu"): 4}  # type: ignore[arg-type]
    missing = [dog._left(groups[0], seq, kind, now, now - 20) for seq, kind in ((4, "cpu"), (5, "cpu"), (1, "cuda"))]  # type: ignore[arg-type]
    assert missing == [(), (1,), (1,)]


def test_what_is_remembered_of_destroyed_groups_is_bounded(
    groups: list[Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    dog, group = watchdog.Watchdog(), groups[0]
    numbers = itertools.count()
    monkeypatch.setattr(group, "key", lambda: ((0, 1), next(numbers)))
    monkeypatch.setattr(group, "issued", lambda kind: 3 if kind == "cpu" else 0, raising=False)
    for _ in range(1500):
        dog.remember(group)  # type: ignore[arg-type]
    assert len(dog._last) == 200
    monkeypatch.setattr(group, "key", lambda: ((0, 1), 1400))
    assert watchdog._place(group, "cpu") in dog._last  # type: ignore[arg-type]
    assert watchdog._place(group, "cuda") not in dog._last  # type: ignore[arg-type]


def test_the_end_of_the_last_group_waits_for_no_thread_under_a_lock_that_this_one_takes(
    groups: list[Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    dog: Any = watchdog.Watchdog()
    serving = threading.Event()

    def serve() -> None:
        serving.set()
        time.sleep(0.3)  # the group goes meanwhile

    dog._reports.serve = serve
    monkeypatch.setattr(group_set, "_groups", weakref.WeakValueDictionary())
    monkeypatch.setattr(group_set, "_watchers", [(lambda: None, dog.stop)])
    ticket = group_set.add(groups[1])  # type: ignore[arg-type]
    dog._thread = threading.Thread(target=dog._loop, daemon=True)
    dog._thread.start()
    assert serving.wait(30)
    began = time.monotonic()
    group_set.discard(ticket)
    assert time.monotonic() - began < 2  # of the 3 that it waits for the thread


def test_a_job_ends_although_an_abort_does_not_return(
    groups: list[Group], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It runs callbacks of the program."""
    ended, seen = threading.Event(), []
    monkeypatch.setattr(watchdog, "_BACKSTOP_S", 0.1)
    monkeypatch.setattr("hpc_inflight._mpi.abort", lambda code: ended.set() if code == 1 else None)
    # what comes after it ends the job, too
    monkeypatch.setattr(groups[0], "abort", lambda _error: seen.append(ended.wait(30)), raising=False)
    dog: Any = watchdog.Watchdog()
    dog._stop.set()
    dog._end(groups[0], CollectiveTimeout("late"))
    assert seen == [True]
    assert "rank 0: late" in capsys.readouterr().err


def test_a_rank_that_ends_has_not_come_to_what_is_not_complete(
    groups: list[Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    group, dog = groups[0], watchdog.Watchdog()
    monkeypatch.setattr(group, "issued", lambda kind: 7 if kind == "cpu" else 0, raising=False)
    works = [Completion("recv", "bad", 1, 9.0), Completion("all_reduce", "bad", 6, 9.0)]
    monkeypatch.setattr(group, "watched_works", lambda: works)
    dog.remember(group, ends=True)  # type: ignore[arg-type]
    assert list(dog._last.values()) == [5]
    dog.remember(group)  # type: ignore[arg-type]  # a group that is destroyed waits for them
    assert list(dog._last.values()) == [7]
