"""``ProcessGroupInflight``: what c10d calls, turned into operations of a communicator."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from hpc_inflight import _c10d_forms as forms
from hpc_inflight import _torch_compat as compat
from hpc_inflight._c10d_identity import BACKEND, GroupIdentity
from hpc_inflight._c10d_issue import Issuer
from hpc_inflight._c10d_life import LiveGroup
from hpc_inflight.errors import InvalidArgumentError
from hpc_inflight.work import DoneWork, Work

if TYPE_CHECKING:
    from datetime import timedelta


_Tensors = Sequence[torch.Tensor]


class ProcessGroupInflight(LiveGroup):
    """One c10d group, on MPI for CPU tensors and on NCCL for CUDA tensors.

    Made by ``init_process_group`` and ``new_group`` with backend ``"hpc_inflight"``.

    Every collective method is collective over the group: all its ranks call it, in the same order. Roots and
    peers are group ranks. With ``opts.asyncOp`` the method returns a `hpc_inflight.work.Work` at once; otherwise
    the operation may be complete on return and the returned work says so. Outputs are written in place; inputs
    must stay as they are until the work is complete.

    Raises:
        GroupDestroyedError: Any method, after the group was destroyed or in a forked child.
        InvalidArgumentError: Shapes, splits, ranks or tags that cannot be right, before any communication.
        UnsupportedError: A device, layout, dtype or operator that is not defined, before any communication.
    """

    def split_group(
        self,
        new_ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> ProcessGroupInflight | None:
        """Make a group of some of this group's ranks.

        **Collective:** over ``new_ranks`` only; other ranks may call it and get None.

        Args:
            new_ranks: Ranks in this group; the new group has them in ascending order.
            timeout: The new group's timeout; this group's by default.
            opts: As c10d passes it; unused.
            group_name: The new group's name; made of this group's and the ranks by default.
            group_desc: Its description.
            device_types: As c10d passes it; a group serves every device.

        Raises:
            InvalidArgumentError: Ranks outside the group, or a rank twice.
            CollectiveTimeout: A member did not come.
        """
        comm, ranks = self._open_mpi("split_group"), sorted(new_ranks)
        if not ranks or len(set(ranks)) < len(ranks) or ranks[0] < 0 or ranks[-1] >= self._size:
            msg = f"split_group: {list(new_ranks)} are not distinct ranks of {self.describe()}"
            raise InvalidArgumentError(msg)
        if self._rank not in ranks:
            return None
        name = group_name or f"{self._name}:split:{ranks}"
        seconds = compat.timeout_s(timeout, self._timeout_s)
        store = compat.PrefixStore(f"{name}/", self._store)
        made = ProcessGroupInflight(
            store, ranks.index(self._rank), len(ranks), comm.split(ranks, name, seconds), seconds
        )
        made.setGroupName(name)
        made.setGroupDesc(group_desc or f"{self._desc}:split")
        return made

    splitGroup = split_group  # noqa: N815  # the name that torch's C++ looks for

    def _get_sequence_number_for_group(self) -> int:
        """Return the number of collectives issued so far."""
        return self._comm.seq + (0 if self._nccl is None else self._nccl.seq)

    def _set_sequence_number_for_group(self) -> None:
        """Sequence numbers start at 1 with the group; there is nothing to exchange."""

    # collectives --------------------------------------------------------------------------------------------

    def allreduce(self, tensors: _Tensors | torch.Tensor, opts: Any = None, timeout: Any = None) -> Any:
        """Reduce one tensor over the ranks, in place."""
        (tensor,) = forms.single("all_reduce", tensors)
        comm = self._open("all_reduce", tensor)
        operations = [comm.all_reduce(tensor, forms.reduction(opts))]
        return self._issue(comm, "all_reduce", operations, (tensor,), opts, timeout)

    def allreduce_coalesced(self, tensors: _Tensors, opts: Any = None) -> Any:
        """Reduce several tensors over the ranks, in place, as one work."""
        tensors, op = forms.plain_all(tensors), forms.reduction(opts)
        comm = self._open_any("all_reduce_coalesced", tensors)
        operations = [comm.all_reduce(t, op) for t in tensors]
        return self._issue(comm, "all_reduce_coalesced", operations, tuple(tensors), opts)

    def reduce(self, tensors: _Tensors | torch.Tensor, opts: Any = None, *args: Any) -> Any:
        """Reduce one tensor over the ranks, in place on the root."""
        (tensor,) = forms.single("reduce", tensors)
        comm = self._open("reduce", tensor)
        if isinstance(opts, int):
            root, op = self._peer("reduce", opts), forms.reduction(args[0] if args else None)
        else:
            root, op = self._peer("reduce", opts.rootRank), forms.reduction(opts)
        outputs = (tensor,) if root == self._rank else ()
        return self._issue(comm, "reduce", [comm.reduce(tensor, root, op)], outputs, opts, inputs=(tensor,))

    def broadcast(self, tensors: _Tensors | torch.Tensor, opts: Any = None, timeout: Any = None) -> Any:
        """Copy the root's tensor to the others."""
        (tensor,) = forms.single("broadcast", tensors)
        comm = self._open("broadcast", tensor)
        root = self._peer("broadcast", opts if isinstance(opts, int) else opts.rootRank)
        return self._issue(comm, "broadcast", [comm.broadcast(tensor, root)], (tensor,), opts, timeout)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Any:
        """Gather every rank's tensor into a list on every rank."""
        (tensor,), targets = forms.single("all_gather", inputs), forms.per_rank(outputs)
        comm = self._open("all_gather", tensor)
        return self._issue(
            comm, "all_gather", [comm.all_gather(targets, tensor)], targets, opts, timeout, inputs=(tensor,)
        )

    def allgather_coalesced(self, output_lists: Sequence[_Tensors], inputs: _Tensors, opts: Any = None) -> Any:
        """Gather several tensors; ``output_lists[rank][i]`` receives that rank's i-th tensor."""
        inputs = forms.plain_all(inputs)
        comm = self._open_any("all_gather_coalesced", inputs)
        output_lists = [forms.plain_all(row) for row in output_lists]
        columns = [[row[i] for row in output_lists] for i in range(len(inputs))]
        operations = [comm.all_gather(column, t) for column, t in zip(columns, inputs, strict=True)]
        outputs = [t for row in output_lists for t in row]
        return self._issue(comm, "all_gather_coalesced", operations, outputs, opts, inputs=inputs)

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Any:
        """Gather every rank's tensor into one tensor on every rank."""
        output, tensor = forms.plain(output), forms.plain(tensor)
        comm = self._open("all_gather_into_tensor", tensor)
        operations = [comm.all_gather_into(output, tensor)]
        return self._issue(comm, "all_gather_into_tensor", operations, (output,), opts, inputs=(tensor,))

    def all_gather_single_coalesced(self, outputs: _Tensors, inputs: _Tensors, opts: Any = None) -> Any:
        """Gather several tensors into one tensor each, as one work."""
        outputs, inputs = forms.plain_all(outputs), forms.plain_all(inputs)
        comm = self._open_any("all_gather_into_tensor_coalesced", inputs)
        operations = [comm.all_gather_into(o, i) for o, i in zip(outputs, inputs, strict=True)]
        return self._issue(comm, "all_gather_into_tensor_coalesced", operations, tuple(outputs), opts, inputs=inputs)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, *args: Any) -> Any:
        """Gather every rank's tensor into a list on the root."""
        (tensor,), targets = forms.single("gather", inputs), forms.per_rank(outputs)
        comm = self._open("gather", tensor)
        root = self._peer("gather", opts if isinstance(opts, int) else opts.rootRank)
        return self._issue(comm, "gather", [comm.gather(targets, tensor, root)], targets, opts, *args, inputs=(tensor,))

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, *args: Any) -> Any:
        """Send the root's i-th tensor to rank i."""
        (output,), sources = forms.single("scatter", outputs), forms.per_rank(inputs)
        comm = self._open("scatter", output)
        root = self._peer("scatter", opts if isinstance(opts, int) else opts.rootRank)
        return self._issue(
            comm, "scatter", [comm.scatter(output, sources, root)], (output,), opts, *args, inputs=sources
        )

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Any:
        """Reduce lists of tensors over the ranks; rank i keeps the i-th."""
        (output,), sources = forms.single("reduce_scatter", outputs), forms.per_rank(inputs)
        comm = self._open("reduce_scatter", output)
        operation = comm.reduce_scatter(output, sources, forms.reduction(opts))
        return self._issue(comm, "reduce_scatter", [operation], (output,), opts, timeout, inputs=sources)

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Any:
        """Reduce one tensor over the ranks; rank i keeps the i-th part."""
        output, tensor, op = forms.plain(output), forms.plain(tensor), forms.reduction(opts)
        comm = self._open("reduce_scatter_tensor", tensor)
        operations = [comm.reduce_scatter_into(output, tensor, op)]
        return self._issue(comm, "reduce_scatter_tensor", operations, (output,), opts, inputs=(tensor,))

    def reduce_scatter_single_coalesced(self, outputs: _Tensors, inputs: _Tensors, opts: Any = None) -> Any:
        """Reduce and scatter several tensors as one work."""
        outputs, inputs, op = forms.plain_all(outputs), forms.plain_all(inputs), forms.reduction(opts)
        comm = self._open_any("reduce_scatter_tensor_coalesced", inputs)
        operations = [comm.reduce_scatter_into(o, i, op) for o, i in zip(outputs, inputs, strict=True)]
        return self._issue(comm, "reduce_scatter_tensor_coalesced", operations, tuple(outputs), opts, inputs=inputs)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> Any:
        """Exchange the rows of one tensor; splits count rows per rank, empty means even."""
        output, tensor = forms.plain(output), forms.plain(tensor)
        comm = self._open("all_to_all_single", tensor)
        operation = comm.all_to_all_single(output, tensor, output_splits, input_splits)
        return self._issue(comm, "all_to_all_single", [operation], (output,), opts, inputs=(tensor,))

    def alltoall(self, outputs: _Tensors, inputs: _Tensors, opts: Any = None) -> Any:
        """Exchange lists of tensors: ``inputs[i]`` goes to rank i."""
        outputs, inputs = forms.plain_all(outputs), forms.plain_all(inputs)
        comm = self._open_any("all_to_all", inputs)
        operations = [comm.all_to_all(outputs, inputs)]
        return self._issue(comm, "all_to_all", operations, tuple(outputs), opts, inputs=inputs)

    def barrier(self, opts: Any = None, timeout: Any = None) -> Any:
        """Return on no rank before all have entered.

        Once a group has used CUDA tensors, entering means that all its operations on them and the work of the
        current stream are complete: the host blocks for that, too. The ranks themselves meet over MPI. In a CUDA graph
        capture it is a small collective of the graph instead, and nobody blocks.
        """
        comm, opts = self._open_mpi("barrier"), forms.options(opts)
        seconds = compat.timeout_s(opts.timeout if timeout is None and opts is not None else timeout, self._timeout_s)
        operations = [comm.barrier(seconds)]
        if self._nccl is not None:
            if self._nccl.capturing():
                with self._nccl_lane.during("barrier"):
                    return self._nccl.captured_barrier()
            operations.insert(0, self._nccl.fence(seconds))
        return self._issue(comm, "barrier", operations, (), opts, timeout)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Block until all ranks have entered; rank 0's error names the first rank that did not, or all of them."""
        seconds = self._timeout_s if timeout is None else timeout.total_seconds()
        comm = self._open_mpi("monitored_barrier")
        with self._lane.during("monitored_barrier"):
            comm.monitored_barrier(seconds, all_ranks=wait_all_ranks)

    # torch 2.13 renamed these; both families call the same methods
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # point to point -----------------------------------------------------------------------------------------

    def send(self, tensors: _Tensors, dst: int, tag: int) -> Any:
        """Send to a group rank; with the receive there, not collective."""
        (tensor,) = forms.single("send", tensors)
        comm = self._open("send", tensor)
        message = self._lane_of(comm).begin_message("send", tensor, dst, tag)
        with self._profiled("send", tensor), message:
            return self._issued(message.issued(comm.send(tensor, dst, tag, self._timeout_s)), ())

    def recv(self, tensors: _Tensors, src: int, tag: int) -> Any:
        """Receive from a group rank; with the send there, not collective."""
        (tensor,) = forms.single("recv", tensors)
        comm = self._open("recv", tensor)
        message = self._lane_of(comm).begin_message("recv", tensor, src, tag)
        with self._profiled("recv", tensor), message:
            return self._issued(message.issued(comm.recv(tensor, src, tag, self._timeout_s)), (tensor,))

    def recv_anysource(self, tensors: _Tensors, tag: int) -> Any:
        """Receive from whichever rank sends; the work's ``source_rank()`` says which it was."""
        (tensor,) = forms.single("recv", tensors)
        comm = self._open("recv", tensor)
        message = self._lane_of(comm).begin_message("recv", tensor, None, tag)
        with self._profiled("recv", tensor), message:
            return self._issued(message.issued(comm.recv(tensor, None, tag, self._timeout_s)), (tensor,))

    @staticmethod
    def _profiled(op: str, tensor: torch.Tensor) -> AbstractContextManager[Any]:
        return compat.record_shapes(f"{BACKEND}:{op}", [tensor]) if compat.profiler_enabled() else nullcontext()

    def _peer(self, call: str, rank: int) -> int:
        if not 0 <= rank < self._size:
            msg = f"{call}: root {rank} is not in {self.describe()}; expected 0 to {self._size - 1}"
            raise InvalidArgumentError(msg)
        return rank


compat.keep_out_of_dynamo(GroupIdentity, Issuer, LiveGroup, ProcessGroupInflight, Work, DoneWork)
