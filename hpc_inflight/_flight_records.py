"""The flight recorder's entries as objects, for whoever reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpc_inflight.flight_recorder import FATE, Message, Progress, ring

if TYPE_CHECKING:
    from hpc_inflight.flight_recorder import Lane, Row, Size


@dataclass(frozen=True)
class Record:
    """One operation, as it stood when it was read.

    Attributes:
        id: Its number in the process, from 0.
        lane: Where it was issued.
        op: Its name.
        number: Its number in the lane, from 1, or a message's in its channel; the same on all ranks of a program that
            is right.
        outputs: Size and dtype of each tensor that it writes; likewise ``inputs``.
        created: ``time.monotonic()`` before it was issued.
        returned: Issuing it has returned.
        started: When it began; None where it has not, or nobody can say.
        ended: When it was found to have ended, well or not.
        error: Why it failed.
        captured: It went into a CUDA graph.
        timeout_s: Seconds it may take.
        site: Where in the user's program it was issued; empty if that was not recorded.
        message: What only a point-to-point operation has.
    """

    id: int
    lane: Lane
    op: str
    number: int
    outputs: list[Size]
    inputs: list[Size]
    created: float
    returned: bool
    started: float | None
    ended: float | None
    error: str
    captured: bool
    timeout_s: float
    site: str
    message: Message | None


def _record(row: Row) -> Record:
    number, lane, op, serial, outputs, inputs, created, fate = row[: FATE + 1]
    message = fate if isinstance(fate, Message) else None
    progress, started, ended = fate, None, None
    if isinstance(fate, Progress):
        started, ended = fate.started, fate.ended
        if fate.error and started is None:
            started = created
    else:
        progress = Progress()
        if lane.blocks:  # it ran, or runs, in the caller
            started, ended = created, fate
    return Record(
        id=number,
        lane=lane,
        op=op,
        number=serial,
        outputs=_listed(outputs),
        inputs=_listed(outputs if inputs is None else inputs),
        created=created,
        returned=fate is not None if message is None else message.returned,
        started=started,
        ended=ended,
        error=progress.error,
        captured=progress.captured,
        timeout_s=lane.group.timeout_s if progress.timeout_s is None else progress.timeout_s,
        site=row[FATE + 1] if len(row) > FATE + 1 else "",
        message=message,
    )


def _listed(sizes: Size | list[Size]) -> list[Size]:
    return sizes if isinstance(sizes, list) else [sizes]


def records() -> list[Record]:
    """Return the operations in the order in which they were entered.

    **Local:** any thread; takes no lock.
    """
    # list() of a deque is one step, whatever other threads issue meanwhile
    return [_record(row) for row in sorted(list(ring()), key=lambda row: row[0])]  # noqa: C414
