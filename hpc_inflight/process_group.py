"""``ProcessGroupInflight``: what c10d calls, turned into operations of a communicator."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from time import monotonic
from typing import TYPE_CHECKING, Any

import torch

from hpc_inflight import _c10d_forms as forms
from hpc_inflight import _mpi, flight_recorder, group_set, work_registry
from hpc_inflight import _torch_compat as compat
from hpc_inflight.errors import GroupDestroyedError, InvalidArgumentError
from hpc_inflight.flight_recorder import FATE, Lane
from hpc_inflight.work import CoalescedCompletion, Completion, DoneWork, Work

if TYPE_CHECKING:
    from datetime import timedelta

    from hpc_inflight.communicators.base import Communicator, Operation
from hpc_inflight._c10d_identity import BACKEND, GroupIdentity

_DESTROYED = "was destroyed; make a new group, or issue before destroying it"
_Tensors = Sequence[torch.Tensor]


class ProcessGroupInflight(GroupIdentity):
    """One c10d group on MPI; made by ``init_process_group`` and ``new_group`` with backend ``"hpc_inflight"``.

    Every collective method is collective over the group: all its ranks call it, in the same order. Roots and
    peers are group ranks. With ``opts.asyncOp`` the method returns a `hpc_inflight.work.Work` at once; otherwise
    the operation may be complete on return and the returned work says so. Outputs are written in place; inputs
    must stay as they are until the work is complete.

    Raises:
        GroupDestroyedError: Any method, after the group was destroyed or in a forked child.
        InvalidArgumentError: Shapes, splits, ranks or tags that cannot be right, before any communication.
        UnsupportedError: A device, layout, dtype or operator that is not defined, before any communication.
    """

    def __init__(
        self, store: Any, rank: int, size: int, communicator: Communicator, timeout_s: float, ranks: Sequence[int] = ()
    ) -> None:
        super().__init__(store, rank, size, timeout_s)
        self._flight.ranks = ranks or range(size)
        self._lane = Lane(self._flight, "mpi")
        self._comm: Communicator = communicator
        self._closed = ""  # why it cannot be used any more
        self._coalescing: list[Any] | None = None
        self._coalescing_thread = 0
        self._ticket = group_set.add(self)

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
        comm, ranks = self._open("split_group"), sorted(new_ranks)
        if not ranks or len(set(ranks)) < len(ranks) or ranks[0] < 0 or ranks[-1] >= self._size:
            msg = f"split_group: {list(new_ranks)} are not distinct ranks of {self.describe()}"
            raise InvalidArgumentError(msg)
        if self._rank not in ranks:
            return None
        name = group_name or f"{self._name}:split:{ranks}"
        seconds = compat.timeout_s(timeout, self._timeout_s)
        store = compat.PrefixStore(f"{name}/", self._store)
        split, globally = comm.split(ranks, name, seconds), [self._flight.ranks[rank] for rank in ranks]
        made = ProcessGroupInflight(store, ranks.index(self._rank), len(ranks), split, seconds, globally)
        made.setGroupName(name)
        made.setGroupDesc(group_desc or f"{self._desc}:split")
        return made

    splitGroup = split_group  # noqa: N815  # the name that torch's C++ looks for

    def _get_sequence_number_for_group(self) -> int:
        """Return the number of collectives issued so far."""
        return self._comm.seq

    def _set_sequence_number_for_group(self) -> None:
        """Sequence numbers start at 1 with the group; there is nothing to exchange."""

    # issuing ------------------------------------------------------------------------------------------------

    def _issue(
        self,
        op: str,
        operations: Sequence[Operation],
        outputs: _Tensors,
        opts: Any,
        timeout: Any = None,
        *,
        inputs: _Tensors | None = None,
    ) -> Any:
        """Issue and record it; without ``inputs`` they are the outputs."""
        lane = self._lane
        row = lane.begin(op, outputs, inputs)
        try:
            if compat.profiler_enabled():
                work = self._issue_profiled(op, operations, outputs, opts, timeout)
            else:
                is_async = opts is None or forms.is_async(opts) or self._coalesces()
                work = None if is_async else self._comm.run_now(operations)
                if work is None:
                    if timeout is None and opts is not None:
                        timeout = opts.timeout
                    work = self._comm.enqueue(op, operations, outputs, compat.timeout_s(timeout, self._timeout_s))
                    if is_async:
                        self._issued(work, outputs)
        except BaseException as error:
            row[FATE] = flight_recorder.failed(error)
            raise
        if lane.enabled:
            completion = work.completion
            row[FATE] = monotonic() if completion is None else flight_recorder.follow(completion)
        return work

    def _issue_profiled(
        self, op: str, operations: Sequence[Operation], outputs: _Tensors, opts: Any, timeout: Any
    ) -> Any:
        name, is_async = f"{BACKEND}:{op}", opts is None or forms.is_async(opts) or self._coalesces()
        if not is_async:
            with compat.record_shapes(name, outputs):
                done = self._comm.run_now(operations)
            if done is not None:
                return done
        timeout = opts.timeout if timeout is None and opts is not None else timeout
        end = compat.begin_span(f"{name} (in flight)")

        def run() -> None:
            try:
                for operation in operations:
                    operation()
            finally:
                end()  # before the work is complete: whoever waited for it may end the profiler next

        with compat.record_shapes(name, outputs):
            work = self._comm.enqueue(op, [run], outputs, compat.timeout_s(timeout, self._timeout_s))
        return self._issued(work, outputs) if is_async else work

    def _issued(self, work: Any, outputs: _Tensors) -> Any:
        if compat.inflight_allowed():
            for tensor in outputs:
                if compat.has_storage(tensor):  # else nothing could wait for it by tensor
                    work_registry.register(tensor, work)
        if self._coalescing is not None and self._coalesces():
            self._coalescing.append(work)
        return work

    def _open(self, call: str) -> Communicator:
        if self._closed:
            raise GroupDestroyedError(f"{call}: {self.describe()} {self._closed}")
        return self._comm

    def forked(self) -> None:
        """Refuse everything from here on; called in a forked child."""
        self._closed = (
            f"belongs to process {os.getppid()}, not to its forked child {os.getpid()}; issue collectives from the "
            "rank itself"
        )

    def _coalesces(self) -> bool:
        return self._coalescing is not None and self._coalescing_thread == threading.get_ident()

    # collectives --------------------------------------------------------------------------------------------

    def allreduce(self, tensors: _Tensors | torch.Tensor, opts: Any = None, timeout: Any = None) -> Any:
        """Reduce one tensor over the ranks, in place."""
        comm, (tensor,) = self._open("all_reduce"), forms.single("all_reduce", tensors)
        return self._issue(
            "all_reduce", [comm.all_reduce(tensor, forms.reduction(opts))], (tensor,), forms.options(opts), timeout
        )

    def allreduce_coalesced(self, tensors: _Tensors, opts: Any = None) -> Any:
        """Reduce several tensors over the ranks, in place, as one work."""
        comm, op = self._open("all_reduce_coalesced"), forms.reduction(opts)
        tensors = forms.plain_all(tensors)
        return self._issue("all_reduce_coalesced", [comm.all_reduce(t, op) for t in tensors], tuple(tensors), opts)

    def reduce(self, tensors: _Tensors | torch.Tensor, opts: Any = None, *args: Any) -> Any:
        """Reduce one tensor over the ranks, in place on the root."""
        comm, (tensor,) = self._open("reduce"), forms.single("reduce", tensors)
        if isinstance(opts, int):
            root, op = self._peer("reduce", opts), forms.reduction(args[0] if args else None)
        else:
            root, op = self._peer("reduce", opts.rootRank), forms.reduction(opts)
        outputs = (tensor,) if root == self._rank else ()
        return self._issue("reduce", [comm.reduce(tensor, root, op)], outputs, forms.options(opts), inputs=(tensor,))

    def broadcast(self, tensors: _Tensors | torch.Tensor, opts: Any = None, timeout: Any = None) -> Any:
        """Copy the root's tensor to the others."""
        comm, (tensor,) = self._open("broadcast"), forms.single("broadcast", tensors)
        root = self._peer("broadcast", opts if isinstance(opts, int) else opts.rootRank)
        return self._issue("broadcast", [comm.broadcast(tensor, root)], (tensor,), forms.options(opts), timeout)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Any:
        """Gather every rank's tensor into a list on every rank."""
        comm, (tensor,), targets = self._open("all_gather"), forms.single("all_gather", inputs), forms.per_rank(outputs)
        operations, options = [comm.all_gather(targets, tensor)], forms.options(opts)
        return self._issue("all_gather", operations, targets, options, timeout, inputs=(tensor,))

    def allgather_coalesced(self, output_lists: Sequence[_Tensors], inputs: _Tensors, opts: Any = None) -> Any:
        """Gather several tensors; ``output_lists[rank][i]`` receives that rank's i-th tensor."""
        comm, inputs = self._open("all_gather_coalesced"), forms.plain_all(inputs)
        output_lists = [forms.plain_all(row) for row in output_lists]
        columns = [[row[i] for row in output_lists] for i in range(len(inputs))]
        operations = [comm.all_gather(column, t) for column, t in zip(columns, inputs, strict=True)]
        outputs = [t for row in output_lists for t in row]
        return self._issue("all_gather_coalesced", operations, outputs, opts, inputs=inputs)

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Any:
        """Gather every rank's tensor into one tensor on every rank."""
        comm, output, tensor = self._open("all_gather_into_tensor"), forms.plain(output), forms.plain(tensor)
        operations = [comm.all_gather_into(output, tensor)]
        return self._issue("all_gather_into_tensor", operations, (output,), opts, inputs=(tensor,))

    def all_gather_single_coalesced(self, outputs: _Tensors, inputs: _Tensors, opts: Any = None) -> Any:
        """Gather several tensors into one tensor each, as one work."""
        comm = self._open("all_gather_into_tensor_coalesced")
        outputs, inputs = forms.plain_all(outputs), forms.plain_all(inputs)
        operations = [comm.all_gather_into(o, i) for o, i in zip(outputs, inputs, strict=True)]
        return self._issue("all_gather_into_tensor_coalesced", operations, tuple(outputs), opts, inputs=inputs)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, *args: Any) -> Any:
        """Gather every rank's tensor into a list on the root."""
        comm, (tensor,), targets = self._open("gather"), forms.single("gather", inputs), forms.per_rank(outputs)
        root = self._peer("gather", opts if isinstance(opts, int) else opts.rootRank)
        operations, options = [comm.gather(targets, tensor, root)], forms.options(opts)
        return self._issue("gather", operations, targets, options, *args, inputs=(tensor,))

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, *args: Any) -> Any:
        """Send the root's i-th tensor to rank i."""
        comm, (output,), sources = self._open("scatter"), forms.single("scatter", outputs), forms.per_rank(inputs)
        root = self._peer("scatter", opts if isinstance(opts, int) else opts.rootRank)
        operations, options = [comm.scatter(output, sources, root)], forms.options(opts)
        return self._issue("scatter", operations, (output,), options, *args, inputs=sources)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Any:
        """Reduce lists of tensors over the ranks; rank i keeps the i-th."""
        comm, (output,), sources = (
            self._open("reduce_scatter"),
            forms.single("reduce_scatter", outputs),
            forms.per_rank(inputs),
        )
        operation = comm.reduce_scatter(output, sources, forms.reduction(opts))
        options = forms.options(opts)
        return self._issue("reduce_scatter", [operation], (output,), options, timeout, inputs=sources)

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Any:
        """Reduce one tensor over the ranks; rank i keeps the i-th part."""
        comm, op = self._open("reduce_scatter_tensor"), forms.reduction(opts)
        output, tensor = forms.plain(output), forms.plain(tensor)
        operations = [comm.reduce_scatter_into(output, tensor, op)]
        return self._issue("reduce_scatter_tensor", operations, (output,), opts, inputs=(tensor,))

    def reduce_scatter_single_coalesced(self, outputs: _Tensors, inputs: _Tensors, opts: Any = None) -> Any:
        """Reduce and scatter several tensors as one work."""
        comm, op = self._open("reduce_scatter_tensor_coalesced"), forms.reduction(opts)
        outputs, inputs = forms.plain_all(outputs), forms.plain_all(inputs)
        operations = [comm.reduce_scatter_into(o, i, op) for o, i in zip(outputs, inputs, strict=True)]
        return self._issue("reduce_scatter_tensor_coalesced", operations, tuple(outputs), opts, inputs=inputs)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> Any:
        """Exchange the rows of one tensor; splits count rows per rank, empty means even."""
        comm, output, tensor = self._open("all_to_all_single"), forms.plain(output), forms.plain(tensor)
        operation = comm.all_to_all_single(output, tensor, output_splits, input_splits)
        return self._issue("all_to_all_single", [operation], (output,), forms.options(opts), inputs=(tensor,))

    def alltoall(self, outputs: _Tensors, inputs: _Tensors, opts: Any = None) -> Any:
        """Exchange lists of tensors: ``inputs[i]`` goes to rank i."""
        comm, outputs, inputs = self._open("all_to_all"), forms.plain_all(outputs), forms.plain_all(inputs)
        operations, options = [comm.all_to_all(outputs, inputs)], forms.options(opts)
        return self._issue("all_to_all", operations, tuple(outputs), options, inputs=inputs)

    def barrier(self, opts: Any = None, timeout: Any = None) -> Any:
        """Return on no rank before all have entered."""
        comm, opts = self._open("barrier"), forms.options(opts)
        seconds = compat.timeout_s(opts.timeout if timeout is None and opts is not None else timeout, self._timeout_s)
        return self._issue("barrier", [comm.barrier(seconds)], (), opts, timeout)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Block until all ranks have entered; rank 0's error names the first rank that did not, or all of them."""
        seconds = self._timeout_s if timeout is None else timeout.total_seconds()
        comm = self._open("monitored_barrier")
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
        comm, (tensor,) = self._open("send"), forms.single("send", tensors)
        with self._profiled("send", tensor), self._lane.begin_message("send", tensor, dst, tag) as message:
            return self._issued(message.issued(comm.send(tensor, dst, tag, self._timeout_s)), ())

    def recv(self, tensors: _Tensors, src: int, tag: int) -> Any:
        """Receive from a group rank; with the send there, not collective."""
        comm, (tensor,) = self._open("recv"), forms.single("recv", tensors)
        with self._profiled("recv", tensor), self._lane.begin_message("recv", tensor, src, tag) as message:
            return self._issued(message.issued(comm.recv(tensor, src, tag, self._timeout_s)), (tensor,))

    def recv_anysource(self, tensors: _Tensors, tag: int) -> Any:
        """Receive from whichever rank sends; the work's ``source_rank()`` says which it was."""
        comm, (tensor,) = self._open("recv"), forms.single("recv", tensors)
        with self._profiled("recv", tensor), self._lane.begin_message("recv", tensor, None, tag) as message:
            return self._issued(message.issued(comm.recv(tensor, None, tag, self._timeout_s)), (tensor,))

    @staticmethod
    def _profiled(op: str, tensor: torch.Tensor) -> AbstractContextManager[Any]:
        return compat.record_shapes(f"{BACKEND}:{op}", [tensor]) if compat.profiler_enabled() else nullcontext()

    # coalescing ---------------------------------------------------------------------------------------------

    def _start_coalescing(self, _device: Any) -> None:
        self._coalescing, self._coalescing_thread = [], threading.get_ident()

    def _end_coalescing(self, _device: Any) -> Any:
        works, self._coalescing = self._coalescing or [], None
        completion = CoalescedCompletion(self._name, [work.completion for work in works], self._timeout_s)
        return Work(completion, [tensor for work in works for tensor in work.result()])

    # life ---------------------------------------------------------------------------------------------------

    def pending_works(self) -> Sequence[Completion]:
        """Return what is enqueued and not complete, oldest first."""
        return () if self._closed else self._comm.pending_works()

    def shutdown(self) -> None:
        """Wait for pending works, at most the group's timeout, and free the communicator; again does nothing.

        **Collective:** over the group, in any order relative to other groups.
        """
        if self._closed:
            return
        self._closed = _DESTROYED
        group_set.discard(self._ticket)
        if _mpi.started():
            self._comm.shutdown(self._timeout_s)

    def abort(self) -> None:
        """Stop accepting operations without waiting for pending ones; MPI cannot cancel those.

        **Local:** what is enqueued and not running fails; the communicator is left to MPI's own end.
        """
        if not self._closed:
            self._closed = _DESTROYED
            group_set.discard(self._ticket)
            self._comm.abort()

    def _peer(self, call: str, rank: int) -> int:
        if not 0 <= rank < self._size:
            msg = f"{call}: root {rank} is not in {self.describe()}; expected 0 to {self._size - 1}"
            raise InvalidArgumentError(msg)
        return rank


compat.keep_out_of_dynamo(GroupIdentity, ProcessGroupInflight, Work, DoneWork)
