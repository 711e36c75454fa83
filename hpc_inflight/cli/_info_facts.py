"""What ``hpc-inflight info`` gathers: one rank's facts, and a real all_reduce of each kind."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import shutil
import socket
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

import hpc_inflight as hi
from hpc_inflight import _mpi, launchers

if TYPE_CHECKING:
    from collections.abc import Callable

_MIB = 1024 * 1024
_REPEATS = 20
SMALL, LARGE = 4, 4 * _MIB
"""Bytes of the two all_reduces that are timed."""


@dataclass(frozen=True)
class Facts:
    """What one rank knows of itself; empty texts where there is nothing to say.

    Attributes:
        cores: Numbers of the CPUs that it may run on.
        cpus_of_node: Number of CPUs that the node has.
        threads: Threads that torch starts for one operation.
        nccl_env: Variables that begin with NCCL_.
        nvidia_devices: Whether the node has NVIDIA device files, whatever torch makes of them.
        shm_free_mib: Free space of /dev/shm in MiB; -1 where there is none.
        address: What the host name resolves to.
    """

    rank: int = 0
    world_size: int = 1
    node_rank: int = 0
    local_rank: int = 0
    local_world_size: int = 1
    hostname: str = ""
    address: str = ""
    device: str = "cpu"
    device_name: str = ""
    device_uuid: str = ""
    cuda_visible_devices: str = ""
    nvidia_devices: bool = False
    cores: tuple[int, ...] = ()
    cpus_of_node: int = 1
    threads: int = 1
    shm_free_mib: int = -1
    launcher: str = ""
    mpi: str = ""
    mpi_path: str = ""
    thread_level: str = ""
    python: str = ""
    hpc_inflight: str = ""
    mpi4py: str = ""
    torch: str = ""
    torch_cuda: str = ""
    cupy: str = ""
    nccl: str = ""
    nccl_path: str = ""
    nccl_env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Timing:
    """An all_reduce that was done; ``error`` says why when it was not."""

    kind: str
    small_us: float = 0.0
    large_us: float = 0.0
    error: str = ""
    unsupported: bool = False


def gather(world: hi.World | None) -> Facts:
    """Return this rank's facts.

    **Local:** uses torch.cuda where a device is there; CuPy is not imported, since its version is in its metadata.

    Args:
        world: What `init` returned; None without MPI.
    """
    launcher = launchers.launcher_from_env(os.environ)
    hostname = socket.gethostname()
    nccl, nccl_path = _nccl()
    device = torch.device("cpu") if world is None else world.device
    mpi_path = ""
    if world is not None:
        mpi_path = next((path for name in launchers.MPI_FILES if (path := _mapped(name))), "")
    return Facts(
        rank=0 if world is None else world.rank,
        world_size=1 if world is None else world.world_size,
        node_rank=0 if world is None else world.node_rank,
        local_rank=0 if world is None else world.local_rank,
        local_world_size=1 if world is None else world.local_world_size,
        hostname=hostname,
        address=_resolve(hostname),
        device=str(device),
        device_name=torch.cuda.get_device_name(device) if device.type == "cuda" else "",
        device_uuid=_uuid(device),
        cuda_visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES", "not set"),
        nvidia_devices=Path("/dev/nvidiactl").exists(),
        cores=tuple(sorted(os.sched_getaffinity(0))),
        cpus_of_node=os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        shm_free_mib=shutil.disk_usage("/dev/shm").free // _MIB if Path("/dev/shm").is_dir() else -1,  # noqa: S108
        launcher="none" if launcher is None else launcher.name,
        mpi="" if world is None else _mpi.library_line(_mpi.mpi()),
        mpi_path=mpi_path,
        thread_level="" if world is None else world.thread_level,
        python=platform.python_version(),
        hpc_inflight=hi.__version__,
        mpi4py=_version("mpi4py"),
        torch=torch.__version__,
        torch_cuda=torch.version.cuda or "",
        cupy=_version("cupy", "cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x"),
        nccl=nccl,
        nccl_path=nccl_path,
        nccl_env={name: value for name, value in sorted(os.environ.items()) if name.startswith("NCCL_")},
    )


def time_all_reduce(world: hi.World, kind: str) -> Timing:
    """Sum over the ranks on the CPU or on the ranks' GPUs, check the sums and time them.

    **Collective:** over the world; every rank names the same kind.

    Args:
        world: What `init` returned.
        kind: ``"cpu"`` or ``"cuda"``.
    """
    device = torch.device("cpu") if kind == "cpu" else world.device
    try:
        small, large = (_time_one(world, torch.empty(size // 4, device=device)) for size in (SMALL, LARGE))
    except hi.UnsupportedError as error:
        return Timing(kind, error=str(error), unsupported=True)
    except Exception as error:  # noqa: BLE001  # whatever it is, the table says it
        return Timing(kind, error=f"{type(error).__name__}: {error}")
    return Timing(kind, small, large)


def _time_one(world: hi.World, tensor: torch.Tensor) -> float:
    """Return the median time in us; the host waits for each, so that a GPU's time is counted."""
    wait: Callable[[], None] = torch.cuda.synchronize if tensor.is_cuda else lambda: None
    expected = world.world_size * (world.world_size + 1) / 2
    times = []
    for _ in range(_REPEATS):
        tensor.fill_(world.rank + 1.0)
        wait()
        started = time.perf_counter()
        dist.all_reduce(tensor)
        wait()
        times.append(1e6 * (time.perf_counter() - started))
        if tensor[0].item() != expected or tensor[-1].item() != expected:
            msg = f"all_reduce of {tensor.nbytes} bytes gave {tensor[0].item()} and {tensor[-1].item()}, not {expected}"
            raise hi.InflightError(msg)
    return statistics.median(times)


def _mapped(name: str) -> str:
    return next((file for file in _mpi.mapped_files() if Path(file).name.startswith(name)), "")


def _uuid(device: torch.device) -> str:
    if device.type != "cuda":
        return ""
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))


def _resolve(hostname: str) -> str:
    try:
        return str(socket.getaddrinfo(hostname, None)[0][4][0])
    except OSError:
        return ""


def _version(*names: str) -> str:
    """Return the version of the first of these distributions that is installed."""
    for name in names:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return version if len(names) == 1 else f"{name} {version}"
    return ""


class _Symbol(ctypes.Structure):
    """What ``dladdr`` says of an address."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def _nccl() -> tuple[str, str]:
    """Return version and path of the NCCL that torch and CuPy call.

    A process may have mapped two, as with one in LD_PRELOAD beside the one that torch brings. The loader gives out the
    first of that name, to this function as to them.
    """
    try:
        library = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return "", ""
    number, symbol = ctypes.c_int(), _Symbol()
    if library.ncclGetVersion(ctypes.byref(number)):
        return "", ""
    ctypes.CDLL(None).dladdr(ctypes.cast(library.ncclGetVersion, ctypes.c_void_p), ctypes.byref(symbol))
    major, rest = divmod(number.value, 10000)
    return f"{major}.{rest // 100}.{rest % 100}", os.fsdecode(symbol.file or b"")
