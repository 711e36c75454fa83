"""Where in the user's program a call came from, for messages."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType

# what a user does not recognise; this package's own programs are users, too
_INSIDE = ("hpc_inflight.", "torch.", "contextlib", "threading")
_PROGRAMS = ("hpc_inflight.examples", "hpc_inflight.cli")


def caller() -> str:
    """Return file, line and function of the innermost frame outside of torch and this package.

    **Local:** any thread. Takes some microseconds, so only where call sites were asked for.
    """
    return site_of(sys._getframe(1))  # noqa: SLF001  # inspect.stack() reads source files for every frame


def site_of(frame: FrameType) -> str:
    """Return file, line and function of the innermost frame outside of torch and this package, from ``frame`` on."""
    while frame.f_back is not None:
        name = frame.f_globals.get("__name__", "torch.")  # code that torch.compile makes has none
        if not name.startswith(_INSIDE) or name.startswith(_PROGRAMS):
            break
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
