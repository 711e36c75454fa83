"""When one message of an exchange fails, MPI still owns the memory of the others."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from hpc_inflight import _mpi
from hpc_inflight.communicators._mpi_exchange import exchange


class Request:
    """In flight until told otherwise; may fail when it is tested."""

    def __init__(self) -> None:
        self.done = False
        self.fails = False

    def Test(self) -> bool:
        if self.fails:
            raise _mpi.mpi().Exception(_mpi.mpi().ERR_TRUNCATE)
        return self.done


class Comm:
    """Rank 0 of 2, whose sends fail."""

    rank = 0

    def __init__(self, request: Request) -> None:
        self.request = request

    def Irecv(self, *_: Any) -> Request:
        return self.request

    def Isend(self, *_: Any) -> Request:
        raise ValueError("no route")


@pytest.mark.parametrize("fails_later", [False, True])
def test_a_failed_exchange_keeps_what_mpi_may_write_to(fails_later: bool) -> None:
    request, tensor = Request(), torch.zeros(3)
    alive = weakref.ref(tensor)
    with pytest.raises(ValueError, match="no route"):
        exchange(Comm(request), 7, {1: torch.ones(3)}, {1: tensor})  # type: ignore[arg-type]  # stands in for MPI's
    del tensor
    gc.collect()
    assert alive() is not None
    request.fails, request.done = fails_later, True
    other = Request()
    _mpi.abandon(other)  # looks at what was given up before, and is not stopped by what failed there
    assert alive() is None
    other.done = True
