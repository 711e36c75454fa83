"""What ``hpc-inflight trace`` and PyTorch's analyser say about dumps that were made up."""

from __future__ import annotations

import json
import logging
import pickle
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from hpc_inflight import _flight_dump, flight_recorder
from hpc_inflight import _torch_compat as compat
from hpc_inflight.cli import app
from hpc_inflight.config import config
from hpc_inflight.flight_recorder import FATE, Group, Lane
from hpc_inflight.testing import wait_until
from hpc_inflight.work import Completion, Work

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from typer.testing import Result

Program = "Callable[[Rank], None]"


class Rank:
    """One made-up rank: it records, and issues nothing."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._lanes: dict[str, Lane] = {}

    def lane(self, name: str, ranks: tuple[int, ...]) -> Lane:
        if name not in self._lanes:
            group = Group(ranks.index(self.rank), len(ranks), 600.0)
            group.rename(name)
            group.desc = "default_pg" if name == "0" else f"group {name}"
            group.ranks = ranks
            self._lanes[name] = Lane(group, "mpi")
        return self._lanes[name]

    def did(
        self,
        op: str,
        *outputs: torch.Tensor,
        inputs: list[torch.Tensor] | None = None,
        done: bool = True,
        group: str = "0",
        ranks: tuple[int, ...] | None = None,
    ) -> None:
        row = self.lane(group, ranks or tuple(range(self.size))).begin(op, outputs, inputs)
        if done:
            row[FATE] = row[FATE - 1] + 0.001

    def message(self, op: str, numel: int, peer: int, *, tag: int = 0, done: bool = True) -> None:
        completion = Completion(op, "0", 1, 600.0)
        lane = self.lane("0", tuple(range(self.size)))
        lane.begin_message(op, torch.ones(numel), peer, tag).issued(Work(completion, []))
        if done:
            completion.finish()


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """Return what writes the dumps of made-up ranks and returns their directory."""

    def write(size: int, *programs: Callable[[Rank], None], without: tuple[int, ...] = ()) -> Path:
        directory = tmp_path / "dumps"
        directory.mkdir(exist_ok=True)
        for rank in range(size):
            monkeypatch.setattr(flight_recorder, "_ring", None)
            monkeypatch.setattr(flight_recorder, "_lives", {})
            monkeypatch.setattr(flight_recorder, "_groups", weakref.WeakValueDictionary())
            monkeypatch.setattr(flight_recorder, "_next_id", iter(range(10**6)).__next__)
            monkeypatch.setattr(flight_recorder.Process, "rank", rank)
            monkeypatch.setattr(flight_recorder.Process, "world_size", size)
            made = Rank(rank, size)
            for program in programs:
                program(made)
            if rank not in without:
                _flight_dump.dump_flight_recorder(directory)
        return directory

    config.cache_clear()
    yield write
    monkeypatch.undo()
    config.cache_clear()


def trace(directory: Path, *options: str) -> Result:
    return CliRunner().invoke(app, ["trace", str(directory), *options])


def said(directory: Path) -> str:
    result = trace(directory)
    assert result.exit_code == 0, result.output
    return result.output.splitlines()[0]


def torch_says(directory: Path, caplog: pytest.LogCaptureFixture) -> str:
    """Return what PyTorch's analyser logs, less that it found a package missing."""
    fr_trace = pytest.importorskip("torch.distributed.flight_recorder.fr_trace", reason="this torch has no analyser")
    logging.getLogger("Flight Recorder").propagate = True
    caplog.set_level(logging.INFO, "Flight Recorder")
    caplog.clear()
    fr_trace.main([str(directory)])
    return "\n".join(r.getMessage() for r in caplog.records if "tabulate" not in r.getMessage())


def common(rank: Rank) -> None:
    rank.did("broadcast", torch.ones(3))
    rank.did("all_reduce", torch.ones(4, 2))


def test_a_job_that_is_right(job: Callable[..., Path], caplog: pytest.LogCaptureFixture) -> None:
    def program(rank: Rank) -> None:
        own = rank.rank + 1
        rank.did("barrier")
        rank.did("all_gather", *[torch.ones(r + 1) for r in range(3)], inputs=[torch.ones(own)])
        rank.did("all_to_all", *[torch.ones(own) for _ in range(3)], inputs=[torch.ones(r + 1) for r in range(3)])
        outputs = [torch.ones(2) for _ in range(3)] if rank.rank == 1 else []
        rank.did("gather", *outputs, inputs=[torch.ones(2)])
        rank.did("scatter", torch.ones(2), inputs=outputs)
        if rank.rank != 1:
            rank.did("all_reduce", torch.ones(5), group="1", ranks=(0, 2))
        rank.message("send", 4, (rank.rank + 1) % 3)
        rank.message("recv", 4, (rank.rank - 1) % 3)

    directory = job(3, common, program)
    assert said(directory) == "3 dumps of 3 ranks. The ranks agree on 8 collectives, and nothing is pending."
    if compat.TORCH < (2, 13):
        pytest.skip("this torch's analyser does not know collectives of uneven sizes")
    assert torch_says(directory, caplog) == ""


def test_one_rank_stopped(job: Callable[..., Path], caplog: pytest.LogCaptureFixture) -> None:
    def program(rank: Rank) -> None:
        if rank.rank != 1:
            rank.did("all_reduce", torch.ones(7), done=False)

    directory = job(4, common, program)
    text = said(directory)
    assert (
        "The ranks part at collective 3 of group 0 (default_pg): ranks 0, 2 and 3 issued all_reduce ([7] Float); "
        "rank 1 did not come to it. The last that rank 1 did was all_reduce ([4, 2] Float), collective 2 of group 0: "
        "completed, " in text
    )
    other = torch_says(directory, caplog)
    assert "Not all ranks joining collective, sequence number: 3" in other
    assert "missing ranks: {1}" in other


def test_a_rank_that_did_nothing(job: Callable[..., Path]) -> None:
    directory = job(2, lambda rank: common(rank) if rank.rank == 0 else rank.lane("0", (0, 1)) and None)
    assert "rank 1 did not come to it. Rank 1 has issued nothing." in said(directory)


def test_a_rank_without_a_dump(job: Callable[..., Path]) -> None:
    directory = job(4, common, lambda rank: rank.did("barrier", done=False), without=(1, 2))
    text = said(directory)
    assert text.startswith("2 dumps of 4 ranks. All have issued barrier at collective 3 of group 0 (default_pg), and ")
    assert "ranks 0 and 3 have not completed it. There is no dump of ranks 1 and 2: killed, " in text


def test_operations_differ(job: Callable[..., Path], caplog: pytest.LogCaptureFixture) -> None:
    def program(rank: Rank) -> None:
        rank.did("broadcast" if rank.rank == 2 else "all_reduce", torch.ones(4), done=False)

    directory = job(3, common, program)
    assert (
        "The ranks part at collective 3 of group 0 (default_pg): ranks 0 and 1 issued all_reduce ([4] Float); "
        "rank 2 issued broadcast ([4] Float)." in said(directory)
    )
    other = torch_says(directory, caplog)
    assert "Collective sequence number: 3 has errors" in other
    assert "Culprit rank 2; Error type: COLLECTIVE_TYPE_MISMATCH" in other


def test_sizes_differ(job: Callable[..., Path], caplog: pytest.LogCaptureFixture) -> None:
    directory = job(3, common, lambda rank: rank.did("all_reduce", torch.ones(4 + (rank.rank == 1)), done=False))
    assert "ranks 0 and 2 issued all_reduce ([4] Float); rank 1 issued all_reduce ([5] Float)." in said(directory)
    other = torch_says(directory, caplog)
    assert "Culprit rank 1; Error type: SIZE_OR_SYNTAX_MISMATCH" in other


def test_dtypes_differ(job: Callable[..., Path], caplog: pytest.LogCaptureFixture) -> None:
    def program(rank: Rank) -> None:
        rank.did("all_reduce", torch.ones(4, dtype=torch.int64 if rank.rank else torch.float32), done=False)

    directory = job(2, common, program)
    assert "rank 0 issued all_reduce ([4] Float); rank 1 issued all_reduce ([4] Long)." in said(directory)
    assert "COLLECTIVE_DTYPE_MISMATCH" in torch_says(directory, caplog)


def parts(rank: Rank, op: str, numels: list[int], own: int) -> None:
    single, several = torch.ones(own), [torch.ones(n) for n in numels]
    if op in {"all_gather", "gather"}:
        rank.did(op, *several, inputs=[single])
    else:
        rank.did(op, single, inputs=several)


@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter", "gather", "scatter"])
def test_lists_that_do_not_fit(job: Callable[..., Path], op: str) -> None:
    def program(rank: Rank) -> None:
        parts(rank, op, [2, 3] if rank.rank == 0 or "_" in op else [], [2, 4][rank.rank])

    text = said(job(2, common, program))
    assert "has 3 elements in its list for rank 1, which has 4" in text


@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter", "gather", "scatter"])
def test_lists_that_fit(job: Callable[..., Path], op: str) -> None:
    def program(rank: Rank) -> None:
        parts(rank, op, [2, 3] if rank.rank == 0 or "_" in op else [], [2, 3][rank.rank])

    assert "The ranks agree on 3 collectives" in said(job(2, common, program))


def test_an_exchange_that_does_not_fit(job: Callable[..., Path], caplog: pytest.LogCaptureFixture) -> None:
    def lists(rank: Rank) -> None:
        sent = [torch.ones(2), torch.ones(3)]
        rank.did("all_to_all", torch.ones(2), torch.ones(2 if rank.rank == 0 else 3), inputs=sent)

    def single(rank: Rank) -> None:
        rank.did("all_to_all_single", torch.ones(4 + rank.rank), inputs=[torch.ones(4)])

    text = said(job(2, common, lists))
    assert "rank 1 has 2 elements in its list for rank 0, which has 3" in text
    directory = job(2, common, single)
    assert "8 elements are sent and 9 received" in said(directory)
    assert "Input/output mismatch in the collective sequence number: 3" in torch_says(directory, caplog)


def test_rings_of_different_length(job: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def program(rank: Rank) -> None:
        for _ in range(20 + rank.rank):
            rank.did("all_reduce", torch.ones(2))
            if rank.rank == 0:  # takes room in its ring
                rank.did("barrier", group="1", ranks=(0,))

    monkeypatch.setenv("HPC_INFLIGHT_FLIGHT_RECORDER", "10")
    directory = job(2, program)
    text = said(directory)
    assert "The ranks part at collective 21 of group 0 (default_pg): rank 1 issued all_reduce" in text
    assert "rank 0 did not come to it. The last that rank 0 did was barrier, collective 20 of group 1" in text


def test_rings_that_agree_where_they_overlap(job: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPC_INFLIGHT_FLIGHT_RECORDER", "10")

    def program(rank: Rank) -> None:
        for i in range(25):
            rank.did("all_reduce", torch.ones(2 + (i == 3 and rank.rank)))  # long gone

    assert "The ranks agree on 10 collectives, and nothing is pending." in said(job(2, program))


def test_all_wait(job: Callable[..., Path]) -> None:
    directory = job(2, common, lambda rank: rank.did("all_reduce", torch.ones(9), done=rank.rank == 0))
    assert "All have issued all_reduce at collective 3 of group 0 (default_pg), and rank 1 has not completed it." in (
        said(directory)
    )


def test_a_message_without_its_other_end(job: Callable[..., Path], caplog: pytest.LogCaptureFixture) -> None:
    def program(rank: Rank) -> None:
        if rank.rank == 0:
            rank.message("send", 4, 2)
            rank.message("send", 4, 2, tag=5, done=False)
        if rank.rank == 2:
            rank.message("recv", 4, 0)

    directory = job(3, common, program)
    assert (
        "A send from rank 0 to rank 2 with tag 5 ([4] Float) in group 0 does not fit: rank 2 has not issued the "
        "receive." in said(directory)
    )
    assert "missing ranks: {2}" in torch_says(directory, caplog)


def test_a_message_too_long(job: Callable[..., Path], caplog: pytest.LogCaptureFixture) -> None:
    def program(rank: Rank) -> None:
        rank.message("recv" if rank.rank else "send", 4 - rank.rank, 1 - rank.rank)

    directory = job(2, common, program)
    assert "4 elements are sent, and 3 expected" in said(directory)
    assert "SIZE_OR_SYNTAX_MISMATCH" in torch_says(directory, caplog)


def test_a_failure(job: Callable[..., Path]) -> None:
    def program(rank: Rank) -> None:
        row = rank.lane("0", (0, 1)).begin("all_reduce", (torch.ones(2),))
        row[FATE] = flight_recorder.failed(RuntimeError("no route")) if rank.rank else row[FATE - 1]

    text = said(job(2, common, program))
    assert "On rank 1, all_reduce ([2] Float), collective 3 of group 0 failed: RuntimeError: no route." in text


def test_json(job: Callable[..., Path]) -> None:
    directory = job(3, common, lambda rank: rank.rank == 1 or rank.did("barrier", done=False), without=(2,))
    found = json.loads(trace(directory, "--json").output)
    assert found["ranks"] == 3
    assert found["missing_dumps"] == [2]
    (finding,) = found["findings"]
    assert (finding["kind"], finding["seq"], finding["absent_ranks"]) == ("missing", 3, [1])
    assert finding["issued"]["0"]["op"] == "barrier"
    assert [(last["ranks"], last["state"]) for last in found["last"]] == [([0], "started"), ([1], "completed")]


def test_chrome(job: Callable[..., Path], tmp_path: Path) -> None:
    def program(rank: Rank) -> None:
        rank.message("recv" if rank.rank else "send", 4, 1 - rank.rank)
        rank.did("barrier", done=False)

    directory, file = job(2, common, program), tmp_path / "out.json"
    assert trace(directory, "--chrome", str(file)).exit_code == 0
    events = json.loads(file.read_text())["traceEvents"]
    bars = [e for e in events if e["ph"] == "X"]
    assert sorted((e["pid"], e["name"]) for e in bars) == [
        (rank, name) for rank in range(2) for name in ("all_reduce", "barrier (not complete)", "broadcast")
    ]
    assert all(e["ts"] >= 0 and e["dur"] >= 0 for e in bars)
    assert [e["dur"] for e in bars if e["name"] == "broadcast"] == [pytest.approx(1000, abs=1)] * 2
    begun, ended = ([(e["pid"], e["id"]) for e in events if e["ph"] == ph] for ph in "be")
    assert sorted(begun) == sorted(ended)
    assert len(begun) == 2
    assert {e["args"]["name"].split()[1] for e in events if e["name"] == "process_name"} == {"0", "1"}
    assert trace(directory, "--chrome", str(tmp_path / "no" / "out.json")).exit_code == 2


def dump_of_torch() -> dict[str, Any]:
    """Return a dump in the form that PyTorch's NCCL backend writes: no groups' names of ours, coalesced entries."""
    base = {"pg_id": 0, "op_id": 1, "timeout_ms": 600000, "frames": [], "retired": False, "p2p_seq_id": 0}
    times = {"time_created_ns": 10**18, "time_discovered_started_ns": None, "time_discovered_completed_ns": None}
    sizes = {"input_sizes": [[4]], "output_sizes": [[4]], "input_dtypes": ["Float"], "output_dtypes": ["Float"]}
    names = ["nccl:all_reduce", "nccl:send 0->1", "nccl:coalesced", "nccl:_all_gather_base"]
    common_ = base | times | sizes | {"process_group": ("0", "default_pg"), "state": "scheduled"}
    entries = [
        common_ | {"record_id": i, "collective_seq_id": 1 + (i == 3), "profiling_name": name, "is_p2p": i in {1, 2}}
        for i, name in enumerate(names)
    ]
    config_ = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}
    return {"version": "2.10", "pg_config": config_, "pg_status": {}, "entries": entries}


def test_dumps_of_pytorch(tmp_path: Path) -> None:
    for rank in range(2):
        dump = dump_of_torch()
        if rank:
            dump["entries"].pop()
            dump["entries"][1]["profiling_name"] = "nccl:recv 1<-0"
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(dump, 2))
    text = said(tmp_path)
    assert "The ranks part at collective 2 of group 0 (default_pg): rank 0 issued _all_gather_base ([4] Float)" in text
    assert "rank 1 did not come to it" in text


def test_a_dump_that_pytorch_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    c10d: Any = torch._C._distributed_c10d
    if not hasattr(c10d, "_dump_fr_trace"):
        pytest.skip("this torch has no flight recorder without NCCL")
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "10")
    dist.init_process_group("gloo", store=c10d.HashStore(), rank=0, world_size=1)
    try:
        dist.all_reduce(torch.ones(3))
        dist.barrier()

        def agree() -> bool:
            (tmp_path / "gloo_0").write_bytes(c10d._dump_fr_trace())
            return said(tmp_path).startswith("1 dump of 1 rank. The ranks agree on 2 collectives")

        # Gloo's own thread notes the end of an operation after it has woken who waits
        wait_until(agree)
    finally:
        dist.destroy_process_group()


def test_bad_input(job: Callable[..., Path], tmp_path: Path) -> None:
    def refused(directory: Path, *options: str) -> str:
        result = trace(directory, *options)
        assert result.exit_code == 2
        assert result.stderr.count("\n") == 1
        return result.stderr

    assert "nowhere is no directory" in refused(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "has no dumps: no file ending in a rank" in refused(tmp_path / "empty")
    directory = job(2, common)
    assert "no file named other<rank>" in refused(directory, "--prefix", "other")
    whole = (directory / "flight_recorder_rank_1").read_bytes()
    (directory / "flight_recorder_rank_1").write_bytes(whole[: len(whole) // 2])
    assert "flight_recorder_rank_1 is no flight recorder dump: it is damaged" in refused(directory)
    values: list[Any] = [
        [],
        {"entries": 3},
        {"entries": [{}], "pg_config": {}},
        {"entries": [], "pg_config": {"0": {}}},
        7,
    ]
    for value in values:
        (directory / "flight_recorder_rank_1").write_bytes(pickle.dumps(value))
        assert "flight_recorder_rank_1 is no flight recorder dump" in refused(directory)
    (directory / "flight_recorder_rank_1").write_bytes(whole)
    (directory / "other_1").write_bytes(whole)
    assert "several names, flight_recorder_rank_, other_; choose with --prefix" in refused(directory)
    assert trace(directory, "--prefix", "flight_recorder_rank_").exit_code == 0
