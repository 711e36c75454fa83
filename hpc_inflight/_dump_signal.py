"""Say on a signal what is in flight, also while the main thread is blocked in MPI or NCCL.

Python runs a signal's handler in the main thread, between two of its instructions: never, in a job that hangs. The
number of the signal is written to a pipe at once, though, by the part of Python that the system calls
(``signal.set_wakeup_fd``), so a thread that reads the pipe prints.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING

from hpc_inflight import group_set, work_registry
from hpc_inflight._flight_dump import dump_flight_recorder
from hpc_inflight.config import config

if TYPE_CHECKING:
    from types import FrameType

_SHOWN = 50


def install(number: int) -> None:
    """Print `report` to stderr and write the flight recorder whenever the process gets the signal.

    **Local:** once, in the main thread; elsewhere only the main thread could install a handler, and nothing is done.
    A program that sets a wakeup descriptor of its own (asyncio does) gets the report when its main thread is free.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    ours = sender.fileno()
    taken = signal.set_wakeup_fd(ours, warn_on_full_buffer=False)
    if taken != -1:
        signal.set_wakeup_fd(taken)
    pid = os.getpid()

    def handler(_number: int, _frame: FrameType | None) -> None:
        current = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(current)
        if current != ours:
            sender.send(bytes([number]))
        if os.getpid() != pid:  # a forked child has no such thread
            sys.stderr.write(report())

    def read() -> None:
        while got := receiver.recv(16):
            for _ in range(got.count(number)):
                sys.stderr.write(report() + _written())
                sys.stderr.flush()

    signal.signal(number, handler)
    signal.siginterrupt(number, False)  # a system call of the program must not end for being asked
    threading.Thread(target=read, name="hpc_inflight-dump", daemon=True).start()


def _written() -> str:
    if not config().flight_recorder:
        return ""
    try:
        return f"{_name()}: flight recorder in {dump_flight_recorder()}\n"
    except OSError as error:
        return f"{_name()}: the flight recorder cannot be written: {error}\n"


def _name() -> str:
    return f"hpc_inflight: {work_registry.label() or f'process {os.getpid()}'}"


def report() -> str:
    """Return what this rank has in flight: pending works of every group, and registered works.

    **Local:** any thread, any time.
    """
    now = time.monotonic()
    name = _name()
    lines = []
    for group in group_set.groups():
        pending = group.pending_works()
        lines += [f"pending on {group.describe()}: {w.op} (seq {w.seq}), {now - w.issued_at:.1f} s" for w in pending]
    for work in work_registry.inflight():
        state = "complete" if work.completed else "not complete"
        site = f", issued at {work.call_site}" if work.call_site else ""
        on = f" on group {work.group}" if work.group else ""
        kind = f"shape {work.shape}, {work.dtype}"
        lines.append(f"un-waited: {work.op} (seq {work.seq}){on}, {kind}, {work.age_s:.1f} s, {state}{site}")
    lines = lines or ["nothing is in flight"]
    if len(lines) > _SHOWN:
        lines[_SHOWN:] = [f"and {len(lines) - _SHOWN} more"]
    return "".join(f"{name}: {line}\n" for line in lines)
