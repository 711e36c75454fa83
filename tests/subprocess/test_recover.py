"""With HPC_INFLIGHT_ON_TIMEOUT=raise a program outlives a collective that a rank did not come to."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import mpis
from tests.drills import drill

PROGRAM = Path(__file__).parent / "programs" / "recover.py"
RAISED = (
    r"rank (\d): 5 \+ 5 raised: all_reduce \(seq 1\) on group \w+ \(rank \1 of 3\): not complete after \S+ s \(timeout 1 s\); "
    r".*rank 1 has not issued it \(it is at seq 0\), its main thread is at \S*recover\.py:\d+ in <module>"
)


@pytest.mark.parametrize(
    ("vendor", "comes", "env"),
    [
        ("Open MPI", "never", {}),
        ("MPICH", "never", {"MPIR_CVAR_CH4_NETMOD": "ucx"}),
        ("MPICH", "never", {"MPIR_CVAR_CH4_NETMOD": "ofi"}),
        ("Open MPI", "late", {}),
    ],
)
def test_the_others_raise_make_new_groups_and_end_with_0(vendor: str, comes: str, env: dict[str, str]) -> None:
    mpi = mpis.installed().get(vendor)
    if mpi is None:
        pytest.skip(mpis.missing(vendor))
    ended = drill(3, [str(PROGRAM), comes], {**mpi.env, **env, "HPC_INFLIGHT_ON_TIMEOUT": "raise"})
    assert ended.code == 0, ended
    assert ended.stdout.count(" done\n") == 3, ended
    assert sorted(found.group(1) for found in re.finditer(RAISED, ended.stdout)) == ["0", "2"], ended
    assert ended.stderr.count("hpc_inflight: rank 0: all_reduce (seq 1) on group") == 1, ended
    left_inside = ended.stderr.count("ends without MPI_Finalize, since a collective on group")
    assert left_inside == (2 if comes == "never" else 0), ended
    assert ended.dumps == tuple(f"flight_recorder_rank_{rank}" for rank in range(3)), ended
    assert not ended.survivors
