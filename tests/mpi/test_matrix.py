"""Every collective by dtype, operator, layout and group, synchronous and not, on whatever number of ranks runs it.

A collective is one short function in `MOVES` or `REDUCES`. It says what this rank passes and what it must find
afterwards; a `Call` makes the tensors for that in the asked-for dtype and layout, issues, waits, and compares. Expected
values are formulas of rank, place and size, computed here from every rank's input and never exchanged:

- data that only moves, and reductions of integers and truth values, are compared bit for bit;
- reductions of floats with the same sum in float64 (complex128), within the bound stated at `reduction`;
- inputs must be unchanged, and so must every byte of memory around an output.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import hpc_inflight as hi
from hpc_inflight.testing import gather_on_all_ranks

FP8 = tuple(
    d for name in dir(torch) if name.startswith("float8_") and isinstance(d := getattr(torch, name), torch.dtype)
)
HALVES = (torch.float16, torch.bfloat16)
FLOATS = (torch.float64, torch.float32, *HALVES)
COMPLEX = (torch.complex64, torch.complex128)
SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)
INTS = (*SIGNED, torch.uint8, torch.uint16, torch.uint32, torch.uint64)
ORDERED = (*FLOATS, *INTS, torch.bool)
DTYPES = (*ORDERED, *COMPLEX, *FP8)

PREMUL, PREMUL_TENSOR = "PREMUL_SUM", "PREMUL_SUM by a tensor"
DEFINED: dict[str, tuple[torch.dtype, ...]] = {
    "SUM": (*ORDERED, *COMPLEX),
    "AVG": (*FLOATS, *COMPLEX),
    "PRODUCT": ORDERED,
    "MIN": ORDERED,
    "MAX": ORDERED,
    "BAND": (*INTS, torch.bool),
    "BOR": (*INTS, torch.bool),
    "BXOR": (*INTS, torch.bool),
    PREMUL: (*FLOATS, *COMPLEX),
    PREMUL_TENSOR: (*FLOATS, *COMPLEX),
}
# What tests/gpu sets on a copy of this module of its own:
DEVICE = torch.device("cpu")
STEPWISE = False  # half precision is rounded after every addition, not once
THIN = 1  # perform one in so many combinations, where each takes long
MISSING: set[str] = set()  # collectives that the backend does not have

WIDTH = 12  # elements in a row of most layouts
CHECKED: set[tuple[str, torch.dtype, str, str, str, bool]] = set()  # collective, dtype, operator, layout, group, async
LEAST_CHECKED = 5800


# memory ---------------------------------------------------------------------------------------------------------

Window = Callable[[torch.Tensor], torch.Tensor]
# name -> for n rows, the shape of the memory and the window on it that is handed over; dimension 0 counts the rows
LAYOUTS: dict[str, Callable[[int], tuple[tuple[int, ...], Window]]] = {
    "contiguous": lambda n: ((n, WIDTH), lambda m: m),
    "offset": lambda n: ((n * WIDTH + 5,), lambda m: m[3:-2].view(n, WIDTH)),
    "transposed": lambda n: ((WIDTH, n), lambda m: m.t()),
    "strided": lambda n: ((2 * n, 2 * WIDTH + 1), lambda m: m[::2, 1::2]),
    "channels_last": lambda n: ((n, 2, 2, 3), lambda m: m.permute(0, 3, 1, 2)),
    "0-dim": lambda n: ((n + 2,), lambda m: m[1] if n == 1 else m[1:-1]),  # several rows of one element: 1-d
    "numel 0": lambda n: ((4,), lambda m: m[2:2].view(n, 0)),
    "leaf": lambda n: ((n, WIDTH), lambda m: m.requires_grad_() if m.is_floating_point() or m.is_complex() else m),
    "inference": lambda n: ((n, WIDTH), lambda m: m),
    "conj": lambda n: ((n, WIDTH), lambda m: m.conj()),
    "neg": lambda n: ((n, WIDTH), torch._neg_view),
    "expanded": lambda n: ((n, 1), lambda m: m.expand(n, WIDTH)),  # inputs only
}
LAYOUT_DTYPES: dict[str, tuple[torch.dtype, ...]] = {  # where a layout is not for every dtype
    "leaf": (*FLOATS, *COMPLEX),
    "conj": COMPLEX,
    "neg": (*FLOATS, *COMPLEX, *SIGNED),
}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of the values, in order."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8).cpu()


@functools.cache
def outside(layout: str, rows: int) -> torch.Tensor:
    """Return which elements of the memory are not in the window."""
    shape, window = LAYOUTS[layout](rows)
    inside = torch.zeros(shape, dtype=torch.int8)
    window(inside).fill_(1)
    return inside.flatten() == 0


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values in float64, complex ones as two of them."""
    tensor = tensor.detach().flatten().cpu()
    return torch.view_as_real(tensor.to(torch.complex128).resolve_conj()) if tensor.is_complex() else tensor.double()


@dataclass
class Expected:
    """Values, and how far off they may be; without ``bound`` not at all."""

    values: torch.Tensor
    bound: torch.Tensor | None = None


@dataclass
class Box:
    """A tensor that is handed over, the memory it lies in, and what must be there afterwards (None: the same)."""

    tensor: torch.Tensor
    memory: torch.Tensor
    outside: torch.Tensor
    expected: Expected | None
    before: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.before = bits(self.memory).clone()

    def check(self, what: str) -> None:
        now = bits(self.memory)
        if self.expected is None:
            assert torch.equal(now, self.before), f"{what}: wrote to an input"
            return
        written = (now != self.before).view(self.memory.numel(), self.memory.element_size()).any(1)
        assert not (written & self.outside).any(), f"{what}: wrote beside the output"
        values, bound = self.expected.values, self.expected.bound
        if bound is None:
            wrong = (bits(self.tensor) != bits(values)).view(values.numel(), values.element_size())
        else:
            wrong = ~((wide(self.tensor) - wide(values)).abs() <= bound).view(values.numel(), 1 + values.is_complex())
        if wrong.any():
            place = int(wrong.any(1).nonzero()[0])
            found = self.tensor.cpu().flatten()[place].item()
            pytest.fail(f"{what}: expected {values.flatten()[place].item()} at place {place}, found {found}")


# values ---------------------------------------------------------------------------------------------------------


@functools.cache
def pattern(dtype: torch.dtype, numel: int, sender: int, receiver: int) -> torch.Tensor:
    """Return what ``sender`` sends to ``receiver``: bytes of every value."""
    raw = (torch.arange(numel * dtype.itemsize) * 167 + 59 * sender + 83 * receiver + 7).remainder(256).to(torch.uint8)
    if dtype is torch.bool:
        return raw.bitwise_and(8).ne(0)
    if dtype in FLOATS or dtype in COMPLEX:  # finite, as negation and conjugation may touch the bits of a NaN
        part = dtype.itemsize // 2 if dtype.is_complex else dtype.itemsize
        raw.view(-1, part)[:, -1] &= 0xBF
    return raw.view(dtype)


@functools.cache
def summand(dtype: torch.dtype, op: str, numel: int, rank: int) -> torch.Tensor:
    """Return a rank's input to a reduction, chosen so that rounding, signs and the top bit all matter."""
    if dtype in FLOATS or dtype in COMPLEX:
        places = torch.arange(numel, dtype=torch.float64)
        real = ((places * 7919 + rank * 104729 + 31).remainder(1009) - 504) / 97
        imag = ((places * 5077 + rank * 13007 + 11).remainder(1013) - 506) / 89
        return (torch.complex(real, imag) if dtype.is_complex else real).to(dtype)
    return from_ints(dtype, integers(dtype, op, numel, rank))


def integers(dtype: torch.dtype, op: str, numel: int, rank: int) -> list[int]:
    """Return values over the whole width of the dtype; for sums and products, a quarter, so that four ranks' fit."""
    if dtype is torch.bool:
        return [(place >> rank) & 1 for place in range(numel)]  # all combinations of the ranks' truth values
    mixed = [(place * 7 + rank * 13) * 0x9E3779B97F4A7C15 >> 7 for place in range(numel)]
    width = 8 * dtype.itemsize
    limit = 2 ** {"SUM": width - 2, "PRODUCT": width // 4}.get(op, width)
    if dtype in SIGNED:
        return [m % (limit - 1) - (limit // 2 - 1) for m in mixed]
    return [m % limit for m in mixed]


def from_ints(dtype: torch.dtype, values: Sequence[int]) -> torch.Tensor:
    if dtype is torch.bool:
        return torch.tensor(values, dtype=torch.bool)
    half = 2 ** (8 * dtype.itemsize - 1)  # as two's complement: every torch takes that
    signed = next(d for d in SIGNED if d.itemsize == dtype.itemsize)
    return torch.tensor([(v + half) % (2 * half) - half for v in values], dtype=signed).view(dtype)


Combine = Callable[[Any, Any], Any]
ANY, ALL, ODD = operator.or_, operator.and_, operator.xor
OF_BOOL: dict[str, Combine] = {"SUM": ANY, "MAX": ANY, "BOR": ANY, "PRODUCT": ALL, "MIN": ALL, "BAND": ALL, "BXOR": ODD}
OF_INTS: dict[str, Combine] = {
    "SUM": operator.add,
    "PRODUCT": operator.mul,
    "MIN": min,
    "MAX": max,
    "BAND": operator.and_,
    "BOR": operator.or_,
    "BXOR": operator.xor,
}


@functools.cache
def reduction(dtype: torch.dtype, op: str, numel: int, size: int) -> Expected:
    """Return the result of a reduction.

    The bound for floats, with u = 2**-24 (2**-53 for float64 and complex128), is ``roundings * u * sum|x|``: each of
    the size - 1 additions, and the division of AVG or the two roundings of PREMUL_SUM (the factor, the product),
    is off by at most u times what it adds up to. A product is off by u times itself per factor. Half precision adds
    0.5 ulp of the half type at the reference: computed in float32, rounded once. MIN and MAX are exact.
    """
    if dtype not in FLOATS and dtype not in COMPLEX:
        function = (OF_BOOL if dtype is torch.bool else OF_INTS)[op]
        columns = zip(*(integers(dtype, op, numel, rank) for rank in range(size)), strict=True)
        return Expected(from_ints(dtype, [functools.reduce(function, column) for column in columns]))
    exact = torch.complex128 if dtype.is_complex else torch.float64
    parts = torch.stack([summand(dtype, op, numel, rank).to(exact) for rank in range(size)])
    if op in {"MIN", "MAX"}:
        return Expected((parts.amin(0) if op == "MIN" else parts.amax(0)).to(dtype))
    roundings = size
    if op in FACTORS:
        parts, roundings = parts * float(FACTORS[op](dtype)), size + 2
    value, magnitude = parts.sum(0), torch.stack([wide(part).abs() for part in parts]).sum(0)
    if op == "AVG":
        value, magnitude, roundings = value / size, magnitude / size, size + 1
    elif op == "PRODUCT":
        value = parts.prod(0)
        magnitude = value.abs()
    if STEPWISE and dtype in HALVES:  # AVG and PREMUL_SUM round their factor and each product as well
        return Expected(value, (roundings + 2) * torch.finfo(dtype).eps / 2 * magnitude + ulp(dtype, value))
    if dtype in {torch.float64, torch.complex128}:
        bound = 2 * roundings * 2.0**-53 * magnitude  # twice: the reference rounds as well
    else:
        bound = roundings * 2.0**-24 * magnitude
    return Expected(value, bound + 0.5 * ulp(dtype, value) if dtype in HALVES else bound)


def ulp(dtype: torch.dtype, values: torch.Tensor) -> torch.Tensor:
    info = torch.finfo(dtype)
    spacing = torch.ldexp(torch.full_like(values, info.eps), torch.frexp(values).exponent - 1)
    return spacing.where(values != 0, 0.0).clamp_min(info.smallest_normal * info.eps)


def factor_tensor(dtype: torch.dtype) -> torch.Tensor:
    """Return the factor in the tensor's own precision, as NCCL wants it."""
    own = dtype.to_real() if dtype in COMPLEX else dtype
    return torch.tensor(0.3, dtype=own if own in FLOATS else torch.float32)


FACTORS: dict[str, Callable[[torch.dtype], Any]] = {PREMUL: lambda _: 0.3, PREMUL_TENSOR: factor_tensor}


# one call -------------------------------------------------------------------------------------------------------


@dataclass
class Team:
    """A group as this rank sees it; ``members`` are world ranks in the group's order."""

    name: str
    group: Any = field(repr=False)
    rank: int = field(repr=False)
    members: list[int]

    @property
    def size(self) -> int:
        return len(self.members)

    def seq(self) -> int:
        return int(self.group._get_sequence_number_for_group())


@dataclass
class Call:
    """One combination: makes the tensors, issues, and compares."""

    name: str
    team: Team
    dtype: torch.dtype
    is_async: bool
    layout: str = "contiguous"
    op: str = "-"
    turn: int = 0  # decides the root
    rows: int = 2
    laid_out: str = "inputs and outputs"
    boxes: list[Box] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        self.rank, self.size, self.group = self.team.rank, self.team.size, self.team.group
        self.ranks = range(self.size)
        self.root = self.turn % self.size
        self.peer = self.team.members  # c10d's functions take world ranks
        self.next, self.previous = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        self.width = {"0-dim": 1, "numel 0": 0}.get(self.layout, WIDTH)
        self.defined = self.op == "-" or self.dtype in DEFINED[self.op]
        # c10d's functions refuse to view_as_real a conjugated tensor and complex operators that they do not know;
        # the process group's own methods, which their other users call, have to cope with both
        self.bypass = self.layout == "conj" or (not self.defined and self.dtype in COMPLEX)

    # tensors

    def box(self, values: torch.Tensor | None, expected: Expected | None, rows: int) -> torch.Tensor:
        """Hand out a tensor that holds ``values``, or what no rank sends; it must hold ``expected`` afterwards."""
        used = self.layout if ("inputs" if expected is None else "outputs") in self.laid_out else "contiguous"
        if used == "expanded" and expected is not None:
            used = "contiguous"
        shape, window = LAYOUTS[used](rows)
        with torch.inference_mode() if used == "inference" else torch.no_grad():
            memory = pattern(self.dtype, math.prod(shape), 9, 9).to(DEVICE, copy=True).view(shape)
            tensor = window(memory)
            if values is not None and used == "expanded":
                memory.copy_(values.view(rows, WIDTH)[:, :1])
            elif values is not None:
                tensor.copy_(values.view(tensor.shape))
        self.boxes.append(Box(tensor, memory, outside(used, rows), expected))
        return tensor

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values with every row constant, if that is how the inputs are made."""
        if self.layout != "expanded":
            return values
        return (
            values.view(-1, WIDTH, *values.shape[1:])[:, :1].expand(-1, WIDTH, *values.shape[1:]).reshape(values.shape)
        )

    def sent(self, *parts: tuple[int, int, int]) -> torch.Tensor:
        """Return parts of (rows, sender, receiver), one behind the other."""
        return self.spread(torch.cat([pattern(self.dtype, n * self.width, s, r) for n, s, r in parts]))

    def give(self, *parts: tuple[int, int, int]) -> torch.Tensor:
        return self.box(self.sent(*parts), None, sum(part[0] for part in parts))

    def take(self, *parts: tuple[int, int, int]) -> torch.Tensor:
        return self.box(None, Expected(self.sent(*parts)), sum(part[0] for part in parts))

    def places(self, values: torch.Tensor, first: int, rows: int) -> torch.Tensor:
        return self.spread(values)[first * self.width : (first + rows) * self.width]

    def own(self, first: int, rows: int) -> torch.Tensor:
        """Return rows of this rank's summand; of an undefined reduction some pattern."""
        numel = self.size * self.rows * WIDTH
        made = (
            summand(self.dtype, self.op, numel, self.rank) if self.defined else pattern(self.dtype, numel, self.rank, 0)
        )
        return self.places(made, first, rows)

    def result(self, first: int, rows: int) -> Expected | None:
        """Return rows of the reduction; an undefined one leaves everything as it was."""
        if not self.defined:
            return None
        whole = reduction(self.dtype, self.op, self.size * self.rows * WIDTH, self.size)
        bound = None if whole.bound is None else self.places(whole.bound, first, rows)
        return Expected(self.places(whole.values, first, rows), bound)

    def addend(self, first: int, rows: int) -> torch.Tensor:
        return self.box(self.own(first, rows), None, rows)

    def total(self, first: int, rows: int) -> torch.Tensor:
        return self.box(None, self.result(first, rows), rows)

    def in_place(self, first: int, rows: int) -> torch.Tensor:
        return self.box(self.own(first, rows), self.result(first, rows), rows)

    # issuing

    @functools.cached_property
    def reduce_op(self) -> Any:
        if self.op in FACTORS:
            return dist._make_nccl_premul_sum(FACTORS[self.op](self.dtype))  # type: ignore[attr-defined]
        return getattr(dist.ReduceOp, self.op)

    def options(self, kind: str, **values: Any) -> Any:
        made = getattr(c10d, kind)()
        for name, value in {"asyncOp": self.is_async, **values}.items():
            setattr(made, name, value)
        return made

    def issue(self, function: Callable[..., Any], *args: Any, **keywords: Any) -> None:
        """Call a function of c10d, or the method of the process group behind it, and wait."""
        if self.bypass and function in METHODS:
            done(METHODS[function](self, *args, **keywords))
            return
        work = function(*args, group=self.group, async_op=self.is_async, **keywords)
        assert (work is not None) == self.is_async
        if self.is_async:
            done(work)

    def coalesce(self, calls: Sequence[Callable[[], Any]], device: torch.device | None = None) -> None:
        with c10d._coalescing_manager(self.group, device, async_ops=self.is_async) as manager:
            for call in calls:
                call()
        if self.is_async:
            manager.wait()

    def perform(self) -> None:
        """Run it, look at every tensor, and count it."""
        if self.defined and zlib.crc32(str(self).encode()) % THIN:
            return
        {**MOVES, **REDUCES}[self.name](self)
        self.check()

    def check(self) -> None:
        for box in self.boxes:
            box.check(str(self))
        CHECKED.add((self.name, self.dtype, self.op, self.layout, self.team.name, self.is_async))


def done(*works: Any) -> None:
    for work in works:
        assert work.wait() is True


METHODS: dict[Callable[..., Any], Callable[..., Any]] = {
    dist.all_reduce: lambda c, t, op: c.group.allreduce([t], c.options("AllreduceOptions", reduceOp=op)),
    dist.broadcast: lambda c, t, **_src: c.group.broadcast([t], c.options("BroadcastOptions", rootRank=c.root)),
    dist.all_gather: lambda c, out, t: c.group.allgather([out], [t], c.options("AllgatherOptions")),
    dist.all_gather_into_tensor: lambda c, out, t: c.group._allgather_base(out, t, c.options("AllgatherOptions")),
    dist.scatter: lambda c, out, t, **_src: c.group.scatter(
        [out], [t] if t else [], c.options("ScatterOptions", rootRank=c.root)
    ),
    dist.all_to_all: lambda c, out, t: c.group.alltoall(out, t, c.options("AllToAllOptions")),
    dist.all_to_all_single: lambda c, out, t, out_splits=(), splits=(): c.group.alltoall_base(
        out, t, list(out_splits), list(splits), c.options("AllToAllOptions")
    ),
}


# collectives that move data -------------------------------------------------------------------------------------


def broadcast(c: Call) -> None:
    part = (2, c.root, 0)
    c.issue(dist.broadcast, c.give(part) if c.rank == c.root else c.take(part), src=c.peer[c.root])


def all_gather(c: Call) -> None:
    c.issue(dist.all_gather, [c.take((1, sender, 0)) for sender in c.ranks], c.give((1, c.rank, 0)))


def all_gather_uneven(c: Call) -> None:  # 1, 2, 0, 1 rows
    c.issue(
        dist.all_gather,
        [c.take(((sender + 1) % 3, sender, 0)) for sender in c.ranks],
        c.give(((c.rank + 1) % 3, c.rank, 0)),
    )


def all_gather_into_tensor(c: Call) -> None:
    c.issue(dist.all_gather_into_tensor, c.take(*((1, sender, 0) for sender in c.ranks)), c.give((1, c.rank, 0)))


def gather(c: Call) -> None:
    outputs = [c.take((1, sender, 0)) for sender in c.ranks] if c.rank == c.root else None
    c.issue(dist.gather, c.give((1, c.rank, 0)), outputs, dst=c.peer[c.root])


def scatter(c: Call) -> None:
    inputs = [c.give((1, c.root, to)) for to in c.ranks] if c.rank == c.root else None
    c.issue(dist.scatter, c.take((1, c.root, c.rank)), inputs, src=c.peer[c.root])


def all_to_all(c: Call) -> None:  # `sender` sends (sender + to) % 3 rows
    c.issue(
        dist.all_to_all,
        [c.take(((sender + c.rank) % 3, sender, c.rank)) for sender in c.ranks],
        [c.give(((c.rank + to) % 3, c.rank, to)) for to in c.ranks],
    )


def to_all(c: Call, rows: Callable[[int, int], int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and input of an exchange in which `sender` sends ``rows(sender, to)``."""
    return c.take(*((rows(sender, c.rank), sender, c.rank) for sender in c.ranks)), c.give(
        *((rows(c.rank, to), c.rank, to) for to in c.ranks)
    )


def all_to_all_single(c: Call) -> None:
    c.issue(dist.all_to_all_single, *to_all(c, lambda _sender, _to: 1))


def all_to_all_single_uneven(c: Call) -> None:
    splits = [(c.rank + to) % 3 for to in c.ranks]  # of what arrives and of what is sent, zero among them
    c.issue(dist.all_to_all_single, *to_all(c, lambda sender, to: (sender + to) % 3), splits, splits)


def coalesced_all_gather(c: Call) -> None:
    pairs = [(c.take(*((n, s, n) for s in c.ranks)), c.give((n, c.rank, n))) for n in (1, 2)]
    c.coalesce([functools.partial(dist.all_gather_into_tensor, out, t, c.group) for out, t in pairs])


def coalesced_on_a_device(c: Call) -> None:
    """Different collectives and point to point; the manager does that for a device only."""
    out, t = to_all(c, lambda _sender, _to: 1)
    part = (2, c.root, 0)
    root = c.give(part) if c.rank == c.root else c.take(part)
    c.coalesce(
        [
            lambda: dist.all_to_all_single(out, t, group=c.group),
            lambda: dist.broadcast(root, c.peer[c.root], c.group),
        ],
        DEVICE,
    )


def allgather_into_tensor_coalesced(c: Call) -> None:
    outputs = [c.take(*((n, s, n) for s in c.ranks)) for n in (1, 2)]
    inputs = [c.give((n, c.rank, n)) for n in (1, 2)]
    done(c.group.allgather_into_tensor_coalesced(outputs, inputs, c.options("AllgatherOptions")))


def allgather_coalesced(c: Call) -> None:
    outputs = [[c.take((n, s, n)) for n in (1, 2)] for s in c.ranks]
    inputs = [c.give((n, c.rank, n)) for n in (1, 2)]
    done(c.group.allgather_coalesced(outputs, inputs, c.options("AllgatherOptions")))


def ring(c: Call) -> tuple[torch.Tensor, torch.Tensor]:
    return c.give((2, c.rank, c.next)), c.take((2, c.previous, c.rank))


def send_recv(c: Call) -> None:
    out, into = ring(c)
    calls: list[Callable[[], Any]] = [
        lambda: dist.send(out, c.peer[c.next], c.group),
        lambda: dist.recv(into, c.peer[c.previous], c.group),
    ]
    if c.bypass:
        calls = [lambda: done(c.group.send([out], c.next, 0)), lambda: done(c.group.recv([into], c.previous, 0))]
    for call in calls if c.rank % 2 == 0 else reversed(calls):
        call()


def isend_irecv(c: Call) -> None:
    out, into = ring(c)
    if c.bypass:
        done(c.group.send([out], c.next, 3), c.group.recv([into], c.previous, 3))
        return
    done(dist.isend(out, c.peer[c.next], c.group, tag=3), dist.irecv(into, c.peer[c.previous], c.group, tag=3))


def recv_from_any(c: Call) -> None:
    out, into = ring(c)
    sending = c.group.send([out], c.next, 0) if c.bypass else dist.isend(out, c.peer[c.next], c.group)
    if c.bypass or c.is_async:
        work: Any = c.group.recv_anysource([into], 0) if c.bypass else dist.irecv(into, group=c.group)
        done(work)
        assert work._source_rank() == c.previous
    else:
        assert dist.recv(into, group=c.group) == c.peer[c.previous]
    done(sending)


def batch_isend_irecv(c: Call) -> None:
    out, into = ring(c)
    operations = [
        dist.P2POp(dist.irecv, into, c.peer[c.previous], c.group),
        dist.P2POp(dist.isend, out, c.peer[c.next], c.group),
    ]
    done(*dist.batch_isend_irecv(operations))


# collectives that reduce ----------------------------------------------------------------------------------------


def all_reduce(c: Call) -> None:
    c.issue(dist.all_reduce, c.in_place(0, c.rows), op=c.reduce_op)


def reduce(c: Call) -> None:
    tensor = c.in_place(0, c.rows) if c.rank == c.root else c.addend(0, c.rows)
    c.issue(dist.reduce, tensor, dst=c.peer[c.root], op=c.reduce_op)


def reduce_scatter(c: Call) -> None:  # the last rank gets no row, the others c.rows
    rows = [0 if to and to == c.size - 1 else c.rows for to in c.ranks]
    starts = [sum(rows[:to]) for to in c.ranks]
    inputs = [c.addend(start, n) for start, n in zip(starts, rows, strict=True)]
    c.issue(dist.reduce_scatter, c.total(starts[c.rank], rows[c.rank]), inputs, op=c.reduce_op)


def reduce_scatter_tensor(c: Call) -> None:
    n = c.rows
    c.issue(dist.reduce_scatter_tensor, c.total(c.rank * n, n), c.addend(0, c.size * n), op=c.reduce_op)


def coalesced_all_reduce(c: Call) -> None:
    tensors = [c.in_place(0, 1), c.in_place(0, 2)]
    c.coalesce([functools.partial(dist.all_reduce, t, c.reduce_op, c.group) for t in tensors])


def coalesced_reduce_scatter(c: Call) -> None:
    pairs = [(c.total(c.rank * n, n), c.addend(0, c.size * n)) for n in (1, 2)]
    c.coalesce([functools.partial(dist.reduce_scatter_tensor, out, t, c.reduce_op, c.group) for out, t in pairs])


def allreduce_coalesced(c: Call) -> None:
    tensors = [c.in_place(0, 1), c.in_place(0, 2)]
    done(c.group.allreduce_coalesced(tensors, c.options("AllreduceCoalescedOptions", reduceOp=c.reduce_op)))


def reduce_scatter_tensor_coalesced(c: Call) -> None:
    outputs = [c.total(c.rank * n, n) for n in (1, 2)]
    inputs = [c.addend(0, c.size * n) for n in (1, 2)]
    options = c.options("ReduceScatterOptions", reduceOp=c.reduce_op)
    done(c.group.reduce_scatter_tensor_coalesced(outputs, inputs, options))


def named(*functions: Callable[[Call], None]) -> dict[str, Callable[[Call], None]]:
    return {function.__name__: function for function in functions}


MOVES = named(
    broadcast,
    all_gather,
    all_gather_uneven,
    all_gather_into_tensor,
    gather,
    scatter,
    all_to_all,
    all_to_all_single,
    all_to_all_single_uneven,
    coalesced_all_gather,
    coalesced_on_a_device,
    allgather_into_tensor_coalesced,
    allgather_coalesced,
    send_recv,
    isend_irecv,
    recv_from_any,
    batch_isend_irecv,
)
REDUCES = named(
    all_reduce,
    reduce,
    reduce_scatter,
    reduce_scatter_tensor,
    coalesced_all_reduce,
    coalesced_reduce_scatter,
    allreduce_coalesced,
    reduce_scatter_tensor_coalesced,
)
ASYNC_ONLY = {"isend_irecv", "batch_isend_irecv"}
SYNC_ONLY = {"send_recv"}
NOT_ALONE = {"send_recv", "recv_from_any"}  # c10d refuses to send to the rank itself and to receive from it
IN_PLACE = {"all_reduce", "coalesced_all_reduce", "allreduce_coalesced"}  # on every rank: no tensor is input only
# these reach the backend only through functions that view_as_real, and a conjugated tensor has no such view
NO_CONJ = {"coalesced_all_gather", "coalesced_on_a_device", "batch_isend_irecv", "coalesced_all_reduce"}

every_move = pytest.mark.parametrize("name", list(MOVES))
every_reduction = pytest.mark.parametrize("name", list(REDUCES))
every_collective = pytest.mark.parametrize("name", [*MOVES, *REDUCES])


def modes(name: str) -> tuple[bool, ...]:
    return (True,) if name in ASYNC_ONLY else (False,) if name in SYNC_ONLY else (False, True)


def exists(name: str, team: Team, layout: str = "contiguous") -> bool:
    return not (
        name in MISSING
        or (team.size == 1 and name in NOT_ALONE)
        or (layout == "expanded" and name in IN_PLACE)
        or (layout == "conj" and name in NO_CONJ)
        or (layout == "0-dim" and name == "all_to_all_single_uneven")  # it has no rows to split
    )


def operator_for(name: str, dtype: torch.dtype, turn: int) -> str:
    defined = [op for op, dtypes in DEFINED.items() if dtype in dtypes]
    return defined[turn % len(defined)] if name in REDUCES else "-"


# tests ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def teams(request: pytest.FixtureRequest, rank: int, size: int) -> Iterator[dict[str, Team]]:
    """The world; a subgroup, of the ranks but 0 if there are enough, asked for in reverse; each rank alone."""
    requested = {"world": list(range(size)), "subgroup": list(range(size - 1, 0 if size > 2 else -1, -1))}
    alone = [dist.new_group([r]) for r in range(size)]
    groups = {"world": dist.group.WORLD, "subgroup": dist.new_group(requested["subgroup"]), "singleton": alone[rank]}
    requested["singleton"] = [rank]
    made = {}
    for name, group in groups.items():
        if rank in requested[name]:
            members = dist.get_process_group_ranks(group)
            assert sorted(members) == sorted(requested[name])
            made[name] = Team(name, group, members.index(rank), members)
    yield made
    if not request.session.testsfailed:  # else the other ranks may not come here
        for name in ("subgroup", "singleton"):
            if name in made:
                dist.destroy_process_group(made[name].group)


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():  # in-place collectives on leaves
        yield


@every_move
def test_every_dtype_moves_bit_for_bit(teams: dict[str, Team], name: str) -> None:
    if exists(name, teams["world"]):
        for turn, (dtype, is_async) in enumerate(itertools.product(DTYPES, modes(name))):
            Call(name, teams["world"], dtype, is_async, layout="offset", turn=turn).perform()


def test_every_bit_pattern_of_fp8_survives(rank: int, size: int) -> None:
    for dtype, step in itertools.product(FP8, (1, 2)):  # contiguous, and through a copy
        sent = torch.arange(256, device=DEVICE).roll(rank).to(torch.uint8)
        gathered = torch.zeros(size * 256 * step, dtype=torch.uint8, device=DEVICE).view(dtype)[::step]
        dist.all_gather_into_tensor(gathered, sent.repeat_interleave(step).view(dtype)[::step])
        expected = [(place - sender) % 256 for sender in range(size) for place in range(256)]
        assert bits(gathered).tolist() == expected


@every_reduction
def test_every_operator_of_every_dtype(teams: dict[str, Team], name: str) -> None:
    for turn, (op, is_async) in enumerate(itertools.product(DEFINED, modes(name))):
        for dtype in DEFINED[op]:
            Call(name, teams["world"], dtype, is_async, op=op, turn=turn).perform()


@every_collective
def test_every_layout(teams: dict[str, Team], name: str) -> None:
    team, turn = teams["world"], 0
    sample = (torch.float32, torch.bfloat16, torch.int16, torch.complex64)
    for layout, dtype in itertools.product(LAYOUTS, sample):
        if not exists(name, team, layout) or dtype not in LAYOUT_DTYPES.get(layout, DTYPES):
            continue
        full = dtype in {torch.float32, torch.complex64}  # the others: each layout once is enough
        for is_async in modes(name) if full else modes(name)[:1]:
            turn += 1
            Call(name, team, dtype, is_async, layout, operator_for(name, dtype, turn), turn).perform()
        # one side alone, as each has its own copy; 0-dim and empty shapes do not go with those of others
        if layout not in {"0-dim", "numel 0"} and full:
            for laid_out in ("inputs", "outputs"):
                op = operator_for(name, dtype, turn)
                Call(name, team, dtype, modes(name)[0], layout, op, turn, laid_out=laid_out).perform()


@every_collective
def test_every_group(teams: dict[str, Team], name: str) -> None:
    sample = (torch.float64, torch.float16, torch.uint8, torch.complex128)
    for team in teams.values():
        for turn, (dtype, layout) in enumerate(itertools.product(sample, ("contiguous", "strided"))):
            for is_async in modes(name) if exists(name, team) else ():
                Call(name, team, dtype, is_async, layout, operator_for(name, dtype, turn), turn).perform()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("dtype", INTS, ids=str)
def test_integer_sums_and_products_wrap_around(size: int, dtype: torch.dtype) -> None:
    # as in torch, at every place alike: MPI does not promise it, and vectorised sums of small integers may saturate
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT):
        values = [place * 0x9E3779B97F4A7C15 >> 3 for place in range(67)]
        tensor = from_ints(dtype, values).to(DEVICE)
        dist.all_reduce(tensor, op)
        expected = [v * size if op == dist.ReduceOp.SUM else v**size for v in values]
        assert tensor.tolist() == from_ints(dtype, expected).tolist()


@pytest.mark.parametrize("op", ["SUM", "AVG", "PRODUCT", PREMUL, PREMUL_TENSOR])
def test_half_precision_is_rounded_once(teams: dict[str, Team], size: int, op: str) -> None:
    rows = 100
    for dtype, name in itertools.product(HALVES, REDUCES):
        for is_async in modes(name):
            Call(name, teams["world"], dtype, is_async, op=op, rows=rows).perform()
    # the bound is not so wide that it would allow rounding after each step
    for dtype in HALVES if op in {"SUM", "PRODUCT"} and size > 2 else ():
        numel = size * rows * WIDTH
        stepwise = functools.reduce(OF_INTS[op], [summand(dtype, op, numel, rank) for rank in range(size)])
        expected = reduction(dtype, op, numel, size)
        assert expected.bound is not None
        assert ((stepwise.double() - expected.values).abs() > expected.bound).any()


@every_reduction
def test_undefined_reductions_are_refused_before_any_communication(teams: dict[str, Team], name: str) -> None:
    team = teams["world"]
    before, refused = team.seq(), 0
    for op, dtype, is_async in itertools.product(DEFINED, DTYPES, (False, True)):
        # c10d's coalescing manager itself refuses complex operators
        if dtype in DEFINED[op] or (name == "coalesced_all_reduce" and dtype in COMPLEX):
            continue
        call = Call(name, team, dtype, is_async, op=op)
        with pytest.raises(hi.UnsupportedError, match=r"ReduceOp|no reduction"):
            call.perform()
        call.check()
        refused += 1
    assert refused > 150
    assert team.seq() == before
    Call(name, team, torch.float32, is_async=False, op="SUM").perform()
    assert len(set(gather_on_all_ranks(team.seq()))) == 1


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_expanded_outputs_are_refused(teams: dict[str, Team], is_async: bool) -> None:
    def calls(team: Team) -> dict[str, Callable[[], Any]]:
        """Return calls, each for the ranks that have an output: the others would wait for these."""
        group, first, is_first = team.group, team.members[0], team.rank == 0
        keywords = {"group": group, "async_op": is_async}

        def same(rows: int) -> torch.Tensor:
            return torch.zeros(rows, 1, device=DEVICE).expand(rows, 3)

        one, full = torch.ones(1, 3, device=DEVICE), torch.ones(team.size, 3, device=DEVICE)
        ones = list(full.split(1))
        outputs = [*ones[1:], same(1)]
        everywhere: dict[str, Callable[[], Any]] = {
            "all_reduce": lambda: dist.all_reduce(same(1), **keywords),
            "all_gather": lambda: dist.all_gather(outputs, one, **keywords),
            "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(same(team.size), one, **keywords),
            "scatter": lambda: dist.scatter(same(1), ones if is_first else None, first, **keywords),
            "reduce_scatter": lambda: dist.reduce_scatter(same(1), ones, **keywords),
            "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(same(1), full, **keywords),
            "all_to_all": lambda: dist.all_to_all(outputs, ones, **keywords),
            "all_to_all_single": lambda: dist.all_to_all_single(same(team.size), full, **keywords),
            "recv": lambda: dist.irecv(same(1), first, group),
        }
        if is_first:
            everywhere["reduce"] = lambda: dist.reduce(same(1), first, **keywords)
            everywhere["gather"] = lambda: dist.gather(one, outputs, first, **keywords)
        else:
            everywhere["broadcast"] = lambda: dist.broadcast(same(1), first, **keywords)
        return everywhere

    team = teams["world"]
    before = team.seq()
    for name, call in calls(team).items():
        with pytest.raises(hi.InvalidArgumentError, match=rf"^{name}: .*several elements in one place"):
            call()
    assert team.seq() == before
    Call("all_reduce", team, torch.float32, is_async, op="SUM").perform()
    assert len(set(gather_on_all_ranks(team.seq()))) == 1


@pytest.mark.parametrize("layout", ["offset", "strided"])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_inputs_and_outputs_that_share_memory(teams: dict[str, Team], is_async: bool, layout: str) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8):
        for name, call in SHARED.items():
            made = Call(name, teams["world"], dtype, is_async, layout, "SUM", turn=1)
            call(made)
            made.check()


def gathered_in_place(c: Call) -> torch.Tensor:
    """Return all ranks' rows, of which this rank's alone are there already."""
    tensor = c.box(None, Expected(c.sent(*((1, sender, 0) for sender in c.ranks))), c.size)
    tensor[c.rank].copy_(c.sent((1, c.rank, 0)).view(tensor.shape[1:]))
    return tensor


def scattered_in_place(c: Call) -> torch.Tensor:
    """Return this rank's summand, of which its own row becomes the total's."""
    part = c.result(c.rank, 1)
    assert part is not None
    values, own = c.own(0, c.size), slice(c.rank * WIDTH, (c.rank + 1) * WIDTH)
    expected, bound = values.to(part.values.dtype, copy=True), part.bound
    expected[own] = part.values
    if bound is not None:
        bound = torch.zeros(len(values), dtype=bound.dtype).index_copy(0, torch.arange(len(values))[own], bound)
    return c.box(values, Expected(expected, bound), c.size)


def exchanged_in_place(c: Call, shift: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and input of an exchange; the output lies ``shift`` rows behind the input, on the same memory."""
    incoming = c.sent(*((1, sender, c.rank) for sender in c.ranks))
    outgoing = c.sent(*((1, c.rank, to) for to in c.ranks))
    start, rest = outgoing[: shift * WIDTH], pattern(c.dtype, shift * WIDTH, 5, 5)
    rows = c.size + shift
    tensor = c.box(torch.cat([outgoing, rest]), Expected(torch.cat([start, incoming])), rows)
    return tensor[shift:], tensor[: c.size]


def all_gather_shared(c: Call) -> None:
    tensor = gathered_in_place(c)
    c.issue(dist.all_gather, list(tensor.split(1)), tensor[c.rank : c.rank + 1])


def all_gather_into_tensor_shared(c: Call) -> None:
    tensor = gathered_in_place(c)
    c.issue(dist.all_gather_into_tensor, tensor, tensor[c.rank : c.rank + 1])


def gather_shared(c: Call) -> None:
    tensor = gathered_in_place(c) if c.rank == c.root else None
    own = c.give((1, c.rank, 0)) if tensor is None else tensor[c.rank : c.rank + 1]
    c.issue(dist.gather, own, None if tensor is None else list(tensor.split(1)), dst=c.peer[c.root])


def scatter_shared(c: Call) -> None:
    if c.rank == c.root:
        tensor = c.give(*((1, c.root, to) for to in c.ranks))  # the root keeps its own row, so nothing changes
        c.issue(dist.scatter, tensor[c.rank : c.rank + 1], list(tensor.split(1)), src=c.peer[c.root])
    else:
        c.issue(dist.scatter, c.take((1, c.root, c.rank)), None, src=c.peer[c.root])


def reduce_scatter_shared(c: Call) -> None:
    tensor = scattered_in_place(c)
    c.issue(dist.reduce_scatter, tensor[c.rank : c.rank + 1], list(tensor.split(1)), op=c.reduce_op)


def reduce_scatter_tensor_shared(c: Call) -> None:
    tensor = scattered_in_place(c)
    c.issue(dist.reduce_scatter_tensor, tensor[c.rank : c.rank + 1], tensor, op=c.reduce_op)


def all_to_all_shared(c: Call) -> None:
    out, tensor = exchanged_in_place(c, 0)
    c.issue(dist.all_to_all, list(out.split(1)), list(tensor.split(1)))


def all_to_all_single_shared(c: Call) -> None:
    c.issue(dist.all_to_all_single, *exchanged_in_place(c, 0))


def all_to_all_single_overlapping(c: Call) -> None:
    c.issue(dist.all_to_all_single, *exchanged_in_place(c, 1))


SHARED = named(
    all_gather_shared,
    all_gather_into_tensor_shared,
    gather_shared,
    scatter_shared,
    reduce_scatter_shared,
    reduce_scatter_tensor_shared,
    all_to_all_shared,
    all_to_all_single_shared,
    all_to_all_single_overlapping,
)


def test_the_matrix_is_complete(
    request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str], teams: dict[str, Team], rank: int, size: int
) -> None:
    if request.config.getoption("keyword") or any("::" in argument for argument in request.config.args):
        pytest.skip("counts what the whole file checked")
    checked: set[tuple[Any, ...]] = set().union(*gather_on_all_ranks(CHECKED))  # no rank is in every group
    pairs = {
        pair
        for name, dtype, op, layout, group, is_async in checked
        for pair in ((name, dtype, is_async), (op, dtype, is_async), (name, layout, is_async), (name, group, is_async))
    }
    wanted: list[tuple[object, object, bool]] = []
    for name in (*MOVES, *REDUCES):
        for is_async in modes(name) if exists(name, teams["world"]) else ():
            dtypes = DTYPES if name in MOVES else (*ORDERED, *COMPLEX)
            wanted += [(name, dtype, is_async) for dtype in dtypes]
            wanted += [(name, layout, is_async) for layout in LAYOUTS if exists(name, teams["world"], layout)]
            wanted += [(name, team.name, is_async) for team in teams.values() if exists(name, team)]
    wanted += [(op, d, is_async) for op, dtypes in DEFINED.items() for d in dtypes for is_async in (False, True)]
    assert not set(wanted) - pairs
    assert len(checked) > LEAST_CHECKED
    if rank == 0:
        with capsys.disabled():
            sys.stdout.write(f"\nmatrix: {len(checked)} combinations checked on {size} rank{'s' * (size > 1)}\n")
