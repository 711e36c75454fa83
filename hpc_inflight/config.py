"""Settings that come from the environment, read once, when they are first needed."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass

from hpc_inflight.errors import InvalidArgumentError


@dataclass(frozen=True)
class Config:
    """What the environment sets.

    Attributes:
        max_pending: Works a group may have enqueued before issuing another one waits for the oldest
            (``HPC_INFLIGHT_MAX_PENDING``). Bounds memory when the host runs ahead of the network.
        exit_timeout_s: Seconds that the interpreter's exit waits for pending works and for the other
            ranks before it goes on without them (``HPC_INFLIGHT_EXIT_TIMEOUT_S``).
        max_count: Elements that one MPI call counts; larger tensors go in parts or under larger types
            (``HPC_INFLIGHT_MAX_COUNT``; lower it only to test that).
        debug: Compare the ranks' calls before each collective (``HPC_INFLIGHT_DEBUG=1``, or
            ``TORCH_DISTRIBUTED_DEBUG=DETAIL``).
    """

    max_pending: int = 1024
    exit_timeout_s: float = 10.0
    max_count: int = 2**31 - 1
    debug: bool = False


def _positive(name: str, default: float, kind: type) -> float:
    text = os.environ.get(name)
    if text is None:
        return default
    try:
        value = kind(text)
    except ValueError:
        value = 0
    if value <= 0:
        msg = f"{name}: expected a positive {kind.__name__}, found {text!r}; unset it or correct it"
        raise InvalidArgumentError(msg)
    return float(value)


@functools.cache
def config() -> Config:
    """Return the settings of this process.

    **Local:** any rank, any time; the environment is read at the first call.

    Raises:
        InvalidArgumentError: A variable holds something other than a positive number.
    """
    return Config(
        max_pending=int(_positive("HPC_INFLIGHT_MAX_PENDING", Config.max_pending, int)),
        exit_timeout_s=_positive("HPC_INFLIGHT_EXIT_TIMEOUT_S", Config.exit_timeout_s, float),
        max_count=int(_positive("HPC_INFLIGHT_MAX_COUNT", Config.max_count, int)),
        debug=os.environ.get("HPC_INFLIGHT_DEBUG", "0") not in {"", "0"}
        or os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL",
    )
