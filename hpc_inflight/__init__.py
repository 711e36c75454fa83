"""MPI-launched process groups for PyTorch, with collectives in flight across compiled regions.

Layers, which import only downwards (``lint-imports`` checks):

    cli, examples, testing        what runs on top
    pooled_embeddings             the exchange of sharded embeddings, overlapped forward and backward
    functional | capture          waiting by tensor; draining before a capture
    backend, process_group        c10d's calls -> a communicator
    bootstrap, store              the world; the key-value store in MPI
    communicators/{mpi,nccl}      the backends, which never see each other
    work, work_registry, group_set, flight_recorder, _mpi
    errors, dtypes, config, topology, _torch_compat

Importing starts neither MPI nor CUDA nor a thread, and configures no logging.
"""

from __future__ import annotations

from hpc_inflight import _on_failure, backend, capture, store, watchdog
from hpc_inflight._flight_dump import dump_flight_recorder, dump_on_failure
from hpc_inflight.bootstrap import World, finalize, init, world
from hpc_inflight.capture import graph
from hpc_inflight.errors import (
    AlreadyInitializedError,
    CaptureError,
    CollectiveMismatch,
    CollectiveTimeout,
    CommunicatorAborted,
    DrainTimeout,
    GroupDestroyedError,
    InflightError,
    InvalidArgumentError,
    LaunchError,
    MissedWaitWarning,
    MPIUnavailableError,
    NCCLError,
    NCCLUnavailableError,
    NotInitializedError,
    StoreError,
    StoreTimeout,
    UnsupportedError,
    UnwaitedError,
    UnwaitedWarning,
)
from hpc_inflight.functional import allow_inflight_collective_as_graph_input, wait_tensor
from hpc_inflight.group_set import groups, wait_for_all_pending_works
from hpc_inflight.pooled_embeddings import PooledEmbeddingsAllToAll, PooledEmbeddingsAwaitable
from hpc_inflight.work_registry import InflightWork, inflight, register_work

__version__ = "0.1.0"

__all__ = [
    "AlreadyInitializedError",
    "CaptureError",
    "CollectiveMismatch",
    "CollectiveTimeout",
    "CommunicatorAborted",
    "DrainTimeout",
    "GroupDestroyedError",
    "InflightError",
    "InflightWork",
    "InvalidArgumentError",
    "LaunchError",
    "MPIUnavailableError",
    "MissedWaitWarning",
    "NCCLError",
    "NCCLUnavailableError",
    "NotInitializedError",
    "PooledEmbeddingsAllToAll",
    "PooledEmbeddingsAwaitable",
    "StoreError",
    "StoreTimeout",
    "UnsupportedError",
    "UnwaitedError",
    "UnwaitedWarning",
    "World",
    "allow_inflight_collective_as_graph_input",
    "dump_flight_recorder",
    "finalize",
    "graph",
    "groups",
    "inflight",
    "init",
    "register_work",
    "wait_for_all_pending_works",
    "wait_tensor",
    "world",
]

backend.register()
capture.register()
watchdog.register()
_on_failure.add(dump_on_failure)
store.register_rendezvous()
