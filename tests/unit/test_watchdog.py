"""What the watchdog does about its own mistakes: nothing of a program may end by them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from hpc_inflight import group_set, watchdog

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpc_inflight.work import Completion


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
    group_set.capture_began(graph)
    looked(3)
    assert [group.looks for group in groups] == [0, 0]
    group_set.capture_ended(graph)
    looked(3)
    assert [group.looks for group in groups] == [3, 3]
