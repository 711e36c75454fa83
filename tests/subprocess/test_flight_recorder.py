"""A whole job in which one rank stops early, and what its dumps say."""

from __future__ import annotations

import importlib.util
import json
from typing import TYPE_CHECKING

import pytest

from hpc_inflight.testing.launch import run_plain, run_ranks

if TYPE_CHECKING:
    from pathlib import Path

# Every rank asks itself for a dump, with the signal, when it is where the test wants it. Then the rank that stopped goes
# on, so that the job ends by itself.
PROGRAM = """
import os, pathlib, signal, sys, threading, time
import torch, torch.distributed as dist
import hpc_inflight as hi
from hpc_inflight import _flight_records

directory = pathlib.Path(os.environ["HPC_INFLIGHT_DUMP_DIR"])
world = hi.init(device="cpu")

def dumped(ranks):
    return all((directory / f"flight_recorder_rank_{rank}").exists() for rank in ranks)

def ask():
    os.kill(os.getpid(), signal.SIGUSR2)
    while not dumped([world.rank]):
        time.sleep(0.01)

def ask_when_inside():
    while (last := _flight_records.records()[-1]).op != "all_reduce" or last.number != 3:
        time.sleep(0.01)
    assert not last.returned
    ask()

group = dist.new_group([0, 2], group_desc="edges")
tensor = torch.ones(5)
dist.broadcast(tensor, 0)
dist.barrier()
if world.rank == 1:
    ask()  # the main thread itself is not in MPI
    while not dumped(range(3)):
        time.sleep(0.01)
else:
    dist.all_reduce(tensor[:2].clone(), group=group)
    threading.Thread(target=ask_when_inside).start()
dist.all_reduce(tensor)
hi.finalize()
"""

UNWRITABLE = """
import os, signal, sys, time
import hpc_inflight as hi

seen = []
class Seen:
    flush = sys.stderr.flush
    def write(self, text):
        sys.__stderr__.write(text)
        seen.append(text)

hi.init(device="cpu")
sys.stderr = Seen()
os.kill(os.getpid(), signal.SIGUSR2)
while not seen:
    time.sleep(0.01)
hi.finalize()
"""


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("job") / "dumps"
    env = {"HPC_INFLIGHT_DUMP_SIGNAL": "USR2", "HPC_INFLIGHT_DUMP_DIR": str(directory)}
    env["HPC_INFLIGHT_CALL_SITES"] = "1"
    run = run_ranks(3, ["-c", PROGRAM], env=env, check=True)
    for rank in range(3):
        line = f"rank {rank} of 3: flight recorder in {directory}/flight_recorder_rank_{rank}"
        assert run.stderr.count(line) == 1, run.stderr
    assert sorted(file.name for file in directory.iterdir()) == [f"flight_recorder_rank_{rank}" for rank in range(3)]
    return directory


def test_pytorch_finds_who_is_missing(dumps: Path) -> None:
    module = "torch.distributed.flight_recorder.fr_trace"
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        found = None
    if found is None:
        pytest.skip("this torch has no analyser")
    run = run_plain(["-m", module, str(dumps)])
    text = run.stdout + run.stderr
    assert run.returncode == 0, text
    assert "Not all ranks joining collective, sequence number: 3" in text
    assert "missing ranks: {1}" in text
    assert text.count("sequence number") == 1  # and nothing else is wrong


def test_ours_finds_who_is_missing(dumps: Path, tmp_path: Path) -> None:
    run = run_plain(["-m", "hpc_inflight", "trace", str(dumps), "--chrome", str(tmp_path / "chrome.json")])
    assert run.returncode == 0, run.stderr
    assert (
        "The ranks part at collective 3 of group 0 (default_pg): ranks 0 and 2 issued all_reduce ([5] Float); rank 1 "
        "did not come to it; issued at <string>:" in run.stdout
    )
    assert "The last that rank 1 did was barrier, collective 2 of group 0, issued at <string>:" in run.stdout
    events = json.loads((tmp_path / "chrome.json").read_text())["traceEvents"]
    hung = [event["pid"] for event in events if event["name"] == "all_reduce (not complete)"]
    assert sorted(hung) == [0, 2]
    tracks = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert tracks == {"group 0 (default_pg)", "group 1 (edges)"}


def test_one_dump_is_missing(dumps: Path, tmp_path: Path) -> None:
    for rank in (0, 1):
        name = f"flight_recorder_rank_{rank}"
        (tmp_path / name).write_bytes((dumps / name).read_bytes())
    run = run_plain(["-m", "hpc_inflight", "trace", str(tmp_path)])
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("2 dumps of 3 ranks.")
    assert "There is no dump of rank 2:" in run.stdout


def test_a_truncated_dump_is_one_sentence(dumps: Path, tmp_path: Path) -> None:
    (tmp_path / "dump_0").write_bytes((dumps / "flight_recorder_rank_0").read_bytes()[:100])
    run = run_plain(["-m", "hpc_inflight", "trace", str(tmp_path)])
    assert run.returncode == 2
    assert run.stderr.count("\n") == 1
    assert f"{tmp_path}/dump_0 is no flight recorder dump: it is damaged, cut short or no pickle" in run.stderr


def test_a_dump_that_cannot_be_written_does_not_end_the_job(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file where the directory should be")
    env = {"HPC_INFLIGHT_DUMP_SIGNAL": "USR2", "HPC_INFLIGHT_DUMP_DIR": str(tmp_path / "taken")}
    run = run_plain(["-c", UNWRITABLE], env=env)
    assert run.returncode == 0, run.stderr
    assert "the flight recorder cannot be written: " in run.stderr
