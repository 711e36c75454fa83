"""Write this rank's flight recorder to a file."""

from __future__ import annotations

import os
import pickle
import sys
import threading
from pathlib import Path
from typing import Final

from hpc_inflight.config import config
from hpc_inflight.errors import InflightError, InvalidArgumentError
from hpc_inflight.flight_recorder import Process, ring

PREFIX: Final = "flight_recorder_rank_"
_said = threading.Event()  # where a failed job's dump is


def dump_flight_recorder(path: str | os.PathLike[str] | None = None) -> str:
    """Write the last operations of this rank to a file, in the format of PyTorch's flight recorder.

    **Local:** any thread, any time, also while the main thread is blocked in MPI or NCCL; calls neither. One file per
    rank: with all of them in one directory, ``hpc-inflight trace DIR`` says where the ranks part, and so does
    ``python -m torch.distributed.flight_recorder.fr_trace DIR``.

    Args:
        path: An existing directory, or one that ends in ``/`` and is made; else what the file's name begins with,
            before the rank. By default the directory that ``HPC_INFLIGHT_DUMP_DIR`` names, ``hpc_inflight_dumps``
            without it.

    Returns:
        The file's name. A file of that name is replaced in one step.

    Raises:
        InvalidArgumentError: The path is empty.
        InflightError: In a forked child, which is no rank.
        OSError: The file cannot be written.
    """
    if Process.pid not in {0, os.getpid()}:
        msg = f"dump_flight_recorder: process {os.getpid()} is a forked child of rank {Process.rank}; dump in the rank"
        raise InflightError(msg)
    from hpc_inflight._flight_format import snapshot  # only a job that dumps pays for it

    target = _file(config().dump_dir + os.sep if path is None else os.fspath(path))
    # no name that an analyser could take for a dump, should this be the last thing that the process does
    part = target.with_name(f".{os.getpid()}-{threading.get_ident()}.part")
    try:
        part.write_bytes(pickle.dumps(snapshot(), protocol=2))
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
    return str(target)


def dump_on_failure() -> None:
    """Write the flight recorder where the job is about to fail, and say on stderr, once, where it is.

    **Local:** any thread. A failure is an exception that ends the process, an exit with a code, an error that a
    transport reports, and a deadline that passes; not a wait whose own deadline comes before the operation's.
    Raises nothing: what is wrong with the job is more than a file that cannot be written.
    """
    try:
        if not ring():  # it is off, or nothing has happened yet
            return
        said = f"flight recorder in {dump_flight_recorder()}"
    except Exception as error:  # noqa: BLE001  # whatever it is, it must not take the failure's place
        said = f"the flight recorder cannot be written: {error}"
    if not _said.is_set():
        _said.set()
        sys.stderr.write(f"hpc_inflight: rank {Process.rank}: {said}\n")  # in one write: other ranks write, too
        sys.stderr.flush()


def _file(path: str) -> Path:
    if not path:
        msg = "dump_flight_recorder: the path is empty; expected a directory, or what the file's name begins with"
        raise InvalidArgumentError(msg)
    if path.endswith(os.sep):
        Path(path).mkdir(parents=True, exist_ok=True)
    if Path(path).is_dir():
        return Path(path) / f"{PREFIX}{Process.rank}"
    return Path(f"{path}{Process.rank}")
