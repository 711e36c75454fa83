"""A stand-in for CUDA and NCCL on a machine without a GPU: the NCCL communicator runs on it as it is.

NCCL's calls travel over MPI, between streams of `hpc_inflight.testing.fake_cuda`. So a wait that is missing shows as
wrong numbers, as it does on a GPU, and what is launched where can be read from a log.
"""

from __future__ import annotations

import ctypes
import itertools
import pickle
import threading
from typing import TYPE_CHECKING, Any

import torch

from hpc_inflight import _mpi
from hpc_inflight.testing.fake_cuda import FakeCuda, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

_BASE_TAG = 1 << 20  # on the package's control communicator, above what it uses itself
_TAGS_EACH = 1 << 12
_TYPES = {
    0: torch.int8,
    1: torch.uint8,
    2: torch.int32,
    3: torch.uint32,
    4: torch.int64,
    5: torch.uint64,
    6: torch.float16,
    7: torch.float32,
    8: torch.float64,
    9: torch.bfloat16,
}
_SUM, _PRODUCT, _MAX, _MIN, _AVG = range(5)


class FakeRuntime(FakeCuda):
    """What `hpc_inflight._cupy.Runtime` offers, without a device; its index is -1, as that of CPU tensors.

    Attributes:
        device: The identity that `uuid` returns.
    """

    def __init__(self, late_s: float = 0.0) -> None:
        super().__init__(late_s)
        self.device = f"GPU-{id(self):x}"
        self.nccl_version = 22809
        self.shared = False
        self.destroyed: list[tuple[str, FakeCommunicator]] = []

    def uuid(self, _index: int) -> str:
        """Return the device's identity."""
        return self.device

    def shares_devices(self) -> bool:
        """Say what a test wants."""
        return self.shared

    def unique_id(self) -> bytes:
        """Return who makes the communicator, and its number."""
        self.fail("unique_id")
        return pickle.dumps(_next_id())

    def communicator(self, size: int, unique_id: bytes, rank: int) -> FakeCommunicator:
        """Block until all ranks are there."""
        self.fail("communicator")
        return FakeCommunicator(self, size, pickle.loads(unique_id), rank)  # noqa: S301  # our own

    def destroy(self, communicator: FakeCommunicator) -> None:
        """Note it."""
        self.fail("destroy")
        self.destroyed.append(("destroy", communicator))

    def abort(self, communicator: FakeCommunicator) -> None:
        """Note it."""
        self.fail("abort")
        communicator.stop()
        self.destroyed.append(("abort", communicator))

    def check(self, _communicator: FakeCommunicator) -> None:
        """Raise what a test wants."""
        self.fail("check")

    def group_start(self) -> None:
        """Collect this thread's NCCL calls."""
        depth = getattr(self._thread, "depth", 0)
        self._thread.depth = depth + 1
        if depth == 0:
            self._thread.calls = []
        self.note("group_start")

    def group_end(self) -> None:
        """Run them together."""
        self._thread.depth -= 1
        self.log.append(("group_end",))
        if self._thread.depth == 0:
            calls, self._thread.calls = self._thread.calls, []
            for stream in {stream for stream, _ in calls}:
                mine = [call for where, call in calls if where == stream]
                self.enqueue(stream, lambda mine=mine: _together(mine))  # type: ignore[misc]  # the default binds it
        self.fail("group_end")

    def open_groups(self) -> int:
        """Return how many groups of this thread are open."""
        return getattr(self._thread, "depth", 0)

    def call(self, stream: int, steps: Iterator[bool]) -> None:
        """Run an NCCL call, a generator that yields whether it is over, on a stream or as part of the group."""
        if getattr(self._thread, "depth", 0):
            self._thread.calls.append((stream, steps))
        else:
            self.enqueue(stream, lambda: _together([steps]))


_ids = itertools.count()


def _next_id() -> tuple[int, int]:
    if not _mpi.started():
        return 0, next(_ids)
    world = _mpi.control_comm()
    return world.rank, next(_ids) * world.size + world.rank


def _together(calls: Iterable[Iterator[bool]]) -> None:
    live = list(calls)

    def step() -> bool:
        live[:] = [call for call in live if not next(call)]
        return not live

    until(step)


def _memory(address: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_char * (count * dtype.itemsize)).from_address(address), dtype=dtype)


class FakeCommunicator:
    """What CuPy's NcclCommunicator offers, over MPI messages."""

    def __init__(self, runtime: FakeRuntime, size: int, identity: tuple[int, int], rank: int) -> None:
        self._runtime = runtime
        self.rank = rank
        self.size = size
        creator, number = identity
        self._tag = _BASE_TAG + number * _TAGS_EACH
        self._seq = itertools.count()
        self._stopped = False
        self._stepping = threading.Lock()
        self._messages: dict[tuple[int, int], itertools.count[int]] = {}
        self._world = [0]
        if size > 1:
            self._comm = _mpi.control_comm()
            self._world = self._meet(creator)

    def _meet(self, creator: int) -> list[int]:
        comm = self._comm
        if self.rank:
            comm.send((self.rank, comm.rank), creator, self._tag)
            found: list[int] = self._receive(creator, self._tag)
            return found
        members = {0: comm.rank}
        while len(members) < self.size:
            rank, world_rank = self._receive(_mpi.mpi().ANY_SOURCE, self._tag)
            members[rank] = world_rank
        ranks = [members[rank] for rank in range(self.size)]
        for other in ranks[1:]:
            comm.send(ranks, other, self._tag)
        return ranks

    def stop(self) -> None:
        """Touch no memory any more, as after ``ncclCommAbort``: its owners may free it."""
        with self._stepping:
            self._stopped = True

    def _call(self, stream: int, steps: Iterator[bool]) -> None:
        def unless_stopped() -> Iterator[bool]:
            while True:
                with self._stepping:
                    over = self._stopped or next(steps)
                yield over

        self._runtime.call(stream, unless_stopped())

    def _receive(self, source: int, tag: int) -> Any:
        got: list[Any] = []

        def probe() -> bool:
            message = self._comm.improbe(source, tag)
            if message is not None:
                got.append(message.recv())
            return bool(got)

        until(probe)
        return got[0]

    def _exchange(
        self, sends: Mapping[int, tuple[int, int, int]], receives: Mapping[int, int], into: dict[int, bytes]
    ) -> Iterator[bool]:
        """Yield until every rank's part of ``sends`` is sent and one of each of ``receives`` is there.

        Args:
            sends: By rank, address, bytes and tag.
            receives: By rank, the tag.
            into: Takes what came, by rank.
        """
        requests = [
            self._comm.isend(bytes(_memory(address, nbytes, torch.uint8).numpy()), self._world[to], tag)
            for to, (address, nbytes, tag) in sends.items()
        ]
        waiting = dict(receives)
        while waiting or requests:
            for rank, tag in list(waiting.items()):
                message = self._comm.improbe(self._world[rank], tag)
                if message is not None:
                    into[rank] = message.recv()
                    del waiting[rank]
            requests = [request for request in requests if not request.Test()]
            yield False

    def _collective(
        self,
        name: str,
        stream: int,
        senders: Iterable[int],
        receivers: Iterable[int],
        address: int,
        nbytes: int,
        finish: Callable[[dict[int, bytes]], None],
    ) -> None:
        self._runtime.note(name, stream)
        tag = self._tag + 1 + next(self._seq) % (_TAGS_EACH // 4)

        def steps() -> Iterator[bool]:
            mine = self.rank in senders
            into = {self.rank: bytes(_memory(address, nbytes, torch.uint8).numpy())} if mine else {}
            to = {r: (address, nbytes, tag) for r in receivers if mine and r != self.rank}
            there = {r: tag for r in senders if r != self.rank and self.rank in receivers}
            if self.size > 1:
                yield from self._exchange(to, there, into)
            if self.rank in receivers:
                finish(into)
            yield True

        self._call(stream, steps())

    def _reduced(self, parts: dict[int, bytes], dtype: torch.dtype, op: int) -> torch.Tensor:
        values = [torch.frombuffer(bytearray(parts[rank]), dtype=dtype) for rank in range(self.size)]
        result = values[0]
        wide = dtype in {torch.uint32, torch.uint64}  # torch computes little in these
        if wide:
            return self._reduced_wide(values, op)
        for value in values[1:]:
            if op in {_SUM, _AVG}:
                result = result + value
            else:
                result = {_PRODUCT: torch.mul, _MAX: torch.maximum, _MIN: torch.minimum}[op](result, value)
        return result / self.size if op == _AVG else result

    @staticmethod
    def _reduced_wide(values: list[torch.Tensor], op: int) -> torch.Tensor:
        import numpy as np

        function = {_SUM: np.add, _PRODUCT: np.multiply, _MAX: np.maximum, _MIN: np.minimum}[op]
        result = values[0].numpy()
        for value in values[1:]:
            result = function(result, value.numpy())
        return torch.from_numpy(result)

    def allReduce(self, source: int, target: int, count: int, kind: int, op: int, stream: int) -> None:  # noqa: N802
        """Reduce on every rank."""
        dtype, everyone = _TYPES[kind], range(self.size)

        def finish(parts: dict[int, bytes]) -> None:
            _memory(target, count, dtype).copy_(self._reduced(parts, dtype, op))

        self._collective("all_reduce", stream, everyone, everyone, source, count * dtype.itemsize, finish)

    def reduce(self, source: int, target: int, count: int, kind: int, op: int, root: int, stream: int) -> None:
        """Reduce on the root."""
        dtype = _TYPES[kind]

        def finish(parts: dict[int, bytes]) -> None:
            _memory(target, count, dtype).copy_(self._reduced(parts, dtype, op))

        self._collective("reduce", stream, range(self.size), [root], source, count * dtype.itemsize, finish)

    def reduceScatter(self, source: int, target: int, count: int, kind: int, op: int, stream: int) -> None:  # noqa: N802
        """Reduce; each rank keeps its part."""
        dtype, everyone = _TYPES[kind], range(self.size)

        def finish(parts: dict[int, bytes]) -> None:
            whole = self._reduced(parts, dtype, op)
            _memory(target, count, dtype).copy_(whole[self.rank * count : (self.rank + 1) * count])

        nbytes = count * dtype.itemsize * self.size
        self._collective("reduce_scatter", stream, everyone, everyone, source, nbytes, finish)

    def allGather(self, source: int, target: int, count: int, kind: int, stream: int) -> None:  # noqa: N802
        """Gather on every rank."""
        nbytes, everyone = count * _TYPES[kind].itemsize, range(self.size)

        def finish(parts: dict[int, bytes]) -> None:
            for rank, part in parts.items():
                ctypes.memmove(target + rank * nbytes, part, nbytes)

        self._collective("all_gather", stream, everyone, everyone, source, nbytes, finish)

    def broadcast(self, source: int, target: int, count: int, kind: int, root: int, stream: int) -> None:
        """Copy the root's memory."""
        nbytes = count * _TYPES[kind].itemsize

        def finish(parts: dict[int, bytes]) -> None:
            ctypes.memmove(target, parts[root], nbytes)

        self._collective("broadcast", stream, [root], range(self.size), source, nbytes, finish)

    def _message_tag(self, src: int, dst: int) -> int:
        number = next(self._messages.setdefault((src, dst), itertools.count()))
        return self._tag + _TAGS_EACH // 2 + number % (_TAGS_EACH // 2)

    def send(self, address: int, count: int, kind: int, peer: int, stream: int) -> None:
        """Send to a rank."""
        self._runtime.note("send", peer, stream)
        nbytes, tag = count * _TYPES[kind].itemsize, self._message_tag(self.rank, peer)

        def steps() -> Iterator[bool]:
            yield from self._exchange({peer: (address, nbytes, tag)}, {}, {})
            yield True

        self._call(stream, steps() if peer != self.rank else self._to_self(address, nbytes, None, tag))

    def recv(self, address: int, count: int, kind: int, peer: int, stream: int) -> None:
        """Receive from a rank."""
        self._runtime.note("recv", peer, stream)
        nbytes, tag = count * _TYPES[kind].itemsize, self._message_tag(peer, self.rank)
        if peer == self.rank:
            # the send to itself has counted this pair's numbers, too
            self._call(stream, self._to_self(None, nbytes, address, tag))
            return

        def steps() -> Iterator[bool]:
            into: dict[int, bytes] = {}
            yield from self._exchange({}, {peer: tag}, into)
            ctypes.memmove(address, into[peer], nbytes)
            yield True

        self._call(stream, steps())

    def _to_self(self, source: int | None, nbytes: int, target: int | None, _tag: int) -> Iterator[bool]:
        box: list[bytes] = self.__dict__.setdefault("_own", [])
        if source is not None:
            box.append(bytes(_memory(source, nbytes, torch.uint8).numpy()))
        else:
            while not box:
                yield False
            ctypes.memmove(target or 0, box.pop(0), nbytes)
        yield True
