"""Data that really arrives late, on whichever device the tests run, so that a missed wait is a wrong number."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist

from hpc_inflight import _torch_compat

DEVICE_VARIABLE = "HPC_INFLIGHT_TEST_DEVICE"
"""Environment variable with the type of device that in-flight tests put their tensors on: ``cpu`` or ``cuda``."""


def requested_device_type() -> str:
    """Return what `DEVICE_VARIABLE` asks for, ``"cpu"`` if it is not set.

    Raises:
        ValueError: It is neither ``cpu`` nor ``cuda``.
    """
    found = os.environ.get(DEVICE_VARIABLE) or "cpu"
    if found not in {"cpu", "cuda"}:
        msg = f"{DEVICE_VARIABLE}={found}: expected cpu or cuda; set one of them, or leave it out for cpu"
        raise ValueError(msg)
    return found


class Late:
    """Holds one rank up, so that what it sends next arrives late on the others.

    A CPU rank sleeps before it issues. A CUDA rank starts a long kernel on the current stream, behind which the
    collective has to queue, and its host goes on at once.

    Attributes:
        device: Where the tensors of the tests are.
        rank: This rank.
        seconds: How late the data is: by default far longer than a call of a compiled region takes.
    """

    def __init__(self, device: torch.device, rank: int, seconds: float | None = None) -> None:
        if seconds is None:
            seconds = 0.3 if device.type == "cuda" else 0.1
        self.device = device
        self.rank = rank
        self.seconds = seconds
        self._cycles = _torch_compat.cuda_cycles_per_s(device) * seconds if device.type == "cuda" else 0.0

    def hold_up(self, rank: int = 0) -> None:
        """Make what ``rank`` issues next late; on the others it does nothing.

        **Local:** any rank.
        """
        if self.rank != rank:
            return
        if self.device.type == "cuda":
            _torch_compat.cuda_sleep(self.device, self._cycles)
        else:
            time.sleep(self.seconds)

    def all_to_all(self, output: torch.Tensor, base: float = 10.0) -> Any:
        """Issue an all-to-all whose data from rank 0 is late, and return the Work.

        **Collective:** over the world. Row ``r`` of ``output`` becomes ``base + r`` on every rank.

        Args:
            output: Tensor whose first dimension is the size of the world.
            base: What rank 0 sends; rank r sends ``base + r``.
        """
        self.hold_up()
        sent = torch.full(output.shape, base + self.rank, dtype=output.dtype, device=output.device)
        return dist.all_to_all_single(output, sent, async_op=True)

    def arrived(self, output: torch.Tensor, base: float = 10.0) -> torch.Tensor:
        """Return what `all_to_all` leaves in a tensor like ``output``.

        **Local:** any rank.
        """
        rows = base + torch.arange(output.shape[0], dtype=output.dtype, device=output.device)
        return rows.view(-1, *[1] * (output.dim() - 1)).expand_as(output).contiguous()
