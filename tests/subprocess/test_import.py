"""What `import hpc_inflight` does not do, each looked at in a fresh process."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from hpc_inflight.testing.launch import run_plain

if TYPE_CHECKING:
    from pathlib import Path

PROBE = """
import json, logging, sys, threading
import torch
handlers = len(logging.getLogger().handlers)
threads, modules = threading.active_count(), set(sys.modules)
import hpc_inflight
import torch.distributed as dist
print(json.dumps({
    "threads": threading.active_count() - threads,
    "handlers": len(logging.getLogger().handlers) - handlers,
    "hook": sys.excepthook is sys.__excepthook__,
    "new": sorted(m for m in set(sys.modules) - modules if m.split(".")[0] != "hpc_inflight"),
    "cuda": torch.cuda.is_initialized(),
    "registered": hasattr(dist.Backend, "HPC_INFLIGHT"),
    "default": dict(dist.Backend.default_device_backend_map)["cpu"],
}))
"""

TIMED = """
import sys, time
start = time.process_time()
import torch
between = time.process_time()
import hpc_inflight
print(between - start, time.process_time() - between)
"""


def test_import_starts_nothing() -> None:
    found = json.loads(run_plain(["-c", PROBE], check=True).stdout)
    assert found == {
        "threads": 0,
        "handlers": 0,
        "hook": True,
        "new": [],
        "cuda": False,
        "registered": True,
        "default": "gloo",
    }


def test_import_costs_little_beside_torch(tmp_path: Path) -> None:
    # 50 ms beside the 1.1 s of torch: processor time, which a busy machine changes little; the bound is twice that
    # where bytecode is not kept, as some containers are set up, the compiler would be measured
    env = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path)}
    run_plain(["-c", TIMED], env=env, check=True)
    torch_s, ours_s = zip(
        *(map(float, run_plain(["-c", TIMED], env=env, check=True).stdout.split()) for _ in range(3)), strict=True
    )
    assert min(ours_s) < 0.1 * min(torch_s), (torch_s, ours_s)


def test_a_torch_that_is_too_old_is_said() -> None:
    run = run_plain(["-c", "import torch; torch.__version__ = '2.7.1+cu126'; import hpc_inflight"])
    assert run.returncode == 1
    assert "ImportError: hpc_inflight needs torch 2.8 or newer and found 2.7.1+cu126; install" in run.stderr
