"""How ranks come to an NCCL communicator, and what they are told when one of them cannot: on the stand-in."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

import hpc_inflight as hi
from hpc_inflight import _cupy, _gate, capture, group_set
from hpc_inflight.testing import gather_on_all_ranks, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpc_inflight.testing.fake_nccl import FakeRuntime

NOT_AFFECTED = "; CPU tensors of the group are not affected"


@pytest.fixture
def group(size: int) -> Iterator[Any]:
    made: Any = dist.new_group(range(size), timeout=timedelta(seconds=20))
    yield made
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=made)  # whatever happened, the CPU side goes on
    assert tensor.item() == size
    dist.destroy_process_group(made)


def refused(group: Any, kind: type[Exception], match: str, rounds: int = 2) -> None:
    for _ in range(rounds):
        with pytest.raises(kind, match=match) as caught:
            group._open_nccl("all_reduce", -1)
        assert str(caught.value).endswith(NOT_AFFECTED)
    assert len(set(gather_on_all_ranks(str(caught.value)))) == 1


def test_all_ranks_have_one(runtime: FakeRuntime, group: Any, rank: int, size: int) -> None:
    made = group._open_nccl("all_reduce", -1)
    assert (made.rank, made.size) == (made._nccl.rank, made._nccl.size) == (rank, size)
    assert group._open_nccl("all_reduce", -1) is made
    with pytest.raises(hi.InvalidArgumentError, match=r"all_reduce: the tensor is on cuda:3; .* uses cuda:-1"):
        group._open_nccl("all_reduce", 3)


def test_a_group_counts_until_nccl_has_ended_its_communicator(
    runtime: FakeRuntime, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # after the last group captures go by unseen
    made: Any = dist.new_group(range(size))
    made._open_nccl("all_reduce", -1)
    done: list[Any] = []
    discard = group_set.discard

    def see_destroy(name: str) -> None:
        if name == "destroy":
            done.append(made in hi.groups())

    def see_discard(ticket: int) -> None:
        done.append("gone")
        discard(ticket)

    runtime.fail = see_destroy
    monkeypatch.setattr(group_set, "discard", see_discard)
    dist.destroy_process_group(made)
    assert done == [False, "gone"]


def test_one_rank_without_cupy(runtime: FakeRuntime, group: Any, rank: int, size: int) -> None:
    if rank == size - 1:

        def missing() -> Any:
            raise hi.NCCLUnavailableError("CUDA tensors need CuPy")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_cupy, "runtime", missing)
            refused(group, hi.NCCLUnavailableError, rf"rank {size - 1} on .*: CUDA tensors need CuPy")
    else:
        refused(group, hi.NCCLUnavailableError, rf"rank {size - 1} on .*: CUDA tensors need CuPy")


def test_one_rank_without_a_device(runtime: FakeRuntime, group: Any, rank: int) -> None:
    def no_device(_index: int) -> str:
        raise RuntimeError("cudaErrorInvalidDevice")

    if rank == 0:
        runtime.uuid = no_device  # type: ignore[method-assign]
    refused(group, hi.NCCLUnavailableError, r"rank 0 on .*: cudaErrorInvalidDevice")


def test_one_rank_without_memory_on_its_device(runtime: FakeRuntime, group: Any, rank: int, size: int) -> None:
    def no_memory(_index: int) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    if rank == size - 1:
        runtime.zeros = no_memory  # type: ignore[method-assign]
    refused(group, hi.NCCLUnavailableError, rf"rank {size - 1} on .*: CUDA out of memory")


@pytest.mark.mpi(min_size=2)
def test_ranks_on_one_device(runtime: FakeRuntime, group: Any, rank: int, size: int) -> None:
    runtime.device = "GPU-same" if rank in {0, size - 1} else f"GPU-{rank}"
    refused(group, hi.NCCLUnavailableError, rf"ranks 0 and {size - 1} on .* both use GPU-same; give every rank a GPU")


@pytest.mark.mpi(min_size=2)
def test_ranks_may_share_a_device_where_nccl_can(runtime: FakeRuntime, group: Any) -> None:
    runtime.device, runtime.shared = "GPU-same", True
    group._open_nccl("all_reduce", -1)


@pytest.mark.mpi(min_size=2)
def test_different_nccl_libraries(runtime: FakeRuntime, group: Any, rank: int) -> None:
    runtime.nccl_version += rank == 0
    refused(group, hi.NCCLUnavailableError, r"different NCCL libraries, versions \[22809, 22810\]")


def test_no_unique_id(runtime: FakeRuntime, group: Any) -> None:
    def fail(name: str) -> None:
        if name == "unique_id":
            raise KeyError(6)

    runtime.fail = fail
    refused(group, hi.NCCLUnavailableError, "rank 0: no unique id: 6")


@pytest.mark.parametrize("failing", ["first", "last"])
def test_nccl_fails_on_one_rank_and_hangs_on_the_others(
    runtime: FakeRuntime, group: Any, rank: int, size: int, failing: str
) -> None:
    bad = 0 if failing == "first" else size - 1

    def fail(name: str) -> None:
        if name == "communicator":
            if rank == bad:
                raise RuntimeError("NCCL_ERROR_SYSTEM_ERROR: out of shared memory")
            time.sleep(3)
            raise RuntimeError("too late")

    runtime.fail = fail
    started = time.monotonic()
    refused(group, hi.NCCLError, f"rank {bad}: NCCL_ERROR_SYSTEM_ERROR: out of shared memory")
    assert time.monotonic() - started < 15


@pytest.mark.mpi(min_size=2)
def test_a_group_that_is_destroyed_while_a_thread_connects(runtime: FakeRuntime, rank: int, size: int) -> None:
    """The thread leaves the group's MPI communicator before that is freed, long before its own deadline."""
    group: Any = dist.new_group(range(size), timeout=timedelta(seconds=300))
    failed: list[BaseException] = []

    def connect() -> None:
        try:
            group._open_nccl("all_reduce", -1)
        except hi.GroupDestroyedError as error:
            failed.append(error)

    thread = threading.Thread(target=connect, daemon=True)
    if rank != 0:  # it waits for rank 0, which never comes
        thread.start()
        deadline = time.monotonic() + 30
        while not group._nccl_lock.locked() and time.monotonic() < deadline:
            time.sleep(1e-3)
    started = time.monotonic()
    dist.destroy_process_group(group)
    if rank != 0:
        thread.join(60)
        assert len(failed) == 1
        assert "was destroyed" in str(failed[0])
    assert time.monotonic() - started < 60


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("who", ["first", "last"])
def test_a_rank_that_does_not_come(runtime: FakeRuntime, rank: int, size: int, who: str) -> None:
    group: Any = dist.new_group(range(size), timeout=timedelta(seconds=1))
    absent = 0 if who == "first" else size - 1
    if rank != absent:
        with pytest.raises(hi.CollectiveTimeout, match=rf"rank {absent} did not come in time"):
            group._open_nccl("all_reduce", -1)
    dist.barrier()
    tensor = torch.ones(1)
    group._set_default_timeout(timedelta(seconds=30))
    dist.all_reduce(tensor, group=group)
    assert tensor.item() == size
    dist.barrier()
    dist.destroy_process_group(group)


@pytest.mark.mpi(min_size=2)
def test_a_ring_in_which_all_send_first(runtime: FakeRuntime, group: Any, rank: int, size: int) -> None:
    comm = group._open_nccl("send", -1)
    following, previous = (rank + 1) % size, (rank - 1) % size
    for i in range(3):
        sent = [comm.send(torch.full((100,), rank + 10.0 * i + j), following, 0, 20.0) for j in range(2)]
        into = [torch.zeros(10, 10).t(), torch.zeros(100)]
        received = [comm.recv(tensor, previous, 0, 20.0) for tensor in into]
        for work in (*received, *sent):
            work.wait()
        assert [t.unique().tolist() for t in into] == [[previous + 10.0 * i + j] for j in range(2)]


@pytest.mark.mpi(min_size=2)
def test_a_message_whose_other_end_never_comes(runtime: FakeRuntime, rank: int, size: int) -> None:
    group: Any = dist.new_group(range(size), timeout=timedelta(seconds=20))
    comm = group._open_nccl("send", -1)
    if rank == 0:
        work = comm.send(torch.ones(4), 1, 0, 0.1)
        with pytest.raises(hi.CollectiveTimeout, match="it waits for rank 1 to issue its end of the first message"):
            work.wait()
        group._set_default_timeout(timedelta(seconds=0.2))
        with pytest.raises(hi.DrainTimeout, match="destroying group"):
            group.shutdown()
        with pytest.raises(hi.GroupDestroyedError, match="was destroyed"):
            work.wait(timedelta(seconds=10))
    else:
        group.shutdown()
    dist.barrier()
    dist.destroy_process_group(group)


@pytest.mark.mpi(min_size=2)
def test_a_pair_that_cannot_be_connected(runtime: FakeRuntime, group: Any, rank: int) -> None:
    comm = group._open_nccl("send", -1)

    def fail(name: str) -> None:
        if name == "communicator" and rank == 1:
            raise RuntimeError("no more channels")

    runtime.fail = fail
    if rank < 2:
        work = comm.send(torch.ones(4), 1, 0, 10.0) if rank == 0 else comm.recv(torch.ones(4), 0, 0, 10.0)
        future = work.get_future()
        with pytest.raises(hi.NCCLError, match=r"messages from rank 0 to 1 of group .*: rank 1: no more channels"):
            work.wait()
        with pytest.raises(hi.NCCLError, match="no more channels"):
            future.wait()
        with pytest.raises(hi.NCCLError, match="no more channels"):
            comm.send(torch.ones(4), 1, 0, 10.0) if rank == 0 else comm.recv(torch.ones(4), 0, 0, 10.0)


def test_a_barrier_waits_for_what_is_on_the_streams(runtime: FakeRuntime, group: Any, rank: int) -> None:
    runtime.late_s = 0.05
    comm = group._open_nccl("all_reduce", -1)
    work = comm.enqueue("nothing", [lambda _stream: None], (), 10.0)
    dist.barrier(group)
    assert runtime.event_done(work.completion.event)


def test_device_id_connects_at_once(runtime: FakeRuntime, group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []
    monkeypatch.setattr(group, "_open_nccl", lambda _call, index: opened.append(index))
    group.eager_connect_single_device(torch.device("cuda", 1))
    group.eager_connect_single_device(torch.device("cpu"))
    assert opened == [1]
    assert group.bound_device_id == torch.device("cuda", 1)


def test_a_drain_waits_for_a_thread_that_connects(runtime: FakeRuntime, group: Any) -> None:
    """NCCL's setup would end a capture that began beside it."""
    inside, go_on, capturing = threading.Event(), threading.Event(), []

    def hold(name: str) -> None:
        if name == "communicator":
            inside.set()
            assert go_on.wait(30)
            capturing.append(_gate.capturing())

    runtime.fail = hold
    connecting = threading.Thread(target=lambda: group._open_nccl("all_reduce", -1))
    connecting.start()
    assert inside.wait(30)
    with pytest.raises(hi.DrainTimeout):
        hi.wait_for_all_pending_works(0.05)
    threading.Timer(0.2, go_on.set).start()
    stand_in = threading.Event()  # for a graph
    capture.begin(lambda: None, stand_in, 30.0, "capture")
    _gate.capture_ended(stand_in)
    connecting.join(30)
    assert capturing == [False]


@pytest.mark.mpi(min_size=2)
def test_a_callback_connects_beside_a_drain_that_waits_for_it(
    runtime: FakeRuntime, group: Any, rank: int, size: int
) -> None:
    other: Any = dist.new_group(range(size))
    entered, connected = threading.Event(), threading.Event()

    def connect(_: Any) -> None:
        if threading.current_thread() is not threading.main_thread():  # where the work was not complete before
            entered.set()
            wait_until(lambda: _gate.gate.closed)
        group._open_nccl("all_reduce", -1)
        connected.set()

    if rank == size - 1:
        time.sleep(0.3)
    work: Any = dist.all_reduce(torch.ones(4), group=other, async_op=True)
    future = work.get_future().then(connect)
    wait_until(lambda: entered.is_set() or connected.is_set())
    hi.wait_for_all_pending_works(30)
    future.wait()
    assert connected.is_set()
    dist.destroy_process_group(other)
