"""When one rank fails, the job ends: otherwise the others wait for it, in a collective or in MPI_Finalize, for hours.

Uncaught exceptions, in any thread, and an exit with a non-zero code end the job through MPI_Abort, after the traceback.
A rank that a signal kills, or that calls ``os._exit``, is the launcher's to see. The program's own hooks still run;
interactive sessions and pytest, which live on after an exception, are left alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import io
import os
import socket
import stat
import sys
import threading
import time
import traceback
from array import array
from typing import TYPE_CHECKING, Any, NoReturn

from hpc_inflight import _mpi, _on_failure

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

_INTERRUPTED = 130  # what a shell calls a program that was ended by Ctrl-C
_READ_S = 1.0  # for the launcher to read what a rank has written
_PASS_ON_S = 0.1  # and to pass it on
_installed = False
_exit_status: object = None


def install() -> None:
    """Install the hooks.

    **Local:** once per process; later calls do nothing. By the first `init` or ``mpi://`` rendezvous.
    """
    global _installed  # noqa: PLW0603  # hooks are per process
    if _installed:
        return
    _installed = True
    pid = os.getpid()
    previous, previous_in_thread = sys.excepthook, threading.excepthook

    def on_exception(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() != pid or _is_interactive() or not _has_others():
            previous(kind, value, trace)
        else:
            _abort_for(value, _said(lambda: previous(kind, value, trace)))

    def on_thread_exception(args: threading.ExceptHookArgs) -> None:
        error = args.exc_value
        if error is None or isinstance(error, SystemExit) or os.getpid() != pid or not _has_others():
            previous_in_thread(args)
        else:
            _abort_for(error, _said(lambda: previous_in_thread(args)))

    sys.excepthook = on_exception
    if not _lives_on():
        threading.excepthook = on_thread_exception
        _watch_exit_status()


def _is_interactive() -> bool:
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)


def _lives_on() -> bool:
    return _is_interactive() or not {"ipykernel", "_pytest"}.isdisjoint(sys.modules)


def _watch_exit_status() -> None:
    """Note the status with which a ``SystemExit`` ends this interpreter, whoever raised it and in whatever way.

    An exit hook is not told. But the interpreter asks the exception for its ``code``, from no Python frame, so that is
    where to listen. Replacing ``sys.exit`` alone would miss ``raise SystemExit`` and ``exit``. Before Python 3.12 it is
    needed all the same: there may be no exception object to ask after the original. Only who imported that by name,
    before `init`, goes unnoticed there, until the others wait for a rank that has ended.
    """
    attributes = vars(SystemExit)
    original: Any = attributes["code"]

    def code(error: SystemExit) -> Any:
        status = original.__get__(error, type(error))
        try:
            sys._getframe(1)  # noqa: SLF001  # there is no public way to ask who asks
        except ValueError:
            global _exit_status  # noqa: PLW0603  # a process exits once
            _exit_status = status
        return status

    (writable,) = gc.get_referents(attributes)  # the dictionary behind the read-only view
    writable["code"] = property(code, original.__set__, original.__delete__, "exception code")
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(SystemExit))  # as after every such change
    if sys.version_info < (3, 12):

        def exit_with(*status: Any) -> NoReturn:
            raise SystemExit(*status)

        sys.exit = exit_with


def exit_code() -> int:
    """Return the code with which this interpreter ends; 0 if nothing has failed.

    **Local:** from an atexit handler.
    """
    if _exit_status is not None:
        return _exit_status & 0xFF if isinstance(_exit_status, int) else 1  # a text is printed, and the code is 1
    return 0 if _uncaught() is None else 1


def _uncaught() -> BaseException | None:
    """Return the exception that ends this interpreter, should a hook that is not ours have been told of it."""
    trace = getattr(sys, "last_traceback", None)
    # a console inside of the program leaves one there, too, from frames that have a caller
    return None if trace is None or trace.tb_frame.f_back is not None else getattr(sys, "last_value", None)


def abort_for_exit() -> None:
    """End the job if this rank ends with a code, or through an exception, that says it failed."""
    if not _has_others() or _lives_on():
        return
    if _exit_status is not None:
        if code := exit_code():
            _abort(f"sys.exit({_exit_status!r})", code)
    elif (error := _uncaught()) is not None:
        _abort_for(error)


def _has_others() -> bool:
    return _mpi.started() and _mpi.mpi().COMM_WORLD.size > 1


def _said(hook: Callable[[], object]) -> str:
    """Run a hook and return what it wrote to stderr."""
    stderr = sys.stderr
    sys.stderr = said = io.StringIO()
    try:
        hook()
    except Exception:  # noqa: BLE001  # the program's own hook, which must not keep the job from ending
        traceback.print_exc()
    finally:
        sys.stderr = stderr
    return said.getvalue()


def _abort_for(error: BaseException, said: str = "") -> None:
    name = traceback.format_exception_only(type(error), error)[-1].strip()
    _abort(name, _INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1, said)


def _abort(why: str, code: int, said: str = "") -> None:
    comm, host = _mpi.mpi().COMM_WORLD, socket.gethostname()
    lines = "".join(f"[rank {comm.rank} on {host}] {line}\n" for line in said.splitlines())
    text = f"{lines}hpc_inflight: rank {comm.rank} of {comm.size} on {host} ends the job: {why}\n"
    _on_failure.tell()
    # torch's own hook calls ours with a stderr that collects, and would print it when we are gone
    stderr = sys.__stderr__ if isinstance(sys.stderr, io.StringIO) else sys.stderr
    for stream, last in ((stderr, text), (sys.stdout, "")):
        if stream is not None:
            with contextlib.suppress(OSError, ValueError):  # closed
                stream.write(last)  # in one write: other ranks write, too
                stream.flush()
    _until_read(2)
    _mpi.abort(code)


def _until_read(descriptor: int) -> None:
    """Wait until the launcher has read a pipe: with one that ends the job at once, what it has not read is lost."""
    import termios  # nothing else in a torch process has loaded it, and few programs come here

    left, deadline = array("i", [1]), time.monotonic() + _READ_S
    with contextlib.suppress(OSError):  # closed
        if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            return
        while left[0] and time.monotonic() < deadline:
            fcntl.ioctl(descriptor, termios.FIONREAD, left)
            time.sleep(1e-3)
        time.sleep(_PASS_ON_S)
