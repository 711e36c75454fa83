"""The ring of the last operations, and the dump that is made of it."""

from __future__ import annotations

import gc
import os
import pickle
import threading
import time
import weakref
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

import hpc_inflight as hi
from hpc_inflight import _flight_dump, _flight_format, _flight_records, _on_failure, flight_recorder
from hpc_inflight.cli._trace_load import TraceError, unpickle
from hpc_inflight.communicators._nccl_completion import StreamCompletion
from hpc_inflight.config import Config, config
from hpc_inflight.flight_recorder import FATE, Group, Lane, Progress
from hpc_inflight.work import Completion, Work

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def ring(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Give the test a recorder of its own, which reads the environment anew."""
    config.cache_clear()
    monkeypatch.setattr(flight_recorder, "_ring", None)
    monkeypatch.setattr(flight_recorder, "_lives", {})
    monkeypatch.setattr(flight_recorder, "_groups", weakref.WeakValueDictionary())
    yield monkeypatch
    monkeypatch.undo()
    config.cache_clear()


def made(name: str = "g", rank: int = 0, ranks: tuple[int, ...] = (0, 1), transport: str = "mpi") -> Lane:
    group = Group(rank, len(ranks), 600.0)
    group.rename(name)
    group.ranks = ranks
    return Lane(group, transport)


def entries() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = _flight_format.snapshot()["entries"]
    return found


def test_the_ring_keeps_the_last_ones_and_their_numbers(ring: pytest.MonkeyPatch) -> None:
    ring.setenv("HPC_INFLIGHT_FLIGHT_RECORDER", "3")
    lane = made()
    for _ in range(5):
        lane.begin("all_reduce", (torch.ones(2),))[FATE] = 0.0
    assert [record.number for record in _flight_records.records()] == [3, 4, 5]
    first, *_, last = [entry["record_id"] for entry in entries()]
    assert last - first == 2


def test_off_keeps_nothing(ring: pytest.MonkeyPatch) -> None:
    ring.setenv("HPC_INFLIGHT_FLIGHT_RECORDER", "0")
    lane = made()
    row = lane.begin("all_reduce", (torch.ones(2),))
    row[FATE] = 0.0
    lane.begin_message("send", torch.ones(2), 1, 0)
    assert not lane.enabled
    assert _flight_records.records() == []


@pytest.mark.parametrize("text", ["-1", "many", "1.5"])
def test_a_length_that_is_none(ring: pytest.MonkeyPatch, text: str) -> None:
    ring.setenv("HPC_INFLIGHT_FLIGHT_RECORDER", text)
    with pytest.raises(hi.InvalidArgumentError, match="HPC_INFLIGHT_FLIGHT_RECORDER: expected a number"):
        config()


def test_no_tensor_is_kept(ring: pytest.MonkeyPatch) -> None:
    lane = made()
    tensors = [torch.ones(2) for _ in range(4)]
    lane.begin("all_reduce", tensors[:1])
    row = lane.begin("all_gather", tensors[:2], tensors[2:3])
    completion = Completion("all_gather", "g", 1, 5.0)
    work = Work(completion, tensors[:2])
    row[FATE] = flight_recorder.follow(completion)
    message = lane.begin_message("send", tensors[3], 1, 0)
    message.issued(Work(Completion("send", "g", 1, 5.0), []))
    alive = [weakref.ref(tensor) for tensor in tensors]
    del tensors, work
    gc.collect()
    assert [reference() for reference in alive] == [None] * 4
    assert len(_flight_records.records()) == 3


def test_states_of_a_synchronous_operation(ring: pytest.MonkeyPatch) -> None:
    lane = made()
    row = lane.begin("all_reduce", (torch.ones(2),))
    (inside,) = entries()
    assert inside["state"] == "started"
    assert inside["time_discovered_completed_ns"] is None
    row[FATE] = time.monotonic()
    (after,) = entries()
    assert after["state"] == "completed"
    assert after["time_created_ns"] <= after["time_discovered_started_ns"] <= after["time_discovered_completed_ns"]
    assert after["retired"]


def test_states_of_an_asynchronous_operation(ring: pytest.MonkeyPatch) -> None:
    lane, completion = made(), Completion("all_reduce", "g", 1, 5.0)
    lane.begin("all_reduce", (torch.ones(2),))[FATE] = flight_recorder.follow(completion)
    seen = [entries()[0]]
    completion.start()
    seen.append(entries()[0])
    completion.finish()
    seen.append(entries()[0])
    assert [entry["state"] for entry in seen] == ["scheduled", "started", "completed"]
    assert [entry["retired"] for entry in seen] == [False, False, True]
    assert seen[0]["timeout_ms"] == 5000


def test_what_happened_before_it_was_followed_is_there(ring: pytest.MonkeyPatch) -> None:
    lane, completion = made(), Completion("all_reduce", "g", 1, 5.0)
    row = lane.begin("all_reduce", (torch.ones(2),))
    completion.start()
    completion.finish(hi.CollectiveTimeout("nobody came"))
    row[FATE] = flight_recorder.follow(completion)
    (entry,) = entries()
    assert entry["state"] == "started"
    assert entry["hpc_inflight"]["error"] == "CollectiveTimeout: nobody came"


def test_operations_that_share_a_completion_end_together(ring: pytest.MonkeyPatch) -> None:
    lane, completion = made(), Completion("coalesced", "g", 1, 5.0)
    for _ in range(3000):  # more than Python's stack has room for
        lane.begin("all_reduce", (torch.ones(2),))[FATE] = flight_recorder.follow(completion)
    completion.finish()
    assert {record.ended is not None for record in _flight_records.records()} == {True}


def test_on_a_gpu_a_synchronous_operation_is_only_launched(ring: pytest.MonkeyPatch) -> None:
    lane = made(transport="nccl")
    lane.begin("all_reduce", (torch.ones(2),))[FATE] = time.monotonic()
    (entry,) = entries()
    assert (entry["state"], entry["retired"]) == ("scheduled", True)
    assert entry["process_group"][0] == "g:nccl"


def test_what_was_captured_is_no_work_in_flight(ring: pytest.MonkeyPatch) -> None:
    class Captured(Completion):
        captured = True

    made().begin("all_reduce", (torch.ones(2),))[FATE] = flight_recorder.follow(Captured("all_reduce", "g", 1, 5.0))
    (entry,) = entries()
    assert entry["hpc_inflight"]["captured"]
    assert entry["state"] == "scheduled"


def test_messages_are_numbered_per_channel(ring: pytest.MonkeyPatch) -> None:
    lane = made(rank=1, ranks=(4, 7, 9))
    for op, peer, tag in [("send", 0, 0), ("recv", 0, 0), ("send", 0, 0), ("send", 0, 3), ("send", 2, 0)]:
        lane.begin_message(op, torch.ones(2), peer, tag).issued(Work(Completion(op, "g", 1, 5.0), []))
    found = [(e["process_group"][0], e["collective_seq_id"], e["profiling_name"]) for e in entries()]
    assert found == [
        ("g:7->4", 1, "nccl:send 1->0"),
        ("g:4->7", 1, "nccl:recv 1<-0"),
        ("g:7->4", 2, "nccl:send 1->0"),
        ("g:7->4 tag 3", 1, "nccl:send 1->0"),
        ("g:7->9", 1, "nccl:send 0->1"),
    ]
    assert len({entry["p2p_seq_id"] for entry in entries()}) == 5


def test_a_receive_from_any_rank_joins_its_channel_when_the_source_is_known(ring: pytest.MonkeyPatch) -> None:
    lane = made()
    message = lane.begin_message("recv", torch.ones(2), None, 0)
    message.issued(Work(Completion("recv", "g", 1, 5.0), []))
    assert entries()[0]["process_group"][0] == "g:any->0"
    message.received_from(1)
    assert entries()[0]["process_group"][0] == "g:1->0"
    assert entries()[0]["collective_seq_id"] == 1


def test_a_message_that_was_refused_takes_no_number(ring: pytest.MonkeyPatch) -> None:
    lane = made()
    with pytest.raises(ValueError, match="no such rank"), lane.begin_message("send", torch.ones(2), 99, 0):
        raise ValueError("no such rank")
    lane.begin_message("send", torch.ones(2), 1, 0).issued(Work(Completion("send", "g", 1, 5.0), []))
    refused, sent = entries()
    assert refused["hpc_inflight"]["error"] == "ValueError: no such rank"
    assert (refused["collective_seq_id"], sent["collective_seq_id"]) == (0, 1)


def test_channels_are_bounded(ring: pytest.MonkeyPatch) -> None:
    lane = made()
    for tag in range(5000):
        lane.begin_message("send", torch.ones(1), 1, tag).issued(Work(Completion("send", "g", 1, 5.0), []))
    assert len(lane.channels) <= 4096


def test_a_second_group_of_a_name_has_a_name_of_its_own(ring: pytest.MonkeyPatch) -> None:
    first, second = made("0"), made("0")
    for lane in (first, second):
        lane.begin("all_reduce", (torch.ones(2),))[FATE] = 0.0
    assert [entry["process_group"][0] for entry in entries()] == ["0", "0#2"]
    assert set(_flight_format.snapshot()["pg_config"]) >= {"0", "0#2"}


def test_call_sites(ring: pytest.MonkeyPatch) -> None:
    ring.setenv("HPC_INFLIGHT_CALL_SITES", "1")
    made().begin("all_reduce", (torch.ones(2),))[FATE] = 0.0
    (frame,) = entries()[0]["frames"]
    assert frame["name"] == "test_call_sites"
    assert frame["filename"] == __file__


def test_entries_while_others_issue(ring: pytest.MonkeyPatch) -> None:
    ring.setenv("HPC_INFLIGHT_FLIGHT_RECORDER", "50")
    lane, stop = made(), threading.Event()

    def issue() -> None:
        issued = 0
        while not stop.is_set() or issued < 100:
            issued += 1
            lane.begin("all_reduce", (torch.ones(2),))[FATE] = 0.0

    threads = [threading.Thread(target=issue) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(100):
            ids = [entry["record_id"] for entry in entries()]
            assert ids == sorted(ids)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    numbers = [record.number for record in _flight_records.records()]
    assert len(set(numbers)) == len(numbers) == 50


def test_the_file(ring: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ring.setattr(flight_recorder.Process, "rank", 3)
    ring.setenv("HPC_INFLIGHT_DUMP_DIR", str(tmp_path / "asked" / "for"))
    made().begin("all_reduce", (torch.ones(2, dtype=torch.bfloat16),))[FATE] = 0.0
    assert hi.dump_flight_recorder() == str(tmp_path / "asked" / "for" / "flight_recorder_rank_3")
    assert hi.dump_flight_recorder(tmp_path) == str(tmp_path / "flight_recorder_rank_3")
    assert hi.dump_flight_recorder(f"{tmp_path}/made/") == str(tmp_path / "made" / "flight_recorder_rank_3")
    named = hi.dump_flight_recorder(tmp_path / "mine_")
    assert named == str(tmp_path / "mine_3")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["asked", "flight_recorder_rank_3", "made", "mine_3"]
    read = unpickle(Path(named).read_bytes())  # with the unpickler that takes plain data only
    assert read == pickle.loads(Path(named).read_bytes())  # noqa: S301  # our own
    assert read["version"] == "2.10"
    assert read["entries"][0]["input_dtypes"] == ["BFloat16"]


def test_a_file_that_cannot_be_written_leaves_nothing(ring: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made()
    with pytest.raises(OSError, match="nowhere"):
        hi.dump_flight_recorder(tmp_path / "nowhere" / "dump_")
    (tmp_path / "dump_0").mkdir()  # where the file would go
    with pytest.raises(OSError, match="dump_0"):
        hi.dump_flight_recorder(tmp_path / "dump_")
    assert [file.name for file in tmp_path.iterdir()] == ["dump_0"]
    with pytest.raises(hi.InvalidArgumentError, match="the path is empty"):
        hi.dump_flight_recorder("")


def test_a_forked_child_is_no_rank(ring: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ring.setattr(flight_recorder.Process, "pid", os.getpid() + 1)
    with pytest.raises(hi.InflightError, match="is a forked child of rank"):
        hi.dump_flight_recorder(tmp_path)
    assert list(tmp_path.iterdir()) == []


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch hacked",)


@pytest.mark.parametrize("value", [Evil(), [Path], {"entries": torch.float32}], ids=["call", "class", "dtype"])
def test_what_would_run_is_refused(value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(TraceError, match="where a dump has plain data only"):
            unpickle(pickle.dumps(value, protocol))
    assert list(tmp_path.iterdir()) == []


def test_what_is_damaged_is_refused() -> None:
    whole = pickle.dumps({"entries": [1, 2.5, "a", None, True, (1, 2)]}, 2)
    assert unpickle(whole) == {"entries": [1, 2.5, "a", None, True, (1, 2)]}
    for length in range(len(whole)):
        with pytest.raises(TraceError, match="damaged, cut short or no pickle"):
            unpickle(whole[:length])


def test_a_dump_that_fails_says_so_once_and_raises_nothing(
    ring: pytest.MonkeyPatch, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    Lane(Group(0, 1, 30.0), "mpi").begin("barrier", ())
    monkeypatch.setattr(_flight_dump, "_said", threading.Event())
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr(_flight_dump, "config", lambda: Config(dump_dir=str(tmp_path / "file" / "dumps")))
    _flight_dump.dump_on_failure()
    _flight_dump.dump_on_failure()
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "the flight recorder cannot be written" in said


@pytest.fixture
def written(ring: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return the directory of the dumps of a process that has issued one operation."""
    ring.setenv("HPC_INFLIGHT_DUMP_DIR", str(tmp_path / "dumps"))
    ring.setattr(_flight_dump, "_said", threading.Event())
    Lane(Group(0, 1, 30.0), "mpi").begin("barrier", ())
    return tmp_path / "dumps"


def test_a_failure_writes_the_recorder_and_says_where(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _on_failure.tell()
    (file,) = written.iterdir()
    assert str(file) in capsys.readouterr().err


def test_nothing_is_written_of_a_process_that_has_done_nothing(
    ring: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ring.setenv("HPC_INFLIGHT_DUMP_DIR", str(tmp_path / "dumps"))
    _on_failure.tell()
    assert not (tmp_path / "dumps").exists()
    assert capsys.readouterr().err == ""


def test_a_wait_that_only_looks_writes_nothing_and_one_past_the_operation_s_deadline_does(written: Path) -> None:
    look = timedelta(milliseconds=1)
    with pytest.raises(hi.CollectiveTimeout):
        Work(Completion("all_reduce", "g", 1, 1000.0), ()).wait(look)
    assert not written.exists()
    for timeout in (timedelta(), look):  # a deadline of its own or the operation's, which has passed either way
        completion = Completion("all_reduce", "g", 2 + timeout.microseconds, 0.01)
        time.sleep(0.02)
        with pytest.raises(hi.CollectiveTimeout, match="all_reduce"):
            Work(completion, ()).wait(timeout)
        (file,) = written.iterdir()
        file.unlink()
    with pytest.raises(hi.CollectiveTimeout):  # polled on, it has been written of already
        Work(completion, ()).wait(look)
    assert not list(written.iterdir())


def test_a_graph_that_takes_an_operation_late_marks_all_that_follow_it() -> None:
    completion = StreamCompletion.__new__(StreamCompletion)
    completion._stream, completion.event, completion.timeout_s = SimpleNamespace(events=[]), 0, 1.0
    first, second = Progress(), Progress()
    second.also = first
    completion.track(second)
    completion.capture()
    assert first.captured
    assert second.captured
    assert completion.captured
