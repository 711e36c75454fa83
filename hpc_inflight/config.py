"""Settings that come from the environment, read once, when they are first needed."""

from __future__ import annotations

import functools
import os
import signal
from dataclasses import dataclass

from hpc_inflight.errors import InvalidArgumentError

ON_UNWAITED = ("warn", "raise", "ignore")
ON_TIMEOUT = ("abort", "raise")


@dataclass(frozen=True)
class Config:
    """What the environment sets.

    Attributes:
        max_pending: Works a group may have enqueued before issuing another one waits for the oldest
            (``HPC_INFLIGHT_MAX_PENDING``). Bounds memory when the host runs ahead of the network.
        exit_timeout_s: Seconds that the interpreter's exit waits for pending works and for the other
            ranks before it goes on without them (``HPC_INFLIGHT_EXIT_TIMEOUT_S``).
        capture_drain: Wait for every group's pending works at the beginning of each CUDA graph capture
            (``HPC_INFLIGHT_CAPTURE_DRAIN=0`` turns it off).
        drain_timeout_s: Seconds that this may take (``HPC_INFLIGHT_DRAIN_TIMEOUT_S``).
        on_timeout: What the watchdog does once an operation is past its deadline and its group is aborted: end the job
            (``"abort"``), or leave that to whoever waits (``"raise"``, ``HPC_INFLIGHT_ON_TIMEOUT``).
        watchdog_s: Seconds between two looks of the watchdog (``HPC_INFLIGHT_WATCHDOG_S``).
        max_count: Elements that one MPI call counts; larger tensors go in parts or under larger types
            (``HPC_INFLIGHT_MAX_COUNT``; lower it only to test that).
        debug: Compare the ranks' calls before each collective (``HPC_INFLIGHT_DEBUG=1``, or
            ``TORCH_DISTRIBUTED_DEBUG=DETAIL``).
        strict: Count the waits by tensor that found nothing in flight, and warn of the first
            (``HPC_INFLIGHT_STRICT=1``); also records call sites.
        call_sites: Record where a registered work, or one in the flight recorder, was issued
            (``HPC_INFLIGHT_CALL_SITES=1``).
        on_unwaited: What to do about registered works that nobody waited for, unless ``init`` says otherwise:
            ``"warn"``, ``"raise"`` or ``"ignore"`` (``HPC_INFLIGHT_ON_UNWAITED``).
        dump_signal: Number of the signal on which each rank prints what is in flight and writes its flight recorder; 0
            for none (``HPC_INFLIGHT_DUMP_SIGNAL``, such as ``USR2``).
        flight_recorder: Operations that the flight recorder keeps; 0 turns it off
            (``HPC_INFLIGHT_FLIGHT_RECORDER``).
        dump_dir: Directory of the flight recorder's files where the caller names none; made when needed
            (``HPC_INFLIGHT_DUMP_DIR``).
    """

    max_pending: int = 1024
    exit_timeout_s: float = 10.0
    capture_drain: bool = True
    drain_timeout_s: float = 60.0
    on_timeout: str = "abort"
    watchdog_s: float = 0.5
    max_count: int = 2**31 - 1
    debug: bool = False
    strict: bool = False
    call_sites: bool = False
    on_unwaited: str = "warn"
    dump_signal: int = 0
    flight_recorder: int = 2000
    dump_dir: str = "hpc_inflight_dumps"


def _positive(name: str, default: float, kind: type) -> float:
    text = os.environ.get(name)
    if text is None:
        return default
    try:
        value = kind(text)
    except ValueError:
        value = 0
    if value <= 0:
        msg = f"{name}: expected a positive {kind.__name__}, found {text!r}; unset it or correct it"
        raise InvalidArgumentError(msg)
    return float(value)


def _count(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        msg = f"{name}: expected a number, 0 for none, found {text!r}; unset it or correct it"
        raise InvalidArgumentError(msg)
    return int(text)


def _flag(name: str, default: str = "0") -> bool:
    return os.environ.get(name, default) not in {"", "0"}


def checked_on_unwaited(source: str, value: str) -> str:
    """Return ``value`` if it is a policy for works that nobody waited for.

    Raises:
        InvalidArgumentError: It is none.
    """
    return _checked(source, value, ON_UNWAITED)


def _choice(name: str, known: tuple[str, ...], default: str) -> str:
    return _checked(name, os.environ.get(name, default), known)


def _checked(source: str, value: str, known: tuple[str, ...]) -> str:
    if value not in known:
        msg = f"{source}: expected one of {', '.join(map(repr, known))}, found {value!r}; choose one of these"
        raise InvalidArgumentError(msg)
    return value


def _signal_number(name: str) -> int:
    text = os.environ.get(name, "")
    if text in {"", "0"}:
        return 0
    try:
        number = int(text) if text.isdigit() else signal.Signals[f"SIG{text.upper().removeprefix('SIG')}"]
        if number in {signal.SIGKILL, signal.SIGSTOP}:
            number = -1  # no program can handle these
        return int(signal.Signals(number))
    except (KeyError, ValueError):
        msg = f"{name}: expected a signal such as USR2, SIGUSR2 or 12, found {text!r}; unset it or correct it"
        raise InvalidArgumentError(msg) from None


@functools.cache
def config() -> Config:
    """Return the settings of this process.

    **Local:** any rank, any time; the environment is read at the first call.

    Raises:
        InvalidArgumentError: A variable holds something else than is said above.
    """
    return Config(
        max_pending=int(_positive("HPC_INFLIGHT_MAX_PENDING", Config.max_pending, int)),
        exit_timeout_s=_positive("HPC_INFLIGHT_EXIT_TIMEOUT_S", Config.exit_timeout_s, float),
        capture_drain=_flag("HPC_INFLIGHT_CAPTURE_DRAIN", "1"),
        drain_timeout_s=_positive("HPC_INFLIGHT_DRAIN_TIMEOUT_S", Config.drain_timeout_s, float),
        on_timeout=_choice("HPC_INFLIGHT_ON_TIMEOUT", ON_TIMEOUT, Config.on_timeout),
        watchdog_s=_positive("HPC_INFLIGHT_WATCHDOG_S", Config.watchdog_s, float),
        max_count=int(_positive("HPC_INFLIGHT_MAX_COUNT", Config.max_count, int)),
        debug=_flag("HPC_INFLIGHT_DEBUG") or os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL",
        strict=_flag("HPC_INFLIGHT_STRICT"),
        call_sites=_flag("HPC_INFLIGHT_CALL_SITES") or _flag("HPC_INFLIGHT_STRICT"),
        on_unwaited=_choice("HPC_INFLIGHT_ON_UNWAITED", ON_UNWAITED, Config.on_unwaited),
        dump_signal=_signal_number("HPC_INFLIGHT_DUMP_SIGNAL"),
        flight_recorder=_count("HPC_INFLIGHT_FLIGHT_RECORDER", Config.flight_recorder),
        dump_dir=os.environ.get("HPC_INFLIGHT_DUMP_DIR") or Config.dump_dir,
    )
