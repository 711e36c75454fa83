"""One rank ends in some way, while another drains, with a work pending, and a third waits for nobody.

usage: ending.py HOW
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

import hpc_inflight as hi

ENDS = 1  # the rank that ends


def boom() -> NoReturn:
    raise ValueError("boom")


def hook(kind: type[BaseException], *_: object) -> None:
    sys.stderr.write(f"the program's own hook: {kind.__name__}\n")


how = sys.argv[1]
if how == "own hook":
    sys.excepthook = hook
world = hi.init(device="cpu", timeout_s=600)
dist.barrier()
if how == "own hook set later":
    sys.excepthook = hook
if world.rank == 0:
    work = dist.irecv(torch.ones(1), ENDS)
    hi.wait_for_all_pending_works(600)
if world.rank == ENDS:
    Path(os.environ["HPC_INFLIGHT_DRILL_MARK"]).touch()
    match how:
        case "raises" | "own hook" | "own hook set later":
            boom()
        case "raises in a thread":
            threading.Thread(target=boom).start()
        case "sys.exit":
            sys.exit(3)
        case "SystemExit":
            raise SystemExit(3)
        case "exit with a text":
            raise SystemExit("a text")
        case "os._exit":
            os._exit(3)
        case "SIGTERM":
            os.kill(os.getpid(), signal.SIGTERM)
        case "SIGINT":
            os.kill(os.getpid(), signal.SIGINT)
        case "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
time.sleep(1000)
