"""From N started processes to a world of ranks, and back."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import socket
import sys
import threading
import time
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from hpc_inflight import _dump_signal, _mpi, failure, group_set, launchers, store, topology, work_registry
from hpc_inflight._mpi_agree import agree, allgather
from hpc_inflight.communicators._mpi_worker import inside_mpi
from hpc_inflight.config import config
from hpc_inflight.errors import (
    AlreadyInitializedError,
    InflightError,
    InvalidArgumentError,
    LaunchError,
    NotInitializedError,
)
from hpc_inflight.watchdog import watchdog

_FAREWELL_S = 1.0  # ranks that end together do so within this; one that ends alone tells the others

_log = logging.getLogger(__name__)
_lock = threading.Lock()
_world: World | None = None
_exit_hook_installed = False


@dataclass(frozen=True)
class World:
    """Who this process is.

    Attributes:
        rank: Rank in the world, from 0.
        world_size: Number of ranks.
        local_rank: Rank among the ranks that share this node's memory.
        local_world_size: Number of those.
        node_rank: Index of the node, in the order of the nodes' lowest ranks.
        hostname: Name of the node.
        device: Where this rank's tensors belong: its GPU, or the CPU.
        thread_level: What MPI grants: ``"single"``, ``"funneled"``, ``"serialized"`` or ``"multiple"``.
        mpi_vendor: Such as ``"Open MPI"`` or ``"MPICH"``.
        mpi_version: The library's version, such as ``(5, 0, 11)``.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    hostname: str
    device: torch.device
    thread_level: str
    mpi_vendor: str
    mpi_version: tuple[int, ...]


def init(
    *, timeout_s: float = 600.0, device: str | None = None, eager: bool = False, on_unwaited: str | None = None
) -> World:
    """Start the ranks: bring MPI up, find out who is where, and make torch's default group.

    **Collective:** every rank, once, before any collective. Alone, as plain ``python``, it makes a world of one.
    Neither MASTER_ADDR nor a port is used. An exception that no one catches ends the whole job from here on.

    Args:
        timeout_s: Seconds that any collective of the default group, and this call, may wait for the other ranks.
        device: ``"cpu"`` to use no GPU; by default the rank's GPU where there is one.
        eager: Connect the default group's NCCL communicator here rather than at its first operation on CUDA tensors,
            so that what is wrong with a GPU or its network is an error here. Nothing happens on ranks without a GPU.
        on_unwaited: What `finalize`, the interpreter's exit and leaving `allow_inflight_collective_as_graph_input`
            do about registered works that nobody waited for: ``"warn"``, ``"raise"`` or ``"ignore"``; by default
            what ``HPC_INFLIGHT_ON_UNWAITED`` says, else they warn. At the exit, which can raise nothing, they print.

    Returns:
        The rank's place in the world.

    Raises:
        AlreadyInitializedError: A default group exists.
        InvalidArgumentError: ``timeout_s`` is not positive, ``device`` is neither None nor ``"cpu"``, or
            ``on_unwaited`` or the environment holds what it cannot.
        LaunchError: The launcher and MPI disagree, the ranks loaded different MPI libraries, or a rank has no GPU while
            others have.
        MPIUnavailableError: No MPI library.
        NCCLUnavailableError: With ``eager``: a rank has no CuPy or NCCL, or two ranks have the same GPU.
        NCCLError: With ``eager``: NCCL failed on a rank.
        CollectiveTimeout: A rank did not come.
    """
    global _world  # noqa: PLW0603  # a process is one rank
    with _lock:
        if _world is not None or dist.is_initialized():
            how = "init()" if _world is not None else "torch.distributed.init_process_group()"
            msg = f"init: {how} was called before in this process; call finalize() (or destroy_process_group()) first"
            raise AlreadyInitializedError(msg)
        _mpi.mpi()
        install_hooks()
        world: World | None = None
        problem: InflightError | None = None
        try:
            if timeout_s <= 0:
                raise InvalidArgumentError(f"init: timeout_s={timeout_s}; expected a positive number of seconds")
            if device not in {None, "cpu"}:
                raise InvalidArgumentError(f"init: device={device!r}; expected None (the rank's GPU) or 'cpu'")
            config()
            work_registry.set_policy(on_unwaited)
        except InflightError as error:
            problem = error
        agree(problem, max(timeout_s, 1.0), "init")
        try:
            world = _survey(timeout_s, device)
        except InflightError as error:
            problem = error
        agree(problem, timeout_s, "init")
        assert world is not None  # noqa: S101  # for mypy: agree() raised otherwise
        connect = world.device if eager and world.device.type == "cuda" else None
        dist.init_process_group(
            "hpc_inflight", init_method="mpi://", timeout=timedelta(seconds=timeout_s), device_id=connect
        )
        _world = world
        return world


def _survey(timeout_s: float, device: str | None) -> World:
    mpi = _mpi.mpi()
    comm = _mpi.control_comm(timeout_s)
    shared = comm.Split_type(mpi.COMM_TYPE_SHARED)
    local_rank, local_size = shared.rank, shared.size
    leader = shared.bcast(comm.rank)
    shared.Free()
    place = topology.Place(
        leader=leader,
        local_rank=local_rank,
        hostname=socket.gethostname(),
        visible=0 if device == "cpu" else torch.cuda.device_count(),
        mask=os.environ.get("CUDA_VISIBLE_DEVICES"),
        library=_mpi.library_line(mpi),
    )
    places = allgather(place, timeout_s, "init")
    differs = launchers.library_differs([each.library for each in places])
    if differs is not None:
        raise LaunchError(f"init: {differs}")
    topology.check_devices(places)
    index = topology.device_index(place.visible, local_rank)
    levels = {
        mpi.THREAD_SINGLE: "single",
        mpi.THREAD_FUNNELED: "funneled",
        mpi.THREAD_SERIALIZED: "serialized",
        mpi.THREAD_MULTIPLE: "multiple",
    }
    level = levels[mpi.Query_thread()]
    if level != "multiple" and comm.rank == 0:
        _log.warning(
            "hpc_inflight: MPI grants MPI_THREAD_%s, so every collective runs in its caller and nothing overlaps; "
            "let init() start MPI, or ask for MPI_THREAD_MULTIPLE (mpi4py.rc.thread_level) where it is started",
            level.upper(),
        )
    vendor, version = mpi.get_vendor()
    return World(
        rank=comm.rank,
        world_size=comm.size,
        local_rank=local_rank,
        local_world_size=local_size,
        node_rank=topology.node_ranks([each.leader for each in places])[leader],
        hostname=place.hostname,
        device=torch.device("cpu") if index is None else torch.device("cuda", index),
        thread_level=level,
        mpi_vendor=vendor,
        mpi_version=tuple(version),
    )


def world() -> World:
    """Return what `init` found.

    **Local:** any thread, between ``init`` and ``finalize``.

    Raises:
        NotInitializedError: Outside of those.
    """
    if _world is None:
        msg = "world: no init() before this call, or finalize() came first; call init() on every rank"
        raise NotInitializedError(msg)
    return _world


def finalize(*, timeout_s: float = 60.0) -> None:
    """End the world: wait for pending works, destroy every group, also one that has failed, close the store.

    Synchronous collectives that are still running on a GPU are waited for like pending works.

    **Collective:** every rank, once, after its last collective. MPI itself ends with the process, so `init` may
    be called again.

    Args:
        timeout_s: Seconds for the other ranks to come here.

    Raises:
        NotInitializedError: No `init` before.
        DrainTimeout: Works were still pending; the groups are left as they are.
        UnwaitedError: With ``on_unwaited="raise"``: registered works were never waited; the world has ended.
    """
    global _world  # noqa: PLW0603  # a process is one rank
    with _lock:
        if _world is None:
            msg = "finalize: no init() before this call, or it was finalized already; call init() first"
            raise NotInitializedError(msg)
        _mpi.mpi()  # raises in a forked child, which must not answer for its parent
        group_set.settle(timeout_s, "finalize")
        if dist.is_initialized():
            dist.destroy_process_group()
        store.close_default_store(timeout_s)
        _world = None
        work_registry.report_unwaited()  # last: it may raise


def install_hooks() -> None:
    """Make the failure of one rank end the job, and the interpreter's exit orderly.

    **Local:** once per process; later calls do nothing. Installed by the first `init` or ``mpi://`` rendezvous.
    """
    global _exit_hook_installed  # noqa: PLW0603  # hooks are per process
    if _exit_hook_installed:
        return
    _exit_hook_installed = True
    failure.install()
    atexit.register(_at_exit, os.getpid())
    if config().dump_signal:
        _dump_signal.install(config().dump_signal)


def _at_exit(pid: int) -> None:
    if os.getpid() != pid or not _mpi.started():
        return
    failure.abort_for_exit()
    deadline = time.monotonic() + config().exit_timeout_s
    with contextlib.suppress(TimeoutError, InflightError):
        # what is un-issued elsewhere by now may never come; MPI_Finalize follows either way
        group_set.settle(config().exit_timeout_s, "the end of the process")
    work_registry.report_unwaited(at_exit=True)
    if not _mpi.everyone_ends(_FAREWELL_S):
        watchdog.say_farewell()
    store.close_default_store(max(0.0, deadline - time.monotonic()))
    watchdog.stop()  # MPI_Finalize follows
    if stuck := inside_mpi():
        sys.stderr.write(
            f"hpc_inflight: {work_registry.label()}: ends without MPI_Finalize, since a collective on group "
            f"{', '.join(stuck)} never returned: another rank has not issued it\n"
        )
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            if config().on_timeout == "raise" and not failure.exit_code():  # the program has handled it
                _mpi.leave_launcher(max(0.0, deadline - time.monotonic()))
        finally:
            os._exit(failure.exit_code())  # the launcher ends the others; beside that call MPI_Finalize would crash
