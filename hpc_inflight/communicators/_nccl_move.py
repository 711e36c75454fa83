"""Data movement over NCCL: every dtype as its bytes, in place wherever the layout allows."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from hpc_inflight.communicators import _layout as layout
from hpc_inflight.communicators._checks import (
    check_length,
    check_numel,
    check_own_split,
    check_peer,
    check_same,
    split_counts,
)
from hpc_inflight.communicators._nccl_reduce import Reducer, nothing
from hpc_inflight.communicators._nccl_stream import launch_group
from hpc_inflight.dtypes import NCCL_UINT8

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from hpc_inflight.communicators._nccl_reduce import After
    from hpc_inflight.communicators._nccl_stream import Launch

    Part = tuple[int, int, int]  # peer, address, bytes


class Mover(Reducer):
    """The moving half of the NCCL communicator; see `Reducer`."""

    def broadcast(self, tensor: torch.Tensor, root: int) -> Launch:
        """See `Communicator.broadcast`."""
        is_root = self.rank == root
        (self._check_tensor if is_root else self._check_output)("broadcast", tensor, "tensor")
        value = layout.source(tensor) if is_root else layout.target(tensor)
        launch, address, nbytes = self._nccl.broadcast, value.data_ptr(), value.nbytes
        if not nbytes:
            return nothing
        if value is tensor:
            return partial(launch, address, address, nbytes, NCCL_UINT8, root)

        def run(stream: int) -> After:
            launch(address, address, nbytes, NCCL_UINT8, root, stream)
            return None if is_root else partial(layout.unflatten, value, [tensor])

        return run

    def all_gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> Launch:
        """See `Communicator.all_gather`."""
        call, rank = "all_gather", self.rank
        self._check_tensor(call, tensor)
        check_length(call, outputs, self.size, "outputs")
        check_same(call, outputs, tensor, "outputs", self._check_output)
        check_numel(call, f"outputs[{rank}]", outputs[rank], tensor.numel(), "the input")
        if all(t.numel() == tensor.numel() for t in outputs):  # then it is so on every rank
            flat, deliver = layout.flat_target(outputs)
            return self._all_gather(flat, tensor, partial(layout.unflatten, flat, outputs) if deliver else None)
        value = layout.source(tensor)
        if any(
            layout.touch(value, output)
            for i, output in enumerate(outputs)
            if i != rank or value.data_ptr() != output.data_ptr()  # its own may be in place
        ):
            value = layout.flatten([value])
        landing = [layout.target(output) for output in outputs]
        broadcast = self._nccl.broadcast

        def part(root: int, stream: int) -> None:
            into = landing[root]
            source = value if root == rank else into
            broadcast(source.data_ptr(), into.data_ptr(), into.nbytes, NCCL_UINT8, root, stream)

        parts: list[Launch] = [partial(part, root) for root in range(self.size) if outputs[root].numel()]

        def run(stream: int) -> After:
            launch_group(self.runtime, parts, stream)
            return _delivery(landing, outputs)

        return run

    def all_gather_into(self, output: torch.Tensor, tensor: torch.Tensor) -> Launch:
        """See `Communicator.all_gather_into`."""
        call = "all_gather_into_tensor"
        if self._simple_pair(tensor, output):
            if not (nbytes := tensor.nbytes):
                return nothing
            return partial(self._nccl.allGather, tensor.data_ptr(), output.data_ptr(), nbytes, NCCL_UINT8)
        self._check_tensor(call, tensor, "input")
        check_same(call, [output], tensor, "output", self._check_output)
        check_numel(call, "output", output, tensor.numel() * self.size, f"{self.size} x the input's")
        flat = layout.target(output)
        return self._all_gather(flat, tensor, None if flat is output else partial(layout.unflatten, flat, [output]))

    def _all_gather(self, flat: torch.Tensor, tensor: torch.Tensor, after: After) -> Launch:
        """Gather into contiguous memory; the input may be this rank's part of it."""
        in_place = layout.plain(tensor) and tensor.data_ptr() == flat.data_ptr() + self.rank * tensor.nbytes
        value = tensor if in_place else layout.source(tensor, flat)
        launch, source, target, nbytes = self._nccl.allGather, value.data_ptr(), flat.data_ptr(), value.nbytes
        if not nbytes:
            return nothing

        def run(stream: int, _keep: tuple[torch.Tensor, torch.Tensor] = (value, flat)) -> After:
            launch(source, target, nbytes, NCCL_UINT8, stream)
            return after

        return run

    def gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, root: int) -> Launch:
        """See `Communicator.gather`."""
        call = "gather"
        self._check_tensor(call, tensor)
        if self.rank == root:
            check_length(call, outputs, self.size, "outputs")
            check_same(call, outputs, tensor, "outputs", self._check_output)
            for i, output in enumerate(outputs):
                check_numel(call, f"outputs[{i}]", output, tensor.numel(), "the input")
        return self._exchange({root: tensor}, dict(enumerate(outputs)) if self.rank == root else {})

    def scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], root: int) -> Launch:
        """See `Communicator.scatter`."""
        call = "scatter"
        self._check_output(call, output, "output")
        if self.rank == root:
            check_length(call, inputs, self.size, "inputs")
            check_same(call, inputs, output, "inputs", self._check_tensor)
            for i, tensor in enumerate(inputs):
                check_numel(call, f"inputs[{i}]", tensor, output.numel(), "the output")
        return self._exchange(dict(enumerate(inputs)) if self.rank == root else {}, {root: output})

    def all_to_all(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Launch:
        """See `Communicator.all_to_all`."""
        call, rank = "all_to_all", self.rank
        check_length(call, inputs, self.size, "inputs")
        check_length(call, outputs, self.size, "outputs")
        check_same(call, outputs, inputs[0], "outputs", self._check_output)
        check_same(call, inputs, inputs[0], "inputs", self._check_tensor)
        check_numel(call, f"outputs[{rank}]", outputs[rank], inputs[rank].numel(), f"inputs[{rank}]")
        return self._exchange(dict(enumerate(inputs)), dict(enumerate(outputs)))

    def all_to_all_single(
        self, output: torch.Tensor, tensor: torch.Tensor, output_splits: Sequence[int], input_splits: Sequence[int]
    ) -> Launch:
        """See `Communicator.all_to_all_single`."""
        call = "all_to_all_single"
        if not input_splits and not output_splits and self._simple_exchange(output, tensor):
            return self._launch_all_to_all(output, tensor)
        self._check_tensor(call, tensor, "input")
        check_same(call, [output], tensor, "output", self._check_output)
        expected = split_counts(call, output, output_splits, self.size, "output")
        sent = split_counts(call, tensor, input_splits, self.size, "input")
        check_own_split(call, sent, expected, self.rank)
        received = layout.target(output)
        value = layout.source(tensor, received)
        width = tensor.element_size()
        return self._exchange_parts(
            _parts(value.data_ptr(), sent, width),
            _parts(received.data_ptr(), expected, width),
            None if received is output else partial(layout.unflatten, received, [output]),
            (value, received),
        )

    def _simple_exchange(self, output: torch.Tensor, tensor: torch.Tensor) -> bool:
        """Say whether two tensors of one shape are exchanged in even parts, without a copy or anything to refuse."""
        if not (
            output.dtype is tensor.dtype
            and self._simple(output)
            and self._simple(tensor)
            and output.shape == tensor.shape
            and tensor.dim()
            and tensor.shape[0] % self.size == 0
        ):
            return False
        nbytes, first, second = tensor.nbytes, tensor.data_ptr(), output.data_ptr()
        return first + nbytes <= second or second + nbytes <= first

    def _launch_all_to_all(self, output: torch.Tensor, tensor: torch.Tensor) -> Launch:
        runtime, size, rank, nccl = self.runtime, self.size, self.rank, self._nccl
        source, target, nbytes = tensor.data_ptr(), output.data_ptr(), tensor.nbytes // size
        if not nbytes:
            return nothing

        def run(stream: int, _keep: tuple[torch.Tensor, torch.Tensor] = (tensor, output)) -> None:
            own = rank * nbytes
            runtime.copy(target + own, source + own, nbytes, stream)
            if size == 1:
                return
            runtime.group_start()
            try:
                for peer in range(size):
                    if peer != rank:
                        nccl.send(source + peer * nbytes, nbytes, NCCL_UINT8, peer, stream)
                        nccl.recv(target + peer * nbytes, nbytes, NCCL_UINT8, peer, stream)
            finally:
                runtime.group_end()

        return run

    def send_in_group(self, tensor: torch.Tensor, dst: int) -> Launch:
        """Send to a rank, as one of a block of calls."""
        self._check_tensor("send", tensor)
        check_peer("send", dst, self.size, self.name)
        value = layout.source(tensor)
        return self._exchange_parts([(dst, value.data_ptr(), value.nbytes)], [], None, value, to_self=True)

    def recv_in_group(self, tensor: torch.Tensor, src: int) -> Launch:
        """Receive from a rank, as one of a block of calls."""
        self._check_output("recv", tensor, "tensor")
        check_peer("recv", src, self.size, self.name)
        landing = layout.target(tensor)
        after = None if landing is tensor else partial(layout.unflatten, landing, [tensor])
        return self._exchange_parts([], [(src, landing.data_ptr(), landing.nbytes)], after, landing, to_self=True)

    def _exchange(self, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor]) -> Launch:
        """Send each rank its tensor and receive each rank's; they may share memory."""
        landing = {peer: layout.target(tensor) for peer, tensor in receives.items()}
        leaving = {peer: self._apart(peer, tensor, receives) for peer, tensor in sends.items()}
        return self._exchange_parts(
            [(peer, t.data_ptr(), t.nbytes) for peer, t in leaving.items()],
            [(peer, t.data_ptr(), t.nbytes) for peer, t in landing.items()],
            _delivery(list(landing.values()), list(receives.values())),
            (landing, leaving),
        )

    def _apart(self, to: int, tensor: torch.Tensor, receives: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """Return the tensor, or a copy where something that is received would be written over it."""
        source = layout.source(tensor)
        if source is tensor and any(
            layout.touch(tensor, other)
            for peer, other in receives.items()
            if not (other is tensor and peer == to == self.rank)  # what stays in place
        ):
            return layout.flatten([tensor])
        return source

    def _exchange_parts(
        self, sends: Sequence[Part], receives: Sequence[Part], after: After, keep: object, *, to_self: bool = False
    ) -> Launch:
        """Send and receive memory as one group; what stays on the rank is copied, but for ``to_self``."""
        runtime, send, recv = self.runtime, self._nccl.send, self._nccl.recv
        me = -1 if to_self else self.rank
        out = [part for part in sends if part[2] and part[0] != me]
        into = [part for part in receives if part[2] and part[0] != me]
        kept = [part for part in (*sends, *receives) if part[2] and part[0] == me]

        def run(stream: int, _keep: object = keep) -> After:
            if kept and kept[0][1] != kept[1][1]:
                runtime.copy(kept[1][1], kept[0][1], kept[0][2], stream)
            if out or into:
                runtime.group_start()
                try:
                    for peer, address, nbytes in out:
                        send(address, nbytes, NCCL_UINT8, peer, stream)
                    for peer, address, nbytes in into:
                        recv(address, nbytes, NCCL_UINT8, peer, stream)
                finally:
                    runtime.group_end()
            return after

        return run


def _parts(address: int, counts: Sequence[int], width: int) -> list[Part]:
    parts = []
    for peer, count in enumerate(counts):
        nbytes = count * width
        parts.append((peer, address, nbytes))
        address += nbytes
    return parts


def _delivery(landing: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> After:
    """Return what brings the values that landed elsewhere into the outputs."""
    pairs = [(value, output) for value, output in zip(landing, outputs, strict=True) if value is not output]
    if not pairs:
        return None

    def deliver() -> None:
        for value, output in pairs:
            layout.unflatten(value, [output])

    return deliver
