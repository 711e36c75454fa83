"""The table behind the store, as rank 0 uses it: by itself and for parked requests."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from hpc_inflight import _store_table
from hpc_inflight._store_table import Table

if TYPE_CHECKING:
    import pytest


def test_parked_requests_are_answered_by_whoever_sets_the_last_key() -> None:
    table = Table()
    replies: list[tuple[str, Any]] = []
    table.park(["a", "b"], "values", 10.0, lambda *reply: replies.append(reply))
    table.park(["a"], "nothing", 10.0, lambda *reply: replies.append(reply))
    assert replies == []
    table.set("a", b"1")
    assert replies == [("ok", None)]
    table.add("b", 5)
    assert replies == [("ok", None), ("ok", [b"1", b"5"])]
    table.set("a", b"2")
    assert len(replies) == 2


def test_parked_requests_expire_with_the_missing_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(_store_table, "time", SimpleNamespace(monotonic=lambda: now))
    table = Table()
    replies: list[tuple[str, Any]] = []
    table.set("a", b"1")
    table.park(["a", "b", "c"], "values", 10.0, lambda *reply: replies.append(reply))
    now += 9.9
    table.expire()
    assert replies == []
    now += 0.2
    table.expire()
    assert replies == [("timeout", ["b", "c"])]
    table.multi_set(["b", "c"], [b"", b""])
    assert len(replies) == 1


def test_wait_returns_what_is_missing() -> None:
    table = Table()
    threading.Timer(0.05, table.set, ("a", b"1")).start()
    assert table.wait(["a"], 60.0) == []
    assert table.wait(["a", "b"], 0.01) == ["b"]


def test_compare_set_as_torchs_hash_store_answers() -> None:
    # the reference is torch's own in-process store
    from torch.distributed import HashStore  # type: ignore[attr-defined]  # not in torch's stubs

    table, reference = Table(), HashStore()
    for key, expected, desired in [
        ("k", "x", "y"),
        ("k", "", "first"),
        ("k", "", "second"),
        ("k", "wrong", "third"),
        ("k", "first", "fourth"),
        ("k", "fourth", ""),
    ]:
        answer = table.compare_set(key, expected.encode(), desired.encode())
        assert answer == reference.compare_set(key, expected, desired), (key, expected, desired)
