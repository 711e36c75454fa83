from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as funcol
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh

import hpc_inflight as hi
from hpc_inflight._mpi import mpi
from hpc_inflight.testing import assert_on_all_ranks, gather_on_all_ranks, wait_until


def test_world_facts(world: hi.World, rank: int, size: int) -> None:
    # one machine: everything is local
    assert (world.local_rank, world.local_world_size, world.node_rank) == (rank, size, 0)
    assert gather_on_all_ranks(world.rank) == list(range(size))
    assert world.thread_level == "multiple"
    assert world.mpi_vendor in {"Open MPI", "MPICH"}
    assert world.mpi_version[0] >= 4
    assert world.device == torch.device("cpu")
    assert dist.get_rank() == rank
    assert dist.get_world_size() == size
    assert dist.get_backend() == "hpc_inflight"
    assert hi.world() is world


def test_subgroups(rank: int, size: int) -> None:
    evens, odds = range(0, size, 2), range(1, size, 2)
    groups = [dist.new_group(list(r)) for r in (evens, odds) if len(r)]
    mine = groups[rank % 2]
    members = evens if rank % 2 == 0 else odds
    tensor = torch.tensor([float(rank)])
    dist.all_reduce(tensor, group=mine)
    assert tensor.item() == sum(members)
    # roots are given as world ranks
    tensor = torch.tensor([float(rank)])
    dist.broadcast(tensor, src=members[-1], group=mine)
    assert tensor.item() == members[-1]
    dist.destroy_process_group(mine)


def test_new_group_only_members_take_part(rank: int, size: int) -> None:
    # each rank makes a group of its own, at its own time
    time.sleep(0.1 * rank)
    group = dist.new_group([rank], use_local_synchronization=True)
    tensor = torch.tensor([3.0])
    dist.all_reduce(tensor, group=group)
    assert tensor.item() == 3.0
    dist.destroy_process_group(group)


def test_groups_do_not_depend_on_torchs_names(rank: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # torch numbers groups per process, and the numbers may differ after groups that only some ranks made
    monkeypatch.setattr(c10d._world, "group_count", 1000 + rank)
    group = dist.new_group(list(range(size)))
    tensor = torch.tensor([1.0])
    dist.all_reduce(tensor, group=group)
    assert tensor.item() == size
    dist.destroy_process_group(group)


def test_hundred_groups_destroyed_in_reverse(rank: int, size: int) -> None:
    before = len(hi.groups())
    groups = [dist.new_group(list(range(size))) for _ in range(100)]
    assert len(hi.groups()) == before + 100
    for group in reversed(groups):
        tensor = torch.tensor([1.0])
        dist.all_reduce(tensor, group=group)
        assert tensor.item() == size
        dist.destroy_process_group(group)
    assert len(hi.groups()) == before


def test_destroyed_group_refuses(size: int) -> None:
    group = dist.new_group(list(range(size)))
    assert group is not None
    dist.destroy_process_group(group)
    with pytest.raises(hi.GroupDestroyedError, match=r"all_reduce: group .* was destroyed; make a new group"):
        group.allreduce([torch.ones(1)])


def test_works_on_two_groups_from_two_threads(rank: int, size: int) -> None:
    groups = [dist.new_group(list(range(size))) for _ in range(2)]
    totals: list[float] = [0.0, 0.0]

    def run(i: int) -> None:
        for _ in range(200):
            tensor = torch.tensor([float(rank + i)])
            dist.all_reduce(tensor, group=groups[i])
            totals[i] += tensor.item()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    comm = mpi().COMM_WORLD  # and the program's own traffic meanwhile
    for i in range(200):
        assert comm.allreduce(rank + i) == size * (size - 1) // 2 + size * i
    for thread in threads:
        thread.join()
    assert totals == [200 * (size * (size - 1) / 2 + i * size) for i in range(2)]
    for group in groups:
        dist.destroy_process_group(group)


def test_object_collectives_of_unequal_size(rank: int, size: int) -> None:
    gathered: list[object] = [None] * size
    dist.all_gather_object(gathered, "x" * (1 + 1000 * rank))
    assert [len(str(g)) for g in gathered] == [1 + 1000 * r for r in range(size)]
    objects: list[object] = [{"from": rank}, [rank] * 5] if rank == size - 1 else [None, None]
    dist.broadcast_object_list(objects, src=size - 1)
    assert objects == [{"from": size - 1}, [size - 1] * 5]
    received: list[object] = [None]
    dist.scatter_object_list(received, [("to", r) for r in range(size)] if rank == 0 else None, src=0)
    assert received == [("to", rank)]
    collected: list[object] | None = [None] * size if rank == 0 else None
    dist.gather_object((rank,), collected, dst=0)
    assert collected == ([(r,) for r in range(size)] if rank == 0 else None)


def test_device_mesh_and_functional_collectives(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (size,))
    tensor = torch.full((2,), rank + 1.0)
    reduced = funcol.all_reduce(tensor, "sum", mesh)
    assert reduced.tolist() == [size * (size + 1) / 2] * 2
    gathered = funcol.all_gather_tensor(tensor, 0, mesh)
    assert gathered.tolist() == [s + 1.0 for s in range(size) for _ in range(2)]
    for group in mesh.get_all_groups():
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def test_ddp_matches_the_full_batch(rank: int, size: int) -> None:
    torch.manual_seed(1)
    reference = torch.nn.Linear(4, 3)
    model = torch.nn.Linear(4, 3)
    model.load_state_dict(reference.state_dict())
    batch = torch.randn(6 * size, 4)
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    parallel(batch[6 * rank : 6 * rank + 6]).square().mean().backward()
    reference(batch).square().mean().backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_ddp_starts_from_rank_0s_weights(rank: int) -> None:
    torch.manual_seed(100 + rank)
    model = torch.nn.Linear(3, 3)
    torch.manual_seed(100)
    expected = torch.nn.Linear(3, 3).weight
    torch.nn.parallel.DistributedDataParallel(model)
    assert torch.equal(model.weight, expected)


def test_drain(rank: int, size: int) -> None:
    tensor = torch.full((200_000,), 1.0)
    for _ in range(10):
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, async_op=True)
    hi.wait_for_all_pending_works(timeout_s=60)
    assert not any(group.pending_works() for group in hi.groups())


def test_assert_on_all_ranks_names_the_failing(rank: int, size: int) -> None:
    with pytest.raises(AssertionError, match=rf"failed on 1 of {size} ranks:\n  rank {size - 1}: bad on {size - 1}"):
        assert_on_all_ranks(rank != size - 1, f"bad on {rank}")
    assert_on_all_ranks(True, "never shown")


def test_split_group(rank: int, size: int) -> None:
    parent = c10d._get_default_group()
    evens, odds = list(range(0, size, 2)), list(range(1, size, 2))
    mine = parent.split_group(evens if rank % 2 == 0 else odds)
    assert mine is not None
    tensor = torch.tensor([float(rank)])
    mine.allreduce([tensor]).wait()
    assert tensor.item() == sum(evens if rank % 2 == 0 else odds)
    assert (mine.rank(), mine.size()) == (rank // 2, len(evens if rank % 2 == 0 else odds))
    mine.get_group_store().set(str(mine.rank()), "here")
    mine.shutdown()
    alone = parent.split_group([size - 1])
    assert (alone is None) == (rank != size - 1)
    if alone is not None:
        alone.shutdown()
    with pytest.raises(hi.InvalidArgumentError, match=r"split_group: \[0, 0\] are not distinct ranks of group"):
        parent.split_group([0, 0])
    dist.barrier()


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_five_thousand_groups(size: int) -> None:
    before = len(hi.groups()), threading.active_count()
    for i in range(5000):
        if i == 500:
            resident = resident_mib()
        group = dist.new_group(list(range(size)))
        assert group is not None
        if i % 100 == 0:
            tensor = torch.tensor([1.0])
            dist.all_reduce(tensor, group=group, async_op=True).wait()
            assert tensor.item() == size
        dist.destroy_process_group(group)
    assert len(hi.groups()) == before[0]
    wait_until(lambda: threading.active_count() <= before[1])  # a destroyed group's thread ends by itself
    # a communicator that stays costs Open MPI about 50 KiB: 4,500 of them would be past 200 MiB
    assert resident_mib() - resident < 64
