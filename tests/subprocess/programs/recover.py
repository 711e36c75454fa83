"""A rank is stuck, the others' collective reaches its deadline, and the program lives on; HPC_INFLIGHT_ON_TIMEOUT=raise.

usage: recover.py late|never

The stuck rank comes back and issues its part of the collective late, or never does.
"""

from __future__ import annotations

import sys
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import hpc_inflight as hi

if TYPE_CHECKING:
    from collections.abc import Callable

STUCK, ALL = 1, [0, 1, 2]
LIVING = [rank for rank in ALL if rank != STUCK]

world = hi.init(device="cpu", timeout_s=600)
dist.barrier()
group = dist.new_group(ALL, timeout=timedelta(seconds=600))
group.set_timeout(timedelta(seconds=1))  # not before: it holds for making the group, too
default: Any = dist.group.WORLD
store = default.get_group_store()


def total(ranks: list[int], group: dist.ProcessGroup) -> None:
    """Use a group of some ranks."""
    tensor = torch.full((2,), 1.0 + world.rank)
    dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [sum(1.0 + rank for rank in ranks)] * 2


def error_of(call: Callable[[], object]) -> BaseException:
    """Return what a call raises."""
    try:
        call()
    except hi.InflightError as error:
        return error
    raise AssertionError("nothing was raised")


def wait_by_several() -> list[BaseException]:
    """Issue what the stuck rank does not, and return what each of those who wait for it raises."""
    works = [dist.all_reduce(torch.ones(2), group=group, async_op=True) for _ in range(2)]
    raised: list[BaseException] = []
    waits = [lambda work=work: raised.append(error_of(work.wait)) for work in works for _ in range(2)]
    threads = [threading.Thread(target=wait) for wait in waits]
    for thread in threads:
        thread.start()
    raised.append(error_of(lambda: dist.all_reduce(torch.ones(2), group=group)))  # and one that is synchronous
    for thread in threads:
        thread.join()
    return raised


def issue_later() -> list[BaseException]:
    """Return what later calls on the group raise."""
    calls: list[Callable[[], object]] = [
        lambda: dist.all_reduce(torch.ones(2), group=group),
        lambda: dist.all_reduce(torch.ones(2), group=group, async_op=True),
        lambda: dist.send(torch.ones(2), STUCK, group=group),
        lambda: dist.irecv(torch.ones(2), STUCK, group=group),
        lambda: dist.barrier(group),
    ]
    return [error_of(call) for call in calls]


def others() -> None:
    """Fail, and go on without the stuck rank."""
    raised = wait_by_several()
    later = issue_later()
    drained = error_of(lambda: hi.wait_for_all_pending_works(60))  # so no capture begins beside it
    assert isinstance(drained, hi.CommunicatorAborted), drained
    assert {type(error) for error in raised + later} == {hi.CollectiveTimeout}, raised + later
    texts = {str(error) for error in [*raised, *later, drained]}
    assert len(texts) == 1, texts
    sys.stdout.write(f"rank {world.rank}: {len(raised)} + {len(later)} raised: {texts.pop()}\n")
    living = dist.new_group(LIVING, use_local_synchronization=True)
    total(LIVING, living)
    if world.rank == LIVING[0]:
        store.set("come back", "1")


if world.rank == STUCK:
    store.get("come back")  # for as long as it takes
    if sys.argv[1] == "late":
        dist.all_reduce(torch.ones(2), group=group)
else:
    others()
whole = dist.new_group(ALL)
total(ALL, whole)
total(ALL, default)
hi.finalize()
sys.stdout.write(f"rank {world.rank} done\n")
