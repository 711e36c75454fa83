"""The one module that imports CuPy: CUDA's and NCCL's calls by raw handle, as functions of one `Runtime`.

Importing this module starts nothing. `runtime` imports CuPy at the first use of a CUDA tensor in a group. What is
here is all that the NCCL communicator asks of a GPU, so that another object with these attributes can stand in.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from typing import TYPE_CHECKING, Any, Final, NoReturn

import torch

from hpc_inflight import _torch_compat as compat
from hpc_inflight.errors import NCCLError, NCCLUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

_EVENT_WITHOUT_TIME: Final = 2  # cudaEventDisableTiming: recording one costs less
_NOT_READY: Final = 600  # cudaErrorNotReady
_NON_BLOCKING: Final = 1  # cudaStreamNonBlocking: apart from the legacy default stream
_HIGH: Final = -1  # a collective that waits for its turn holds up every rank
_THREAD_LOCAL: Final = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
_RELAXED: Final = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_DEVICE_TO_DEVICE: Final = 3  # cudaMemcpyDeviceToDevice
_SHARING_SINCE: Final = 23000  # NCCL 2.30

# NCCL's results; CuPy's own table ends at 5, and a code that it lacks comes out of it as a KeyError
_RESULTS: Final = {
    1: "a CUDA call failed (ncclUnhandledCudaError)",
    2: "a system call failed (ncclSystemError)",
    3: "an internal check failed (ncclInternalError)",
    4: "an argument was refused (ncclInvalidArgument)",
    5: "the calls do not fit each other (ncclInvalidUsage)",
    6: "another rank or the network to it failed (ncclRemoteError)",
    7: "it has not ended yet (ncclInProgress)",
    8: "a timeout of NCCL's own passed (ncclTimeout)",
}

_lock = threading.Lock()
_runtime: Runtime | None = None


class Runtime:
    """CUDA and NCCL by raw handles: integers for streams, events and addresses.

    All functions are **Local:** and, but for those that say so, enqueue and return. Those that touch a stream of
    handle 0 mean the current device's.

    Attributes:
        events: Unused events, by device. They outlive groups, as works that somebody keeps do.
        streams: Unused streams, by device.
        nccl_version: Such as 22809 for 2.28.9.
        current_stream: ``current_stream(index)`` is the raw current stream of a device.
        current_device: ``current_device()`` is the index of the current device.
        capturing: ``capturing()`` says whether the current stream is being captured.
        event_record: ``event_record(event, stream)``.
        stream_wait: ``stream_wait(stream, event)``.
        group_start, group_end: Of NCCL; they nest.
    """

    def __init__(self) -> None:
        self._cuda, self._nccl = _import_cupy()
        self.events: dict[int, list[int]] = {}
        self.streams: dict[int, list[Any]] = {}
        self._kept: set[int] = set()  # ids of the communicators that have not ended
        self.nccl_version: int = self._nccl.get_version()
        self.current_stream, self.current_device, self.capturing = compat.cuda_functions()
        self.event_record: Callable[[int, int], None] = self._cuda.eventRecord
        self.stream_wait: Callable[[int, int], None] = self._cuda.streamWaitEvent
        self.group_start: Callable[[], None] = self._nccl.groupStart
        self.group_end: Callable[[], None] = self._nccl.groupEnd
        self._query = self._cuda.eventQuery
        self._copy = self._cuda.memcpyAsync

    def event_create(self) -> int:
        """Make an event without timing, on the current device."""
        event: int = self._cuda.eventCreateWithFlags(_EVENT_WITHOUT_TIME)
        return event

    def event_done(self, event: int) -> bool:
        """Say whether what an event was recorded behind is complete.

        Raises:
            NCCLError: Something failed on the device before it.
        """
        status = self._query(event)
        if status and status != _NOT_READY:
            msg = f"CUDA reports error {status} for work that was issued before; see CUDA's own messages above"
            raise NCCLError(msg)
        return not status

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Copy bytes on the device."""
        self._copy(target, source, nbytes, _DEVICE_TO_DEVICE, stream)

    def new_stream(self, index: int) -> Any:
        """Make a stream, as torch has it. torch's own are 32, given out in turn: messages would share one and block."""
        with torch.cuda.device(index):
            try:
                handle = self._cuda.streamCreateWithPriority(_NON_BLOCKING, _HIGH)
            except AttributeError:  # before CuPy 14, which has no priorities
                handle = self._cuda.streamCreateWithFlags(_NON_BLOCKING)
        return torch.cuda.ExternalStream(handle, device=torch.device("cuda", index))

    def zeros(self, index: int) -> torch.Tensor:
        """Return a tensor of one element."""
        return torch.zeros(1, device=torch.device("cuda", index))

    def raw_stream(self, stream: Any) -> int:
        """Return the handle of a stream of `new_stream`."""
        handle: int = stream.cuda_stream
        return handle

    def run_on(self, stream: Any, function: Callable[[], None]) -> None:
        """Run torch operations with ``stream`` as the current one."""
        with torch.cuda.stream(stream):
            function()

    def on_device(self, index: int) -> AbstractContextManager[None]:
        """Make a device the current one inside, and the former one afterwards."""
        return torch.cuda.device(index)

    def future(self, index: int) -> torch.futures.Future[Any]:
        """Return a future whose value is tensors of a device."""
        return torch.futures.Future(devices=[torch.device("cuda", index)])

    def settle_device(self, index: int) -> None:
        """Make a device the current one of this thread, for good; what it does ends no other thread's capture.

        Connecting and ending communicators allocates, frees and waits, which a capture in global mode forbids to all.
        """
        self._cuda.setDevice(index)
        relax_captures()

    def exchange_capture_mode(self, mode: int) -> int | None:
        """Set what this thread may ask of CUDA beside captures; return what was set, None if that was not possible."""
        held = ctypes.c_int(mode)
        try:  # CuPy has no name for the call
            refused = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(held))
        except OSError:  # CuPy can be imported where there is no driver
            return None
        return None if refused else held.value

    def uuid(self, index: int) -> str:
        """Return the identity of a device, the same for every process that sees it."""
        raw = bytes(self._cuda.getDeviceProperties(index)["uuid"])[:16].hex()
        return f"GPU-{raw[:8]}-{raw[8:12]}-{raw[12:16]}-{raw[16:20]}-{raw[20:]}"

    def shares_devices(self) -> bool:
        """Say whether NCCL lets several ranks use one device."""
        return self.nccl_version >= _SHARING_SINCE and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"

    def unique_id(self) -> bytes:
        """Make the id by which the ranks of a communicator find each other."""
        made = self._nccl.get_unique_id()  # a tuple of signed numbers before CuPy 14
        return bytes(value % 256 for value in made) if isinstance(made, tuple) else bytes(made)

    def communicator(self, size: int, unique_id: bytes, rank: int) -> Any:
        """Make a communicator on the current device; blocks until every rank of it is there.

        It outlives every reference to it, until `destroy` or `abort`: a garbage collector that destroyed it would do
        so at a time of its own, on one rank, maybe in the middle of a collective.
        """
        try:
            communicator = self._nccl.NcclCommunicator(size, unique_id, rank)
        except TypeError:  # before CuPy 14, which wants signed numbers
            signed = tuple((value + 128) % 256 - 128 for value in unique_id)
            communicator = self._nccl.NcclCommunicator(size, signed, rank)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(communicator))
        self._kept.add(id(communicator))
        return communicator

    def destroy(self, communicator: Any) -> None:
        """Destroy a communicator on which nothing is left to do, once; may block."""
        if self._take(communicator):
            communicator.destroy()
            self._let_go(communicator)

    def abort(self, communicator: Any) -> None:
        """Destroy a communicator with what runs on it, once; may block."""
        if self._take(communicator):
            communicator.abort()
            self._let_go(communicator)

    def _take(self, communicator: Any) -> bool:
        """Say whether it is the caller who ends it: nobody asks it anything, or ends it again, from here on."""
        with _lock:
            if id(communicator) not in self._kept:
                return False
            self._kept.remove(id(communicator))
            return True

    @staticmethod
    def _let_go(communicator: Any) -> None:
        # once: a second time would take a reference that belongs to someone else
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(communicator))

    def check(self, communicator: Any) -> None:
        """Ask NCCL whether anything has failed on a communicator; one that ends is not asked.

        Raises:
            NCCLError: It has.
        """
        with _lock:  # NCCL frees it in a thread of its own, before CuPy forgets its address
            if id(communicator) not in self._kept:
                return
            try:
                communicator.check_async_error()
            except Exception as error:  # noqa: BLE001  # CuPy raises KeyError for what it does not know
                raise_nccl_error("an operation in flight", error)


def raise_nccl_error(what: str, error: BaseException) -> NoReturn:
    """Raise what NCCL answered, with its number, or ``error`` itself if it is something else.

    Raises:
        NCCLError: NCCL's status.
    """
    status = getattr(error, "status", None)
    if status is None and isinstance(error, KeyError) and error.args and isinstance(error.args[0], int):
        status = error.args[0]
    if status is None:
        raise error
    text = _RESULTS.get(status, "NCCL gives no reason that this package knows")
    msg = f"{what}: NCCL status {status}: {text}; NCCL_DEBUG=WARN in the environment makes NCCL say more"
    raise NCCLError(msg) from error


def _extra() -> str:
    return f"hpc_inflight[cuda{(torch.version.cuda or '12').partition('.')[0]}]"


def _import_cupy() -> tuple[Any, Any]:
    try:
        from cupy.cuda import nccl, runtime  # importing it at the top would make `import hpc_inflight` need a GPU
    except Exception as error:  # whatever fails in there: a library of another version, no driver
        msg = f"CUDA tensors need CuPy, which cannot be imported here ({error}); `pip install {_extra()!r}`"
        raise NCCLUnavailableError(msg) from error
    if not nccl.available:
        msg = (
            "CUDA tensors need CuPy with NCCL, and the CuPy found here could not load libnccl.so.2; "
            f"`pip install {_extra()!r}`, and a torch whose own NCCL can be loaded, or LD_PRELOAD one"
        )
        raise NCCLUnavailableError(msg)
    return runtime, nccl


def relax_captures() -> bool:
    """Keep what this thread asks CUDA from ending another thread's capture, whatever mode that is in.

    **Local:** for the thread's life; says whether it is done. Nothing is done before the first use of CUDA tensors in a
    group: a process that uses no GPU gets no CUDA context.
    """
    return _runtime is not None and _runtime.exchange_capture_mode(_THREAD_LOCAL) is not None


@contextlib.contextmanager
def apart_from_captures(runtime: Runtime) -> Iterator[None]:
    """Keep what this thread asks CUDA inside from ending another thread's capture.

    **Local:** around what a thread does that captures nothing itself. NCCL's launches ask about an event of its own
    where a graph holds the communicator, and torch may allocate, without a word to CUDA that no capture need mind.
    """
    before = runtime.exchange_capture_mode(_RELAXED)
    try:
        yield
    finally:
        if before is not None:
            runtime.exchange_capture_mode(before)


def runtime() -> Runtime:
    """Return this process's runtime, importing CuPy at the first call.

    **Local:** any thread.

    Raises:
        NCCLUnavailableError: CuPy or its NCCL is missing, or cannot be loaded.
    """
    global _runtime  # noqa: PLW0603  # CUDA is one per process
    if _runtime is None:
        with _lock:
            if _runtime is None:
                _runtime = Runtime()
    return _runtime
