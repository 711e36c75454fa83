"""Tables of situations: which node, which device, and when there is none."""

from __future__ import annotations

import pytest

from hpc_inflight.errors import LaunchError
from hpc_inflight.topology import Place, check_devices, device_index, device_problem, node_ranks


def test_nodes_are_numbered_by_their_lowest_rank() -> None:
    # ranks 0, 2 on one node and 1, 3, 4 on another
    assert node_ranks([0, 1, 0, 1, 1]) == {0: 0, 1: 1}
    assert node_ranks([0, 0, 2, 2]) == {0: 0, 2: 1}


@pytest.mark.parametrize(
    ("visible", "local_rank", "index"),
    [(0, 3, None), (1, 0, 0), (1, 3, 0), (4, 0, 0), (4, 3, 3)],
)
def test_device_index(visible: int, local_rank: int, index: int | None) -> None:
    assert device_index(visible, local_rank) == index


def places(visible: list[int], masks: list[str | None], *, per_node: int = 4) -> list[Place]:
    """Return ranks that fill nodes one after the other."""
    return [
        Place(rank - rank % per_node, rank % per_node, f"node{rank // per_node}", count, mask, "v1")
        for rank, (count, mask) in enumerate(zip(visible, masks, strict=True))
    ]


@pytest.mark.parametrize(
    ("visible", "masks", "indices"),
    [
        pytest.param([0] * 4, [None] * 4, [None] * 4, id="no GPUs"),
        pytest.param([4] * 4, [None] * 4, [0, 1, 2, 3], id="all see all"),
        pytest.param([4] * 8, ["0,1,2,3"] * 8, [0, 1, 2, 3] * 2, id="two nodes, all see all"),
        pytest.param([1] * 4, ["0", "1", "2", "3"], [0] * 4, id="one device each, as by --gpus-per-task=1"),
        pytest.param([2] * 2, ["2,3"] * 2, [0, 1], id="a mask: indices count within it"),
        pytest.param([2, 2], ["0,1", "2,3"], [0, 1], id="two devices each"),
        pytest.param([1] * 4, ["0"] * 4, [0] * 4, id="all share one"),
        pytest.param([1] * 4, [None] * 4, [0] * 4, id="a workstation with one"),
        pytest.param([1] * 2, ["MIG-1", "MIG-2"], [0] * 2, id="a MIG instance each"),
        pytest.param([1], ["MIG-1,MIG-2"], [0], id="two MIG instances for one rank"),
        pytest.param([1] * 2, ["MIG-1"] * 2, [0] * 2, id="one MIG instance that all share"),
        pytest.param([4, 1], ["GPU-a,GPU-b,GPU-c,GPU-d", "GPU-b"], [0, 0], id="different masks on a node"),
        pytest.param([0] * 2, ["NoDevFiles"] * 2, [None] * 2, id="a mask of no device"),
    ],
)
def test_each_rank_has_its_device(visible: list[int], masks: list[str | None], indices: list[int | None]) -> None:
    found = places(visible, masks)
    assert device_problem(found) is None
    assert [device_index(place.visible, place.local_rank) for place in found] == indices


@pytest.mark.parametrize(
    ("visible", "masks", "says"),
    [
        pytest.param([2] * 3, [None] * 3, "local rank 2 (rank 2) on node0 has no GPU: 2 are visible", id="more ranks"),
        pytest.param([2] * 8, ["0,1"] * 8, "start at most 2 ranks per node", id="more ranks, with a mask"),
        pytest.param([1, 0], ["0", ""], "rank 1 on node0 sees no GPU (CUDA_VISIBLE_DEVICES is '')", id="an empty mask"),
        pytest.param(
            [4] * 4 + [0] * 4, [None] * 8, "rank 4 on node1 sees no GPU (CUDA_VISIBLE_DEVICES is not set)", id="node"
        ),
        pytest.param([1] * 2, ["MIG-1,MIG-2"] * 2, "rank 0 on node0 shares a MIG instance", id="the first MIG for all"),
    ],
)
def test_what_cannot_be_is_said_on_every_rank(visible: list[int], masks: list[str | None], says: str) -> None:
    found = places(visible, masks)
    problem = device_problem(found)
    assert problem is not None
    assert says in problem
    with pytest.raises(LaunchError, match=r"^init: .*(--gpus-per-task=1|bind_gpu)"):
        check_devices(found)
