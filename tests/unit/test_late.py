"""Which device the in-flight tests use, and what makes their data late."""

from __future__ import annotations

import time

import pytest
import torch

from hpc_inflight.testing.late import DEVICE_VARIABLE, Late, requested_device_type


def test_the_device_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DEVICE_VARIABLE, raising=False)
    assert requested_device_type() == "cpu"
    monkeypatch.setenv(DEVICE_VARIABLE, "cuda")
    assert requested_device_type() == "cuda"
    monkeypatch.setenv(DEVICE_VARIABLE, "gpu")
    with pytest.raises(ValueError, match="HPC_INFLIGHT_TEST_DEVICE=gpu: expected cpu or cuda"):
        requested_device_type()


def test_only_the_rank_in_question_is_held_up(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    late = Late(torch.device("cpu"), rank=1, seconds=0.5)
    late.hold_up()
    late.hold_up(2)
    assert slept == []
    late.hold_up(1)
    assert slept == [0.5]
    assert late.arrived(torch.empty(2, 3)).tolist() == [[10.0] * 3, [11.0] * 3]
