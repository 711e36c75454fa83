"""No work is lost, waited too early or kept for good, whatever threads, deadlines, failures and modes do."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import hpc_inflight as hi
from hpc_inflight import _torch_compat as compat
from hpc_inflight import work_registry
from hpc_inflight._torch_compat import registry_size
from hpc_inflight.testing import wait_until
from hpc_inflight.work import Completion, Work

if TYPE_CHECKING:
    from collections.abc import Callable

stock_wait = torch.ops._c10d_functional.wait_tensor
waits = pytest.mark.parametrize("wait", [hi.wait_tensor, stock_wait], ids=["ours", "torch's"])


class Watched(Completion):
    """A completion that counts the waits that have come to it."""

    waits = 0

    def block(self, seconds: float) -> None:
        self.waits += 1
        super().block(seconds)


def issue(tensor: torch.Tensor, op: str = "op", timeout_s: float = 60.0) -> tuple[Watched, Work]:
    """Register a work that ends when the test says so; like a backend, it does not hold the tensor afterwards."""
    completion = Watched(op, "group", 1, timeout_s)
    work = Work(completion, ())
    hi.register_work(tensor, work)
    return completion, work


def in_thread(function: Callable[[], Any]) -> Any:
    result: list[Any] = []
    thread = threading.Thread(target=lambda: result.append(function()))
    thread.start()
    thread.join(60)
    assert result, "the thread did not end"
    return result[0]


def start(function: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=function)
    thread.start()
    return thread


def in_flight() -> list[str]:
    return sorted(w.op for w in hi.inflight())


# ------------------------------------------------------------------------------------------- threads


@waits
@pytest.mark.parametrize("late", [0, 1])
def test_works_that_two_threads_registered_on_one_tensor_are_both_waited(
    wait: Callable[..., Any], late: int, device: torch.device
) -> None:
    tensor = torch.zeros(3, device=device)
    mine, _ = issue(tensor, "mine", 0.05)
    other, _ = in_thread(lambda: issue(tensor, "other", 0.05))
    (mine, other)[1 - late].finish()
    with pytest.raises(hi.CollectiveTimeout):
        wait(tensor)
    (mine, other)[late].finish()
    wait(tensor)
    assert in_flight() == []
    assert (registry_size(), in_thread(registry_size)) == (0, 0)


def clean_up_own_part() -> None:
    """Do what torch before 2.11 leaves to the thread that registered; from there on nothing may be left to do."""
    if not compat.WAIT_TENSOR_FINDS_EVERY_THREAD:
        work_registry.sweep()


def test_storages_that_two_threads_registered_are_freed(device: torch.device) -> None:
    meet = threading.Barrier(2)
    box: list[Any] = []

    def second() -> None:
        for _ in range(40):
            meet.wait(60)
            box.append(issue(box[0]))
            meet.wait(60)
        meet.wait(60)
        clean_up_own_part()
        box.append(registry_size())

    thread = start(second)
    storages = []
    for _ in range(40):
        box[:] = [torch.ones(8, device=device)]
        storages.append(StorageWeakRef(box[0].untyped_storage()))
        first, work = issue(box[0])
        meet.wait(60)
        meet.wait(60)
        first.finish()
        box[1][0].finish()
        work.wait()
        box[1][1].wait()
    box.clear()
    meet.wait(60)
    thread.join(60)
    assert box == [0]  # in that thread's part of torch's registry
    assert registry_size() == 0
    assert [storage.expired() for storage in storages] == [True] * 40


@pytest.mark.parametrize("every", [False, True], ids=["its own", "every thread's"])
def test_what_a_thread_that_has_ended_registered_is_freed(
    every: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether torch's wait_tensor looks into a thread's own part alone, as before 2.11, or into every thread's."""
    if every:
        needs_every_thread()
    monkeypatch.setattr(compat, "WAIT_TENSOR_FINDS_EVERY_THREAD", every)
    if not every:  # so that any torch shows it: here it is the main thread that pops, which has registered nothing
        monkeypatch.setattr(compat, "pop_from_torch", lambda _tensor: None)
    storages = []

    def run() -> None:
        tensor = torch.ones(8, device=device)
        storages.append(StorageWeakRef(tensor.untyped_storage()))
        completion, _ = issue(tensor)
        completion.finish()

    for _ in range(3):
        start(run).join(60)
    for _ in range(2):  # in the first case the works first, then what stands for them
        work_registry.sweep()
    assert [storage.expired() for storage in storages] == [True] * 3


def needs_every_thread() -> None:
    if not compat.WAIT_TENSOR_FINDS_EVERY_THREAD:
        pytest.skip("before torch 2.11 its own wait_tensor finds what the same thread has registered, and no more")


@waits
def test_a_second_thread_that_waits_returns_after_the_data_arrived(
    wait: Callable[..., Any], device: torch.device
) -> None:
    if wait is stock_wait:
        needs_every_thread()
    tensor = torch.zeros(3, device=device)
    completion, _ = issue(tensor)
    first = start(lambda: wait(tensor))
    wait_until(lambda: completion.waits == 1)
    seen: list[bool] = []

    def second_wait() -> None:
        wait(tensor)
        seen.append(completion.completed)

    second = start(second_wait)
    wait_until(lambda: seen or completion.waits == 2)
    assert seen == []
    completion.finish()
    first.join(60)
    second.join(60)
    assert seen == [True]
    assert in_flight() == []
    clean_up_own_part()
    assert registry_size() == 0


def test_a_work_registered_while_another_thread_waits_is_found(device: torch.device) -> None:
    needs_every_thread()
    tensor = torch.zeros(3, device=device)
    early, _ = issue(tensor, "early")
    thread = start(lambda: stock_wait(tensor))
    wait_until(lambda: early.waits == 1)
    late, _ = issue(tensor, "late", 0.05)
    early.finish()
    thread.join(60)
    assert in_flight() == ["late"]
    with pytest.raises(hi.CollectiveTimeout):
        stock_wait(tensor)
    late.finish()
    stock_wait(tensor)
    assert registry_size() == 0


def test_registering_and_purging_threads_lose_nothing(device: torch.device) -> None:
    # two threads, one storage: each waits by torch's operator for what it registered, while the other's wait purges
    tensor = torch.zeros(64, device=device)
    missed: list[int] = []

    def run() -> int:
        for number in range(300):
            completion, work = issue(tensor[:8])
            timer = threading.Timer(0.0005, completion.finish)
            timer.start()
            if number % 2:
                hi.wait_tensor(tensor)
            else:
                work.wait()
            if not completion.completed:
                missed.append(number)
            timer.join()
        return 0

    threads = [start(run) for _ in range(2)]
    for thread in threads:
        thread.join(300)
    assert missed == []
    assert in_flight() == []
    work_registry.sweep()
    assert registry_size() == 0


# --------------------------------------------------------------------------------- deadlines, failures


@waits
def test_the_time_that_waits_block_the_host_is_counted(wait: Callable[..., Any], device: torch.device) -> None:
    class Blocking(Completion):
        def block(self, _seconds: float) -> None:
            time.sleep(0.05)
            self.finish()

    tensor = torch.zeros(3, device=device)
    hi.register_work(tensor, Work(Blocking("op", "group", 1, 60.0), ()))
    before = work_registry.counts()
    wait(tensor)
    assert work_registry.counts().wait_s - before.wait_s >= 0.05


@waits
def test_a_wait_that_timed_out_can_be_repeated(wait: Callable[..., Any], device: torch.device) -> None:
    tensor = torch.zeros(3, device=device)
    completion, _ = issue(tensor, "slow", 0.05)
    for _ in range(3):
        with pytest.raises(hi.CollectiveTimeout, match="slow"):
            wait(tensor)
        assert in_flight() == ["slow"]
        assert registry_size() == 1
    completion.finish()
    wait(tensor)
    assert in_flight() == []
    assert registry_size() == 0


@waits
def test_a_failed_work_does_not_hide_the_others(wait: Callable[..., Any], device: torch.device) -> None:
    tensor = torch.zeros(3, device=device)
    failed, _ = issue(tensor, "failed")
    slow, _ = issue(tensor, "slow")
    failed.finish(RuntimeError("boom"))

    def finish_when_waited_for() -> None:
        wait_until(lambda: slow.waits)
        slow.finish()

    thread = start(finish_when_waited_for)
    before = work_registry.counts()
    with pytest.raises(RuntimeError, match="boom"):
        wait(tensor)
    assert slow.completed
    assert in_flight() == []
    assert registry_size() == 0
    assert work_registry.counts().waited_by_tensor - before.waited_by_tensor == 2
    thread.join()


def test_a_failed_work_of_another_package_takes_none_of_ours_with_it(device: torch.device) -> None:
    class Failing(dist.Work):
        def wait(self, _timeout: object = None) -> bool:
            raise RuntimeError("foreign")

    tensor = torch.zeros(3, device=device)
    foreign = Failing()
    compat.register_in_torch(tensor, foreign)
    completion, _ = issue(tensor, "ours", 0.05)
    with pytest.raises(RuntimeError, match="foreign"):
        stock_wait(tensor)
    assert in_flight() == ["ours"]
    with pytest.raises(hi.CollectiveTimeout):
        stock_wait(tensor)
    completion.finish()
    stock_wait(tensor)
    assert registry_size() == 0


def test_a_slow_work_of_another_package_holds_up_nobody_else(device: torch.device) -> None:
    needs_every_thread()
    reached, release = threading.Event(), threading.Event()
    released: list[bool] = []

    class Slow(dist.Work):
        def wait(self, _timeout: object = None) -> bool:
            reached.set()
            released.append(release.wait(60))
            return True

    tensor = torch.zeros(3, device=device)
    slow = Slow()
    compat.register_in_torch(tensor, slow)
    completion, work = issue(tensor)
    completion.finish()
    thread = start(work.wait)
    assert reached.wait(60)
    second, second_work = issue(torch.zeros(1, device=device))
    third, third_work = issue(tensor)
    for ended in (second, third):
        ended.finish()
    second_work.wait()
    release.set()
    thread.join(60)
    assert released == [True]  # by this thread: it was not held up until that wait gave up
    hi.wait_tensor(tensor)
    third_work.wait()
    assert in_flight() == []
    assert registry_size() == 0


# ------------------------------------------------------------------------------------- cost and memory


@pytest.mark.parametrize("by", ["work", "tensor"])
def test_a_buffer_that_is_always_in_flight_gathers_no_handles(by: str, device: torch.device) -> None:
    flat = torch.zeros(1000, device=device)
    previous, previous_work = issue(flat[:10])
    for number in range(2000 if by == "work" else 100):
        completion, work = issue(flat[:10] if number % 2 else flat[500:510], "op", 1e-3)
        previous.finish()
        if by == "work":
            previous_work.wait()
        else:
            with pytest.raises(hi.CollectiveTimeout):
                stock_wait(flat)  # the previous one goes, this one stays
        assert in_flight() == ["op"]
        assert registry_size() <= 2
        previous, previous_work = completion, work
    previous.finish()
    previous_work.wait()
    assert registry_size() == 0


def test_two_threads_that_take_turns_on_a_buffer_gather_no_handles(device: torch.device) -> None:
    flat = torch.zeros(100, device=device)
    turns = [threading.Semaphore(1), threading.Semaphore(0)]
    box = [issue(flat)]
    sizes = []

    def run(me: int) -> None:
        for _ in range(100):
            turns[me].acquire()
            completion, work = issue(flat[:10])
            previous, previous_work = box.pop()
            previous.finish()
            previous_work.wait()
            box.append((completion, work))
            sizes.append(registry_size())
            turns[1 - me].release()

    threads = [start(lambda me=me: run(me)) for me in range(2)]  # type: ignore[misc]
    for thread in threads:
        thread.join(60)
    assert len(sizes) == 200
    assert max(sizes) <= 2
    completion, work = box.pop()
    completion.finish()
    work.wait()
    assert registry_size() == 0


def least(cost: Callable[[int], float], few: int, many: int) -> tuple[float, float]:
    """Return the least of several costs each, measured in turns: whatever else the machine does adds to it only."""
    costs = [(cost(few), cost(many)) for _ in range(3)]
    return min(c for c, _ in costs), min(c for _, c in costs)


@pytest.mark.parametrize("own", [False, True], ids=["one tensor", "a tensor each"])
def test_the_cost_does_not_grow_with_what_is_in_flight(own: bool, device: torch.device) -> None:
    def cost(number: int) -> float:
        shared = torch.zeros(10, device=device)
        tensors = [torch.zeros(10, device=device) if own else shared for _ in range(number)]
        started = time.thread_time()
        issued = [issue(tensor) for tensor in tensors]
        for completion, work in issued:
            completion.finish()
            work.wait()
        return (time.thread_time() - started) / number

    # per work; one pass over the works at each registration would make it about 20 times
    few, many = least(cost, 300, 6000)
    assert many < 5 * few


def test_the_outputs_of_one_work_are_swept_in_linear_time(device: torch.device) -> None:
    def cost(number: int) -> float:
        before = work_registry.counts().unwaited
        completion = Completion("op", "group", 1, 30.0)
        work = Work(completion, ())
        outputs = [torch.zeros(1, device=device) for _ in range(number)]
        for output in outputs:
            hi.register_work(output, work)
        completion.finish()
        del outputs[::2]
        started = time.thread_time()
        work_registry.sweep()
        cost = (time.thread_time() - started) / number
        assert len(in_flight()) == len(outputs) == number // 2
        assert work_registry.counts().unwaited == before  # the work can still be waited for
        output = outputs.pop()
        outputs.clear()
        work_registry.sweep()
        assert len(in_flight()) == 1
        hi.wait_tensor(output)
        return cost

    few, many = least(cost, 200, 4000)
    assert many < 5 * few


def test_a_work_whose_future_was_dropped_goes(device: torch.device) -> None:
    before = work_registry.counts().unwaited
    for _ in range(50):
        with hi.allow_inflight_collective_as_graph_input():
            work = dist.all_reduce(torch.ones(1000, device=device), async_op=True)
        work.get_future().wait()
        del work
    hi.wait_for_all_pending_works(timeout_s=60)
    deadline = time.monotonic() + 60
    work_registry.sweep()
    while in_flight() and time.monotonic() < deadline:  # the thread that completed the last one lets go of it later
        time.sleep(1e-3)
        work_registry.sweep()
    assert in_flight() == []
    assert registry_size() == 0
    assert work_registry.counts().unwaited - before == 50


def test_the_sweep_reaches_forgotten_works_while_others_come_and_go(device: torch.device) -> None:
    forgotten = [torch.zeros(4, device=device) for _ in range(50)]
    for tensor in forgotten:
        issue(tensor, "forgotten")[0].finish()
    del tensor
    assert len(in_flight()) == 50
    forgotten.clear()
    for _ in range(100):
        completion, work = issue(torch.zeros(4, device=device))
        completion.finish()
        work.wait()
    assert in_flight() == []
    assert registry_size() == 0


@waits
@pytest.mark.parametrize("late", [False, True])
def test_one_wait_ends_a_work_with_many_outputs(wait: Callable[..., Any], late: bool, device: torch.device) -> None:
    outputs = [torch.zeros(2, device=device) for _ in range(5)]
    outputs.append(outputs[0][1:])
    completion, work = issue(outputs[0])
    for output in outputs[1:]:
        hi.register_work(output, work)
    assert registry_size() == 6
    timer = threading.Timer(0.1 if late else 0, completion.finish)
    timer.start()
    if not late:
        timer.join()
    before = work_registry.counts().waited_by_tensor
    wait(outputs[-1])
    assert completion.completed
    assert in_flight() == []
    assert registry_size() == 0
    assert work_registry.counts().waited_by_tensor - before == 1
    clean_up_own_part()  # of other tests
    assert len(work_registry._registry._storages) == 0
    timer.join()


def test_forgotten_works_go_at_the_end_of_a_context(device: torch.device) -> None:
    tensors = [torch.zeros(4, device=device) for _ in range(4)]
    for tensor in tensors:
        issue(tensor)[0].finish()
    del tensor
    tensors.clear()
    assert len(in_flight()) == 4
    with hi.allow_inflight_collective_as_graph_input():
        pass
    assert in_flight() == []
    assert registry_size() == 0


def test_the_registry_keeps_nothing_about_storages_that_went(device: torch.device) -> None:
    tensor = torch.zeros(3, device=device)
    for _ in range(1000):
        completion, work = issue(tensor)
        completion.finish()
        work.wait()
    assert len(work_registry._registry._storages) == 0


# ------------------------------------------------------------------------------------------------ modes


def test_a_dispatch_mode_sees_nothing_of_the_registry(device: torch.device) -> None:
    seen: list[str] = []

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    tensor = torch.zeros(3, device=device)
    with Log():  # type: ignore[no-untyped-call]  # torch's own
        completion, work = issue(tensor)
        completion.finish()
        work.wait()
    assert seen == []
    assert registry_size() == 0


def test_a_work_is_waited_under_fake_tensors(device: torch.device) -> None:
    tensor = torch.zeros(3, device=device)
    completion, work = issue(tensor)
    completion.finish()
    with FakeTensorMode():
        work.wait()
    assert registry_size() == 0
    with FakeTensorMode():
        completion, work = issue(tensor)
    completion.finish()
    hi.wait_tensor(tensor)
    assert registry_size() == 0


def test_the_context_is_a_decorator_too() -> None:
    @hi.allow_inflight_collective_as_graph_input()
    def allowed(depth: int) -> bool:
        return compat.inflight_allowed() and (depth == 0 or allowed(depth - 1))

    assert allowed(3)
    assert not compat.inflight_allowed()
