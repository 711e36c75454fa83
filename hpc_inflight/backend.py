"""The c10d backend ``"hpc_inflight"``: how a group is made, and what is checked before."""

from __future__ import annotations

from typing import Any

from hpc_inflight import _mpi, flight_recorder, work_registry
from hpc_inflight import _torch_compat as compat
from hpc_inflight._c10d_identity import BACKEND, DEVICES
from hpc_inflight._mpi_agree import agree, run_with_deadline, subset
from hpc_inflight.communicators.mpi import MPICommunicator
from hpc_inflight.errors import InflightError, InvalidArgumentError
from hpc_inflight.process_group import ProcessGroupInflight


def create(opts: Any, _pg_options: Any = None) -> ProcessGroupInflight:
    """Make the group; c10d calls this as the backend's creator.

    **Collective:** over the ranks of the new group only.

    Raises:
        InvalidArgumentError: The backend map names another backend for a device, or rank or world size
            contradict MPI; on every rank of the default group.
        CollectiveTimeout: A member did not come within the group's timeout.
    """
    seconds = compat.timeout_s(opts.timeout, 1800.0)
    ranks = list(opts.global_ranks_in_group)
    world = _mpi.mpi().COMM_WORLD
    flight_recorder.configure(world.rank, world.size)
    work_registry.configure(f"rank {world.rank} of {world.size}")
    if not ranks:
        agree(_world_problem(opts), seconds, "init_process_group")
        comm = run_with_deadline(_mpi.control_comm().Dup, seconds, "init_process_group")
    else:
        problem = _map_problem()
        if problem is not None:
            raise problem
        comm = subset(_mpi.control_comm(seconds), ranks, seconds, f"new_group({ranks})")
    communicator = MPICommunicator(comm, str(opts.group_id))
    return ProcessGroupInflight(opts.store, opts.group_rank, opts.group_size, communicator, seconds)


def _world_problem(opts: Any) -> InflightError | None:
    world = _mpi.mpi().COMM_WORLD
    if (opts.group_rank, opts.group_size) != (world.rank, world.size):
        return InvalidArgumentError(
            f"init_process_group: rank {opts.group_rank} of world_size {opts.group_size} contradicts MPI, where this "
            f"is rank {world.rank} of {world.size}; leave both out and pass init_method='mpi://'"
        )
    return _map_problem()


def _map_problem() -> InflightError | None:
    requested = compat.requested_backend_map() or {}
    others = {device: name for device, name in requested.items() if name != BACKEND}
    if not others:
        return None
    found = ",".join(f"{device}:{name}" for device, name in requested.items())
    return InvalidArgumentError(
        f"init_process_group: backend map {found!r} names another backend beside {BACKEND}, which would be ignored: "
        f"a group of this package serves every device itself; pass backend={BACKEND!r}"
    )


def register() -> None:
    """Make the backend's name known to torch.

    **Local:** once, at import; calls no MPI.
    """
    compat.register_backend(BACKEND, create, list(DEVICES))
