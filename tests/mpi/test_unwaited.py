"""Contexts that contain their waits say what was not waited; the others leave that to the end of the program."""

from __future__ import annotations

import threading
import warnings

import pytest
import torch
import torch.distributed as dist

import hpc_inflight as hi
from hpc_inflight import work_registry
from hpc_inflight.work import Completion, Work

allow = hi.allow_inflight_collective_as_graph_input


def issue(tensor: torch.Tensor) -> None:
    dist.all_reduce(tensor, async_op=True)


def test_a_context_that_raises_names_what_was_not_waited(rank: int, size: int) -> None:
    waited, forgotten = torch.ones(3), torch.ones(5)
    with pytest.raises(hi.UnwaitedError, match=r"2 registered .*2 x all_reduce .*shape \(5,\)") as caught:  # noqa: PT012, SIM117  # on leaving
        with allow("raise"):
            issue(waited)
            hi.wait_tensor(waited)
            issue(forgotten)
            issue(forgotten)
    assert f"rank {rank} of {size}: " in str(caught.value)
    hi.wait_tensor(forgotten)  # it can still be waited
    assert forgotten.unique().item() == float(size**2)


def test_a_context_that_warns(rank: int, size: int) -> None:
    tensor = torch.ones(3)
    with pytest.warns(hi.UnwaitedWarning, match="1 registered collective was never waited for"), allow("warn"):
        issue(tensor)
    hi.wait_tensor(tensor)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with allow("ignore"):
            issue(tensor)
        hi.wait_tensor(tensor)


def test_lost_works_are_reported_by_the_context_that_issued_them(rank: int, size: int) -> None:
    def end(completion: Completion) -> None:
        completion.finish()
        work_registry.sweep()

    with allow("raise"):
        tensor, completion = torch.ones(3), Completion("earlier", "group", 1, 10.0)
        hi.register_work(tensor, Work(completion, ()))
        completion.finish()
        hi.wait_tensor(tensor)
    # lost inside a context, but registered by another thread, or before it
    other = Completion("other", "group", 1, 10.0)
    thread = threading.Thread(target=lambda: hi.register_work(torch.ones(3), Work(other, ())))
    before = Completion("before", "group", 1, 10.0)
    hi.register_work(torch.ones(3), Work(before, ()))
    with allow("raise"):
        thread.start()
        thread.join()
        end(other)
        end(before)
    with pytest.raises(hi.UnwaitedError, match="1 x mine on group"), allow("raise"):  # noqa: PT012  # on leaving
        mine = Completion("mine", "group", 1, 10.0)
        hi.register_work(torch.ones(3), Work(mine, ()))
        end(mine)


def test_nested_contexts_report_their_own(rank: int, size: int) -> None:
    inner, outer = torch.ones(2), torch.ones(3)
    with pytest.raises(hi.UnwaitedError, match=r"^rank \d+ of \d+: 1 .*shape \(3,\)"):  # noqa: PT012, SIM117  # on leaving
        with allow("raise"):
            with pytest.raises(hi.UnwaitedError, match=r"^rank \d+ of \d+: 1 .*shape \(2,\)"), allow("raise"):
                issue(inner)
            issue(outer)
            with allow():
                hi.wait_tensor(inner)
    hi.wait_tensor(outer)


def test_an_exception_is_not_replaced_by_the_report(rank: int, size: int) -> None:
    tensor = torch.ones(2)
    with pytest.raises(KeyError, match="mine"), allow("raise"):  # noqa: PT012  # on leaving
        issue(tensor)
        raise KeyError("mine")
    hi.wait_tensor(tensor)


def test_a_wrong_policy(rank: int, size: int) -> None:
    with pytest.raises(hi.InvalidArgumentError, match="on_unwaited: expected one of 'warn', 'raise', 'ignore'"):
        allow("loud")


def test_one_context_used_again_and_as_a_decorator(rank: int, size: int) -> None:
    @allow("raise")
    def forget(tensor: torch.Tensor) -> None:
        issue(tensor)

    for _ in range(2):
        tensor = torch.ones(2)
        with pytest.raises(hi.UnwaitedError, match="1 registered"):
            forget(tensor)
        hi.wait_tensor(tensor)
    context = allow("raise")
    for _ in range(2):
        with context:
            issue(tensor)
            hi.wait_tensor(tensor)
