"""The forms in which c10d passes arguments: options objects, lists of lists, and the short forms of older calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hpc_inflight import _torch_compat as compat
from hpc_inflight.communicators.base import Reduction
from hpc_inflight.errors import InvalidArgumentError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Sequence


def options(opts: Any) -> Any:
    """Return the options if that is what the argument is: c10d's short forms put an operator or a root there."""
    return opts if hasattr(opts, "timeout") else None


def is_async(opts: Any) -> bool:
    """Say whether the caller wants a work; whoever does not say it waits on the work."""
    return bool(getattr(opts, "asyncOp", True))


def reduction(opts: Any) -> Reduction:
    """Return the operator of an options object, or of the operator itself; SUM without one."""
    try:
        op = opts.reduceOp
    except AttributeError:
        if opts is None:
            return _REDUCTIONS["SUM"]
        op = opts
    known = _BY_HASH.get(hash(op))
    if known is not None:
        return known
    name = compat.reduce_op_name(op)
    return _REDUCTIONS.get(name) or Reduction(name, compat.premul_factor(op))


_REDUCTIONS = {n: Reduction(n) for n in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")}
_BY_HASH = {number: _REDUCTIONS[name] for number, name in compat.REDUCE_OP_HASHES.items()}


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that has the memory: of an AsyncCollectiveTensor, what it waits for.

    Raises:
        UnsupportedError: Another wrapper (a DTensor, a fake tensor), which has no memory of its own.
    """
    if type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter:
        return tensor
    wait = getattr(tensor, "trigger_wait", None)
    if wait is not None:
        waited: torch.Tensor = wait()
        return waited
    if hasattr(tensor, "__tensor_flatten__") or hasattr(tensor, "fake_mode"):
        name = type(tensor).__name__
        msg = f"a collective was given a {name}, which has no memory of its own; pass its local tensor (to_local())"
        raise UnsupportedError(msg)
    return tensor


def plain_all(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return `plain` of each."""
    return [plain(tensor) for tensor in tensors]


def single(call: str, tensors: Any) -> Sequence[torch.Tensor]:
    """Return the one tensor of c10d's list form, or of its short form."""
    if type(tensors) is list and len(tensors) == 1 and type(tensors[0]) is torch.Tensor:
        return tensors  # the frequent case
    if isinstance(tensors, torch.Tensor):
        return (plain(tensors),)
    if len(tensors) != 1:
        msg = f"{call}: expected one tensor per rank, found a list of {len(tensors)}; issue one call for each"
        raise InvalidArgumentError(msg)
    return (plain(tensors[0]),)


def per_rank(tensors: Any) -> Sequence[torch.Tensor]:
    """Return the list of tensors, one per rank, of c10d's list-of-lists form or of its short form."""
    if not tensors:
        return ()
    return plain_all(tensors if isinstance(tensors[0], torch.Tensor) else tensors[0])
