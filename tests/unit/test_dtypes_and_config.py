from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from hpc_inflight import config as config_module
from hpc_inflight.dtypes import reduce_spec
from hpc_inflight.errors import InvalidArgumentError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterator


def test_half_precision_computes_in_float32() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        spec = reduce_spec("all_reduce", "AVG", dtype)
        assert (spec.mpi_type, spec.mpi_op, spec.compute_dtype, spec.average) == ("FLOAT", "SUM", torch.float32, True)


def test_bool_is_a_truth_value() -> None:
    assert reduce_spec("all_reduce", "SUM", torch.bool).mpi_op == "LOR"
    assert reduce_spec("all_reduce", "PRODUCT", torch.bool).mpi_op == "LAND"
    assert reduce_spec("all_reduce", "BXOR", torch.bool).mpi_op == "LXOR"


@pytest.mark.parametrize(
    ("op", "dtype"),
    [
        ("MAX", torch.complex64),
        ("AVG", torch.int32),
        ("BAND", torch.float32),
        ("AVG", torch.bool),
        ("PREMUL_SUM", torch.int64),
        ("SUM", torch.float8_e4m3fn),
    ],
)
def test_undefined_reductions(op: str, dtype: torch.dtype) -> None:
    with pytest.raises(UnsupportedError, match=r"^all_reduce: .*; expected one of "):
        reduce_spec("all_reduce", op, dtype)


@pytest.fixture
def _fresh_config() -> Iterator[None]:
    config_module.config.cache_clear()
    yield
    config_module.config.cache_clear()


@pytest.mark.usefixtures("_fresh_config")
def test_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPC_INFLIGHT_MAX_PENDING", "7")
    monkeypatch.setenv("HPC_INFLIGHT_EXIT_TIMEOUT_S", "0.5")
    assert config_module.config() == config_module.Config(max_pending=7, exit_timeout_s=0.5)


@pytest.mark.usefixtures("_fresh_config")
@pytest.mark.parametrize("text", ["0", "-3", "many", ""])
def test_config_refuses(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("HPC_INFLIGHT_MAX_PENDING", text)
    with pytest.raises(InvalidArgumentError, match="HPC_INFLIGHT_MAX_PENDING: expected a positive int, found"):
        config_module.config()
