"""Whole jobs: they start, end, and end when a rank fails."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hpc_inflight.testing.launch import RanksFailedError, run_plain, run_ranks

ROOT = Path(__file__).resolve().parents[2]


def readme_block(kind: str, number: int = 0) -> str:
    text = (ROOT / "README.md").read_text()
    found: str = re.findall(rf"```{kind}\n(.*?)```", text, re.DOTALL)[number]
    return found


def test_readme_program(tmp_path: Path) -> None:
    program = readme_block("python")
    assert len(program.strip().splitlines()) <= 15
    (tmp_path / "overlap.py").write_text(program)
    run = run_ranks(2, ["overlap.py"], cwd=tmp_path, check=True)
    # ranks print in any order
    assert sorted(run.stdout.split("\n")) == sorted(readme_block("text").split("\n"))
    alone = run_plain(["overlap.py"], cwd=tmp_path, check=True)
    assert alone.stdout.startswith("rank 0 of 1:")


GLOO = """
import os, sys
import torch, torch.distributed as dist
import hpc_inflight
for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
    assert name not in os.environ
for _ in range(2):   # and again, with a fresh namespace in the store
    dist.init_process_group("gloo", init_method="mpi://")
    tensor = torch.full((3,), dist.get_rank() + 1.0)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [3.0] * 3, tensor
    dist.destroy_process_group()
sys.stdout.write(f"{dist.is_initialized()} ok\\n")
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_sixteen_jobs_at_the_same_moment() -> None:
    with ThreadPoolExecutor(16) as pool:
        jobs = [pool.submit(run_ranks, 2, ["-c", GLOO], timeout_s=1500) for _ in range(16)]
        ended = [job.result() for job in jobs]
    assert [job.returncode for job in ended] == [0] * 16, [job.stderr[-2000:] for job in ended if job.returncode]
    assert [job.stdout.count("False ok") for job in ended] == [2] * 16


def test_no_tcp_port_is_opened() -> None:
    # rank 0 keeps the store: with a TCP store it would listen
    run = run_ranks(
        2,
        [
            "-c",
            (
                "import os, sys, hpc_inflight as hi, torch.distributed as dist\n"
                "from pathlib import Path\n"
                "def listening():\n"
                "    inodes = {os.readlink(f) for f in Path('/proc/self/fd').iterdir() if f.is_symlink() and f.exists()}\n"
                "    rows = [l.split() for t in ('tcp', 'tcp6') for l in Path('/proc/net/' + t).read_text().splitlines()[1:]]\n"
                "    return {r[1] for r in rows if r[3] == '0A' and f'socket:[{r[9]}]' in inodes}\n"
                "from mpi4py import MPI\n"
                "before = listening()\n"
                "world = hi.init()\n"
                "dist.group.WORLD.get_group_store().set(f'k{world.rank}', 'v')\n"
                "dist.group.WORLD.get_group_store().get('k1')\n"
                "sys.stdout.write(f'new: {sorted(listening() - before)}\\n')\n"
                "hi.finalize()\n"
            ),
        ],
        check=True,
    )
    assert run.stdout.count("new: []") == 2


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        pytest.param("", 0, id="never finalized, a group never destroyed"),
        pytest.param("dist.all_reduce(torch.ones(3), async_op=True)", 0, id="a dropped work"),
        pytest.param("dist.destroy_process_group()", 0, id="destroyed by torch"),
        pytest.param("hi.finalize(); hi.init(); hi.finalize()", 0, id="finalized twice"),
        pytest.param("sys.exit(0)", 0, id="sys.exit(0)"),
    ],
)
def test_normal_ends(ending: str, code: int) -> None:
    run = run_ranks(
        2,
        [
            "-c",
            (
                "import sys, torch, torch.distributed as dist, hpc_inflight as hi\n"
                f"hi.init()\ndist.new_group([0, 1])\ndist.barrier()\n{ending}\n"
            ),
        ],
        env={"HPC_INFLIGHT_EXIT_TIMEOUT_S": "100000"},  # an end that comes by this deadline comes too late
    )
    assert run.returncode == code, run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.parametrize("waiting", ["dist.barrier()", "dist.recv(torch.ones(2), 0)", "hi.finalize()"])
def test_an_uncaught_exception_ends_the_job(waiting: str) -> None:
    run = run_ranks(
        2,
        [
            "-c",
            (
                "import torch, torch.distributed as dist, hpc_inflight as hi\n"
                "world = hi.init()\n"
                f"if world.rank == 1: {waiting}\n"
                "raise KeyError('lost on purpose')\n"
            ),
        ],
    )
    assert run.returncode != 0
    assert "KeyError: 'lost on purpose'" in run.stderr
    assert "hpc_inflight: rank 0 of 2 on " in run.stderr
    assert "ends the job: KeyError" in run.stderr


def test_the_users_own_excepthook_still_runs() -> None:
    run = run_ranks(
        2,
        [
            "-c",
            (
                "import sys, hpc_inflight as hi\n"
                "sys.excepthook = lambda *a: sys.stderr.write('mine: ' + a[0].__name__ + '\\n')\n"
                "hi.init()\nraise KeyError\n"
            ),
        ],
    )
    assert run.returncode != 0
    assert "mine: KeyError" in run.stderr


def test_a_forked_child_cannot_communicate_and_the_rank_goes_on() -> None:
    run_plain(
        [
            "-c",
            (
                "import os, torch, torch.distributed as dist, hpc_inflight as hi\n"
                "hi.init()\n"
                "pid = os.fork()\n"
                "if pid == 0:\n"
                "    try: dist.all_reduce(torch.ones(1))\n"
                "    except hi.GroupDestroyedError as e: os._exit(7 if 'forked child' in str(e) else 8)\n"
                "    os._exit(9)\n"
                "assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7\n"
                "dist.all_reduce(torch.ones(1))\n"
                "hi.finalize()\n"
            ),
        ],
        check=True,
    )


def test_below_thread_multiple_everything_runs_in_the_caller() -> None:
    run = run_ranks(
        2,
        [
            "-c",
            (
                "import sys, threading, mpi4py\n"
                "mpi4py.rc.thread_level = 'funneled'\n"
                "from mpi4py import MPI\n"
                "import torch, torch.distributed as dist, hpc_inflight as hi\n"
                "world = hi.init()\n"
                "assert world.thread_level == 'funneled', world\n"
                "tensor = torch.full((3,), world.rank + 1.0)\n"
                "work = dist.all_reduce(tensor, async_op=True)\n"
                "assert work.is_completed() and tensor.tolist() == [3.0] * 3\n"
                "sent = dist.isend(torch.full((300000,), 5.0), 1 - world.rank)\n"
                "dist.recv(received := torch.empty(300000), 1 - world.rank)\n"
                "sent.wait()\n"
                "assert received.unique().tolist() == [5.0]\n"
                "assert threading.active_count() == 1, threading.enumerate()\n"
                "try: dist.group.WORLD.get_group_store().set('a', 'b')\n"
                "except RuntimeError as e: sys.stdout.write(str(e) + '\\n')\n"
                "hi.finalize()\n"
            ),
        ],
        check=True,
    )
    assert run.stdout.count("MPIStore.set: MPI grants less than MPI_THREAD_MULTIPLE") == 2


# A deadlocked and a failing test, run by the plugin that this suite itself uses.
STUCK = """
import time
import pytest, torch, torch.distributed as dist
@pytest.mark.timeout(5, func_only=True)
def test_stuck(world):
    if world.rank == 0:
        time.sleep(1000)
    dist.all_reduce(torch.ones(1))
"""
UNEVEN = """
import torch, torch.distributed as dist
def test_more_on_one_rank(world, fully_collective):
    if world.rank == 0:
        for group in [dist.new_group([0], use_local_synchronization=True)]:
            dist.distributed_c10d._get_default_group()._comm.seq += 1
"""
LEFT = """
import torch, torch.distributed as dist, hpc_inflight as hi
KEPT = torch.ones(3)
def test_leaves_a_work(world, fully_collective):
    with hi.allow_inflight_collective_as_graph_input():
        dist.all_reduce(KEPT, async_op=True)
"""
SKIPPED = """
import pytest
@pytest.mark.skip(reason="always")
def test_skipped(world): pass
def test_world(world):
    if world.rank == 0:
        pytest.skip("on one rank")
"""
PYTEST = ["-m", "mpi4py", "-m", "pytest", "-x", "--with-mpi", "-p", "no:cacheprovider"]
FAILING = """
import torch, torch.distributed as dist
def test_fails_on_one_rank(world):
    assert world.rank != 1, "broken on purpose"
    dist.barrier()
"""


@pytest.mark.parametrize(
    ("source", "says"),
    [
        pytest.param(
            STUCK, ["test_stuck is not over after 5 s", "line 7 in test_stuck", "line 8 in test_stuck"], id="stuck"
        ),
        pytest.param(UNEVEN, ["not fully collective: collectives on the default group per rank"], id="uneven"),
        pytest.param(LEFT, ["left behind: works in flight: .'all_reduce'."], id="left"),
        pytest.param(SKIPPED, [r"passed tests per rank: \[0, 1\]; expected the same number"], id="skipped"),
        pytest.param(FAILING, ["broken on purpose", r"\[rank 1 of 2\] its report"], id="failing"),
    ],
)
def test_the_pytest_plugin_finds(tmp_path: Path, source: str, says: list[str]) -> None:
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["hpc_inflight.testing.plugin"]\n')
    (tmp_path / "test_it.py").write_text(source)
    with pytest.raises(RanksFailedError) as failed:
        run_ranks(
            2,
            [*PYTEST, "."],
            cwd=tmp_path,
            check=True,
        )
    output = failed.value.stdout + failed.value.stderr
    for pattern in says:
        assert re.search(pattern, output), f"{pattern} not in:\n{output}"


def test_the_pytest_plugin_works_for_an_installed_package_s_tests(tmp_path: Path) -> None:
    package = tmp_path / "some_package" / "tests"  # its conftest is found during collection only
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    (package / "conftest.py").write_text('pytest_plugins = ["hpc_inflight.testing.plugin"]\n')
    (package / "test_it.py").write_text(FAILING)
    with pytest.raises(RanksFailedError) as failed:
        run_ranks(
            2,
            [*PYTEST, "--pyargs", "some_package.tests"],
            cwd=tmp_path,
            check=True,
            timeout_s=120,
        )
    assert "[rank 1 of 2] its report" in failed.value.stdout + failed.value.stderr


HELD = """
import ctypes
def test_held():
    ctypes.PyDLL(None).sleep(1000)
"""


def test_the_pytest_plugin_ends_what_holds_the_gil(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["hpc_inflight.testing.plugin"]\n')
    (tmp_path / "test_it.py").write_text(HELD)
    options = ["-p", "no:cacheprovider", "--timeout=1", "-o", "faulthandler_timeout=900"]
    with pytest.raises(RanksFailedError) as failed:
        run_plain(["-m", "pytest", *options, "."], cwd=tmp_path, check=True)
    assert re.search("Timeout .*line 4 in test_held", failed.value.stderr, re.DOTALL), failed.value.stderr


TEMPORARY = """
import mpi4py.MPI
def test_it(tmp_path, pytestconfig):
    rank = mpi4py.MPI.COMM_WORLD.rank
    (pytestconfig.rootpath / f"base-of-{rank}").write_text(str(tmp_path.parent))
"""


@pytest.mark.parametrize("given", [False, True])
def test_the_pytest_plugin_gives_each_rank_its_own_directory(tmp_path: Path, given: bool) -> None:
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["hpc_inflight.testing.plugin"]\n')
    (tmp_path / "test_it.py").write_text(TEMPORARY)
    options = ["--rootdir=.", *(["--basetemp=base/of/job"] if given else [])]
    env = {"PYTEST_DEBUG_TEMPROOT": str(tmp_path)}
    run_ranks(2, [*PYTEST, *options, "."], cwd=tmp_path, env=env, check=True)
    bases = [Path((tmp_path / f"base-of-{rank}").read_text()) for rank in (0, 1)]
    if given:
        assert bases == [tmp_path / "base/of/job/rank0", tmp_path / "base/of/job/rank1"]
    else:
        assert bases[0] != bases[1]
        assert [base.parent for base in bases] == [tmp_path] * 2
        assert not any(base.exists() for base in bases), "left behind by a session that passed"
