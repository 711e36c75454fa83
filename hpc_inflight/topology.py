"""Who runs where: pure functions from gathered facts to decisions, so that tables of situations test them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpc_inflight.errors import LaunchError

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Place:
    """Where a rank is and which GPUs it sees, as it tells the others.

    Attributes:
        leader: Lowest world rank among those that share this node's memory.
        local_rank: Rank among those.
        hostname: Name of the node.
        visible: Number of CUDA devices that the process sees; 0 also when it is to use none.
        mask: ``CUDA_VISIBLE_DEVICES``, None when it is not set.
        library: Version line of the MPI library.
    """

    leader: int
    local_rank: int
    hostname: str
    visible: int
    mask: str | None
    library: str


def node_ranks(leaders: Sequence[int]) -> dict[int, int]:
    """Number the nodes in the order of their lowest world rank.

    **Local:** any rank.

    Args:
        leaders: For every world rank, the world rank of the lowest rank on its node.

    Returns:
        From that lowest rank to the node's index.
    """
    return {leader: index for index, leader in enumerate(sorted(set(leaders)))}


def device_index(visible: int, local_rank: int) -> int | None:
    """Choose the CUDA device of a rank.

    **Local:** any rank.

    Args:
        visible: Number of devices that this process sees.
        local_rank: Rank within the node.

    Returns:
        None without a device; 0 when one device is visible (the launcher chose it, or all share it); else
        ``local_rank``.
    """
    if visible == 0:
        return None
    return 0 if visible == 1 else local_rank


def device_problem(places: Sequence[Place]) -> str | None:
    """Say why the ranks cannot each have a GPU, if they cannot.

    **Local:** any rank; all see the same facts and so the same problem.

    Args:
        places: Every rank's, in rank order.

    Returns:
        One sentence that names the first rank it hits and the next step, or None.
    """
    with_gpu = [rank for rank, place in enumerate(places) if place.visible]
    without = [rank for rank, place in enumerate(places) if not place.visible]
    if with_gpu and without:
        rank = without[0]
        place = places[rank]
        mask = "not set" if place.mask is None else repr(place.mask)
        return (
            f"rank {rank} on {place.hostname} sees no GPU (CUDA_VISIBLE_DEVICES is {mask}) while rank {with_gpu[0]} on "
            f'{places[with_gpu[0]].hostname} does; give every rank one (--gpus-per-task=1), or call init(device="cpu")'
        )
    for rank, place in enumerate(places):
        if place.visible > 1 and place.local_rank >= place.visible:
            return (
                f"local rank {place.local_rank} (rank {rank}) on {place.hostname} has no GPU: {place.visible} are "
                f"visible; start at most {place.visible} ranks per node, give each rank one device "
                '(--gpus-per-task=1), or call init(device="cpu")'
            )
        instances = _mig_instances(place.mask)
        if place.visible == 1 and instances > 1 and _crowded(places, rank):
            return (
                f"rank {rank} on {place.hostname} shares a MIG instance: CUDA shows a process only the first of the "
                f"{instances} in CUDA_VISIBLE_DEVICES; give each rank its own, with launch/bind_gpu.sh or "
                "--gpus-per-task=1"
            )
    return None


def check_devices(places: Sequence[Place]) -> None:
    """Raise what `device_problem` finds.

    **Local:** any rank.

    Raises:
        LaunchError: There is one.
    """
    problem = device_problem(places)
    if problem is not None:
        raise LaunchError(f"init: {problem}")


def _mig_instances(mask: str | None) -> int:
    return sum(entry.strip().startswith("MIG-") for entry in (mask or "").split(","))


def _crowded(places: Sequence[Place], rank: int) -> bool:
    """Say whether another rank of the node has the same mask."""
    mine = places[rank]
    return sum(place.leader == mine.leader and place.mask == mine.mask for place in places) > 1
