"""Every private or version-dependent torch call, in one place (torch 2.8 to 2.14)."""

from __future__ import annotations

import functools
import sys
import types
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as _c10d
from torch._C._profiler import _RecordFunctionFast
from torch.utils._python_dispatch import _disable_current_modes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

TORCH: Final = tuple(int(part) for part in torch.__version__.split(".")[:2])
if TORCH < (2, 8):
    # their c10d does not tell a backend which calls are asynchronous; with 2.7 FSDP gave wrong numbers, 2.6 hung
    raise ImportError(f"hpc_inflight needs torch 2.8 or newer and found {torch.__version__}; install a newer one")

BaseWork: Any = _c10d.Work
BaseProcessGroup: Any = dist.ProcessGroup
BaseStore: Any = _c10d.Store
PrefixStore: Any = _c10d.PrefixStore
BackendOptions: Any = _c10d.Backend.Options

NO_TIMEOUT: Final = timedelta(0)
UNSET_TIMEOUT: Final = timedelta(milliseconds=-1)  # what c10d's options hold where a call gives none

# PR #137763: torch's flag for collectives in flight as graph inputs
inflight_allowed: Callable[[], bool] = _c10d._allow_inflight_collective_as_graph_input
set_inflight_allowed: Callable[[bool], None] = _c10d._set_allow_inflight_collective_as_graph_input
registry_size: Callable[[], int] = _c10d._get_work_registry_size
# puts a work into torch's own registry, in this thread's part, under the storage of the tensor
register_in_torch: Callable[[torch.Tensor, Any], Any] = _c10d._register_work
_use_count: Callable[[int], int] = torch._C._storage_Use_Count
_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
# sparse tensors and some wrappers have no storage
has_storage: Callable[[torch.Tensor], bool] = torch._C._has_storage

# torch.ops resolves names at run time, and at the first use: `import` stays cheap
wait_tensor_op: Any = torch.ops._c10d_functional.wait_tensor.default

_libraries: list[torch.library.Library] = []  # what they register goes with them

_pop_works: Any = wait_tensor_op._op  # what the operator calls in the end

profiler_enabled: Callable[[], bool] = torch._C._autograd._profiler_enabled

# gradients pass through the operator itself on 2.13; on 2.9 it has no formula, and in between it was not tried
WAIT_TENSOR_HAS_GRADIENT: Final = TORCH >= (2, 13)
# torch's registry is per thread; from 2.11 on the operator looks into every thread's part, and pops the first that has
# the storage; on 2.8 and 2.10 only into its own thread's (2.9 was not tried)
WAIT_TENSOR_FINDS_EVERY_THREAD: Final = TORCH >= (2, 11)

# methods of CUDAGraph that end a capture; the second, its first half, is there from 2.14 on
CAPTURE_ENDS: Final = "capture_end", "capture_end_pre"

_OP_TYPES: Final = {
    name: getattr(_c10d.ReduceOp.RedOpType, name)
    for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
}
# a ReduceOp hashes as its type does, and asking for the hash is a sixth of the cost of asking for the type
REDUCE_OP_HASHES: Final = {hash(_c10d.ReduceOp(kind)): name for name, kind in _OP_TYPES.items() if name != "PREMUL_SUM"}


def reduce_op_name(op: Any) -> str:
    """Return the name of a ``ReduceOp`` or ``RedOpType``, such as ``"SUM"``."""
    name = REDUCE_OP_HASHES.get(hash(op))
    if name is None:
        kind = getattr(op, "op", op)
        name = next(name for name, known in _OP_TYPES.items() if known == kind)
    return name


def premul_factor(op: Any) -> Any:
    """Return the factor of a ``PREMUL_SUM``: a float or a one-element tensor."""
    return op.__getstate__()[1]


def _hidden(function: Callable[..., Any], tensor: torch.Tensor) -> Any:
    """Call ``function`` outside of active dispatch and function modes: what runs is no operation of the user."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        return function(tensor)


def alias_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return another tensor with the storage of ``tensor``."""
    # ``data`` and not ``detach()``: it does not go through the dispatcher, which is half of the cost
    alias: torch.Tensor = (
        _hidden(torch.Tensor.detach, tensor) if _dispatch_modes() or _function_modes() else tensor.data
    )
    return alias


def pop_from_torch(tensor: torch.Tensor) -> None:
    """Pop what torch's registry has for the storage in one thread's part; waiting is the only way it offers."""
    if _dispatch_modes() or _function_modes():
        _hidden(_pop_works, tensor)
    else:
        _pop_works(tensor)


def watch_wait_tensor(
    observe: Callable[[torch.Tensor, Callable[[], torch.Tensor]], torch.Tensor],
) -> None:
    """Have ``observe(tensor, wait)`` called for every ``wait_tensor`` on real data, from here on.

    The dispatcher goes through BackendSelect on every call, whether eager code, a compiled region or C++ made it.
    """
    below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)

    def kernel(keys: Any, tensor: torch.Tensor) -> torch.Tensor:
        def wait() -> torch.Tensor:
            waited: torch.Tensor = wait_tensor_op.redispatch(keys & below, tensor)
            return waited

        return observe(tensor, wait) if type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter else wait()

    library = torch.library.Library("_c10d_functional", "IMPL")
    library.impl("wait_tensor", kernel, "BackendSelect", with_keyset=True)
    _libraries.append(library)


def registers_elsewhere() -> bool:
    """Say whether torch may file a work under another thread than this, so that only that thread finds it."""
    return not WAIT_TENSOR_FINDS_EVERY_THREAD and torch._C._current_autograd_node() is not None


def storage_key(tensor: torch.Tensor) -> int:
    """Return a number that names the storage for as long as something keeps that storage alive."""
    return tensor.untyped_storage()._cdata  # type: ignore[no-any-return]  # torch's stubs leave it Any


def _storage_uses(tensor: torch.Tensor) -> int:
    storage = tensor.untyped_storage()  # held in a variable: it counts as a holder, always
    return _use_count(storage._cdata)


@functools.cache
def _uses_of_one_tensor() -> int:
    alone = torch.empty(1)
    return _storage_uses(alone)


def storage_is_shared(tensor: torch.Tensor) -> bool:
    """Say whether any other tensor holds the storage of ``tensor``."""
    return _storage_uses(tensor) > _uses_of_one_tensor()


def timeout_s(value: Any, default: float) -> float:
    """Turn an optional c10d timeout (None, unset, or a timedelta) into seconds."""
    if value is None:
        return default
    seconds = value.total_seconds() if isinstance(value, timedelta) else float(value)
    return seconds if seconds > 0 else default


def register_backend(name: str, creator: Callable[[Any, Any], Any], devices: list[str]) -> None:
    """Register a c10d backend under the extended API."""
    dist.Backend.register_backend(name, creator, extended_api=True, devices=devices)


def record_shapes(name: str, tensors: Sequence[torch.Tensor]) -> AbstractContextManager[Any]:
    """Show what runs inside as one event of torch.profiler, with the shapes of ``tensors``."""
    record: AbstractContextManager[Any] = _RecordFunctionFast(name, list(tensors))
    return record


def begin_span(name: str) -> Callable[[], None]:
    """Begin an event of torch.profiler and return what ends it, once, from any thread."""
    ended: torch.futures.Future[None] = torch.futures.Future()
    with torch.autograd.profiler.record_function(name) as span:
        span._call_end_callbacks_on_future(ended)
    return lambda: ended.set_result(None)


def sequence_number(group: Any) -> int:
    """Return how many collectives a group has issued."""
    return int(group._get_sequence_number_for_group())


def register_rendezvous(scheme: str, handler: Callable[..., Any]) -> None:
    """Register a rendezvous handler for the URLs of a scheme."""
    dist.register_rendezvous_handler(scheme, handler)  # type: ignore[attr-defined,no-untyped-call]  # untyped in torch


def requested_backend_map() -> dict[str, str] | None:
    """Return the device -> backend map of the group that c10d is making in this thread, if it can be seen.

    c10d hands a creator its store, rank and size but not the map, and lets a Python group take over every
    device whatever the map says; the frame that calls the creator is the only place that has both.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_new_process_group_helper":
            found = frame.f_locals.get("backend_config")
            return None if found is None else {k: str(v) for k, v in found.get_device_backend_map().items()}
        frame = frame.f_back  # type: ignore[assignment]  # None ends the loop
    return None


def keep_out_of_dynamo(*classes: type) -> None:
    """Have torch.compile run the methods of ``classes``, and all they call, as they are.

    A compiled function calls a group at its graph breaks, and compiled DDP in its forward; without this, dynamo would
    trace into the group's Python, which it cannot, where it leaves a C++ group alone.
    """
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    for cls in classes:
        for member in vars(cls).values():
            function = member.fget if isinstance(member, property) else member
            if isinstance(function, types.FunctionType):
                frames.set_code_exec_strategy(function.__code__, skip)


def run_first_in_backward(tensor: torch.Tensor) -> None:
    """Have autograd run the function that made ``tensor`` before whatever else is ready, as it does for leaves.

    It runs what has the highest number first, and numbers functions as they are made. A torch that cannot change
    that number runs it later, which costs overlap and nothing else.
    """
    node: Any = tensor.grad_fn
    if hasattr(node, "_set_sequence_nr"):
        node._set_sequence_nr(2**64 - 1)


def register_pytree(cls: type, flatten: Callable[[Any], Any], unflatten: Callable[[Any, Any], Any]) -> None:
    """Make instances of ``cls`` containers of tensors for torch's tree functions."""
    torch.utils._pytree.register_pytree_node(
        cls, flatten, unflatten, serialized_type_name=f"hpc_inflight.{cls.__name__}"
    )


def cuda_cycles_per_s(device: torch.device) -> float:
    """Measure how many cycles of `cuda_sleep` last a second, on the current stream."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    cycles = 20_000_000
    for _ in range(2):  # the first one wakes the device up
        with torch.cuda.device(device):
            begin.record()
            torch.cuda._sleep(cycles)
            end.record()
            end.synchronize()
    return 1e3 * cycles / float(begin.elapsed_time(end))


def cuda_sleep(device: torch.device, cycles: float) -> None:
    """Keep the current stream of a device busy; the host does not wait."""
    with torch.cuda.device(device):
        torch.cuda._sleep(int(cycles))


class Options(BackendOptions):  # type: ignore[misc]  # torch's stubs leave it Any
    """c10d's options of a backend, which split_group copies."""

    def __deepcopy__(self, _memo: object) -> Options:
        return Options(self.backend, self._timeout)


# CUDA: the names below exist only where torch was built for it, so they are looked up at the first use -------------


def cuda_functions() -> tuple[Callable[[int], int], Callable[[], int], Callable[[], bool]]:
    """Return what gives a device's current stream as a raw handle, the current device, and whether it is capturing."""
    c: Any = torch._C
    return c._cuda_getCurrentRawStream, c._cuda_getDevice, c._cuda_isCurrentStreamCapturing
