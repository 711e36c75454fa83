"""When one rank fails, the job ends: otherwise the others wait for it, in a collective or in MPI_Finalize, for hours.

Uncaught exceptions, in any thread, and ``sys.exit`` with a non-zero code end the job through MPI_Abort, after the
traceback. A rank that a signal kills is the launcher's to see. The program's own hooks still run; interactive sessions
and pytest, which live on after an exception, are left alone.
"""

from __future__ import annotations

import io
import os
import socket
import sys
import threading
import traceback
from typing import TYPE_CHECKING, Any, NoReturn

from hpc_inflight import _mpi

if TYPE_CHECKING:
    from types import TracebackType

_INTERRUPTED = 130  # what a shell calls a program that was ended by Ctrl-C
_installed = False
_exit_code: object = None


class _Exit(SystemExit):
    """A ``SystemExit`` that knows when it ends the interpreter, rather than being caught by somebody."""

    @property
    def code(self) -> Any:  # type: ignore[override]  # typeshed has a plain attribute, which the interpreter only reads
        """The exit code; the interpreter asks for it, from no Python frame, when it ends with it."""
        try:
            sys._getframe(1)  # noqa: SLF001  # there is no public way to ask who asks
        except ValueError:
            global _exit_code  # noqa: PLW0603  # a process exits once
            _exit_code = self.args[0] if self.args else None
        return self.args[0] if self.args else None


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
        previous(kind, value, trace)
        if os.getpid() == pid:
            _abort_for(value)

    def on_thread_exception(args: threading.ExceptHookArgs) -> None:
        previous_in_thread(args)
        if os.getpid() == pid and args.exc_value is not None and not issubclass(args.exc_type, SystemExit):
            _abort_for(args.exc_value)

    def exit_with(status: Any = None, /) -> NoReturn:
        raise _Exit(status) if status is not None else _Exit

    sys.excepthook = on_exception
    if not _lives_on():
        threading.excepthook = on_thread_exception
        sys.exit = exit_with


def _lives_on() -> bool:
    return hasattr(sys, "ps1") or bool(sys.flags.interactive) or not {"ipykernel", "_pytest"}.isdisjoint(sys.modules)


def exit_code() -> int:
    """Return the code with which ``sys.exit`` is ending this interpreter; 0 if it ends otherwise.

    **Local:** from an atexit handler.
    """
    if _exit_code is None:
        return 0
    return _exit_code & 0xFF if isinstance(_exit_code, int) else 1  # a text is printed, and the code is 1


def abort_for_exit() -> None:
    """End the job if this rank ends through ``sys.exit`` with a code that says it failed."""
    code = exit_code()
    if code:
        _abort(f"sys.exit({_exit_code!r})", code)


def _abort_for(error: BaseException) -> None:
    name = traceback.format_exception_only(type(error), error)[-1].strip()
    _abort(name, _INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1)


def _abort(why: str, code: int) -> None:
    if not _mpi.started():
        return
    comm = _mpi.mpi().COMM_WORLD
    if comm.size == 1:
        return
    text = f"hpc_inflight: rank {comm.rank} of {comm.size} on {socket.gethostname()} ends the job: {why}\n"
    stderr = sys.stderr
    if isinstance(stderr, io.StringIO) and sys.__stderr__ is not None:
        # init_process_group wraps the hook in one that collects what is printed, and would print it after us
        text = stderr.getvalue() + text
        stderr = sys.__stderr__
    stderr.write(text)
    stderr.flush()
    sys.stdout.flush()
    _mpi.abort(code)
