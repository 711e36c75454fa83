"""The store and the mpi:// rendezvous."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

import hpc_inflight as hi
from hpc_inflight import store as store_module
from hpc_inflight._mpi import mpi
from hpc_inflight._torch_compat import PrefixStore
from hpc_inflight.store import MPIStore

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def store(world: hi.World) -> Iterator[MPIStore]:
    made = MPIStore(mpi().COMM_WORLD.Dup(), timeout=timedelta(seconds=60))
    yield made
    assert made.close(timeout_s=60)


def test_set_and_get_from_every_rank(store: MPIStore, rank: int, size: int) -> None:
    store.set(f"key{rank}", f"value{rank}")
    assert [store.get(f"key{r}") for r in range(size)] == [f"value{r}".encode() for r in range(size)]


def test_get_waits_for_a_late_key(store: MPIStore, rank: int, size: int) -> None:
    if rank == size - 1:
        time.sleep(0.2)
        store.set("late", b"\x00\xff")
    assert store.get("late") == b"\x00\xff"


def test_large_values(store: MPIStore, rank: int) -> None:
    if rank == 0:
        store.set("large", bytes(3_000_000))
    assert len(store.get("large")) == 3_000_000


def test_add_is_atomic(store: MPIStore, rank: int, size: int) -> None:
    seen = [store.add("count", 2) for _ in range(50)]
    assert seen == sorted(set(seen))
    store.add("done", 1)
    while store.add("done", 0) < size:
        time.sleep(0.001)
    assert store.add("count", 0) == 100 * size
    assert store.get("count") == str(100 * size).encode()


def test_compare_set(store: MPIStore, rank: int, size: int) -> None:
    # as torch's own stores: an empty expectation creates the key, once
    value = store.compare_set("winner", "", str(rank))
    assert store.get("winner") == value
    assert 0 <= int(value) < size
    assert store.compare_set("missing", "something", "else") == b"something"
    assert not store.check(["missing"])
    store.set(f"own{rank}", "a")
    assert store.compare_set(f"own{rank}", "x", "b") == b"a"
    assert store.compare_set(f"own{rank}", "a", "b") == b"b"


def test_delete_check_num_keys(store: MPIStore, rank: int, size: int) -> None:
    store.set(f"k{rank}", "v")
    store.wait([f"k{r}" for r in range(size)])
    assert store.check([f"k{r}" for r in range(size)])
    assert not store.check(["k0", "none"])
    dist.barrier()
    if rank == 0:
        assert store.num_keys() == size
        assert store.delete_key("k0") is True
        assert store.delete_key("k0") is False
        assert sorted(store.list_keys()) == [f"k{r}" for r in range(1, size)]
    dist.barrier()


def test_append_and_multi(store: MPIStore, rank: int, size: int) -> None:
    store.append("log", f"{rank};")
    store.multi_set([f"a{rank}", f"b{rank}"], ["1", b"2"])
    assert (
        store.multi_get([f"a{r}" for r in range(size)] + [f"b{r}" for r in range(size)])
        == [b"1"] * size + [b"2"] * size
    )
    dist.barrier()
    assert sorted(store.get("log").decode().strip(";").split(";")) == [str(r) for r in range(size)]
    assert store.has_extended_api()
    with pytest.raises(hi.InvalidArgumentError, match="2 keys and 1 values"):
        store.multi_set(["x", "y"], ["1"])


def test_timeouts_name_the_missing_keys(store: MPIStore) -> None:
    start = time.monotonic()
    with pytest.raises(hi.StoreTimeout, match=r"MPIStore.wait: no rank set never, nowhere within 0.2 s"):
        store.wait(["never", "nowhere"], timedelta(seconds=0.2))
    store.set_timeout(timedelta(seconds=0.1))
    with pytest.raises(hi.StoreTimeout, match=r"MPIStore.get: no rank set never within 0.1 s"):
        store.get("never")
    assert time.monotonic() - start >= 0.3


def test_waits_from_many_threads(store: MPIStore, rank: int) -> None:
    found: list[bytes] = []
    threads = [threading.Thread(target=lambda i=i: found.append(store.get(f"t{rank}.{i}"))) for i in range(8)]
    for thread in threads:
        thread.start()
    for i in reversed(range(8)):
        store.set(f"t{rank}.{i}", str(i))
    for thread in threads:
        thread.join(60)
    assert sorted(found) == [str(i).encode() for i in range(8)]


def test_through_torchs_cpp_prefix_store(store: MPIStore, rank: int, size: int) -> None:
    # torch's own stores wrap ours and call its overrides from C++
    prefix: Any = PrefixStore("outer", PrefixStore("inner", store))
    prefix.set(f"p{rank}", "x")
    prefix.wait([f"p{r}" for r in range(size)], timedelta(seconds=60))
    assert prefix.get(f"p{size - 1}") == b"x"
    assert store.get(f"inner/outer/p{rank}") == b"x"
    dist.barrier()  # before anyone deletes its key
    assert prefix.add("n", 1) >= 1
    assert prefix.check([f"p{rank}"])
    assert prefix.compare_set(f"p{rank}", "x", "y") == b"y"
    assert prefix.delete_key(f"p{rank}")
    assert prefix.num_keys() >= 1
    prefix.append("ap", "q")
    prefix.multi_set([f"m{rank}"], ["1"])
    assert prefix.multi_get([f"m{rank}"]) == [b"1"]
    prefix.set_timeout(timedelta(seconds=0.05))
    with pytest.raises(RuntimeError, match=r"no rank set inner/outer/none within 0.05 s"):
        prefix.get("none")


def test_use_after_close(world: hi.World) -> None:
    made = MPIStore(mpi().COMM_WORLD.Dup())
    assert made.close(timeout_s=60)
    assert made.close(timeout_s=60)
    with pytest.raises(hi.StoreError, match="was closed by finalize"):
        made.set("a", "b")


def test_new_groups_of_stock_backends_use_our_store(rank: int, size: int) -> None:
    # gloo finds its peers through the store of the default group, which lives in MPI
    group = dist.new_group(list(range(size)), backend="gloo")
    tensor = torch.full((3,), float(rank))
    dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [size * (size - 1) / 2] * 3
    dist.destroy_process_group(group)


def test_default_store_is_one(world: hi.World) -> None:
    assert store_module.default_store(10) is store_module.default_store(10)
