"""A pytest plugin for tests that run on several ranks at once, beside pytest-mpi and pytest-timeout.

Name it in the top conftest (``pytest_plugins = ["hpc_inflight.testing.plugin"]``) and start pytest under the MPI
launcher with ``-x --with-mpi``. Then

- rank 0 reports; another rank's report is shown if the session failed there;
- a test that outlasts its pytest-timeout prints the stacks of all ranks and ends the job;
- the session fails when ranks passed different numbers of tests, or none;
- a failed session ends the job, so that no rank waits for one that stopped;
- every rank has its own directory for `tmp_path`, which goes when the session passed;
- the fixture `fully_collective` fails a test in which ranks issued different numbers of collectives, or which left
  something registered or pending;
- the fixtures `device` and `late` let one test run on CPU tensors or, with ``HPC_INFLIGHT_TEST_DEVICE=cuda``, on
  tensors of the rank's GPU, with data that arrives late there, too.
"""

from __future__ import annotations

import faulthandler
import io
import os
import shutil
import sys
import tempfile
import threading
import time
import traceback
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

import hpc_inflight as hi
from hpc_inflight import _mpi, _torch_compat, group_set, work_registry
from hpc_inflight._torch_compat import sequence_number
from hpc_inflight.testing.asserts import gather_on_all_ranks
from hpc_inflight.testing.late import DEVICE_VARIABLE, Late, requested_device_type

if TYPE_CHECKING:
    from collections.abc import Iterator

_TIMER = pytest.StashKey[threading.Timer]()
_FAILED = pytest.StashKey[bool]()
_GUARD_S = pytest.StashKey[float]()
_TEMPORARY = pytest.StashKey[Path]()
_GRACE_S = 5.0  # for the other ranks to print their stacks, too
_SETTLE_S = 60.0
_NOT_SHOWN = {"_pytest", "pluggy", "pytest"}


class _Session:
    """This process's part in the session."""

    def __init__(self, config: pytest.Config) -> None:
        self.comm: Any = _mpi.mpi().COMM_WORLD
        # pytest has not redirected file descriptors yet at this point; in a test it has
        self.stderr = os.dup(2)
        self.passed = 0
        self.buffer: io.StringIO | None = None
        reporter: Any = config.pluginmanager.getplugin("terminalreporter")
        if self.comm.rank and reporter is not None:
            self.buffer = io.StringIO()
            reporter._tw._file = self.buffer  # noqa: SLF001  # pytest has no public way to redirect its report

    def say(self, text: str) -> None:
        """Write past pytest's capture, a whole line at a time."""
        os.write(self.stderr, f"[rank {self.comm.rank} of {self.comm.size}] {text}\n".encode())

    def deadline_passed(self, nodeid: str, seconds: float) -> None:
        self.say(f"{nodeid} is not over after {seconds:g} s; stacks of this rank:\n{_stacks()}")
        time.sleep(_GRACE_S)
        self.end_job()

    def end_job(self) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        if self.comm.size > 1:
            self.comm.Abort(1)
        os._exit(1)


def _stacks() -> str:
    """Return where every other thread is, the newest call first.

    Not by faulthandler, which makes several writes of each line: the ranks print at the same moment, and what is more
    than a few KiB reaches the launcher's output in pieces, with other ranks' between them.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines = []
    for ident, frame in sys._current_frames().items():  # noqa: SLF001  # documented
        if ident == threading.get_ident():
            continue
        lines.append(f"Thread {names.get(ident, ident)}:")
        for called, line in traceback.walk_stack(frame):
            if str(called.f_globals.get("__name__")).partition(".")[0] not in _NOT_SHOWN:
                lines.append(f"  {called.f_code.co_filename}, line {line} in {called.f_code.co_name}")
    return "\n".join(lines)


_session: _Session | None = None


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Give this rank a base directory of its own, before pytest's plugin for them looks.

    pytest's are numbered in a directory that all sessions of a user share, and each deletes old ones as it ends: ranks
    end at the same moment, delete the same ones, and the slower of two fails. One that is given is emptied first, so
    ranks that share it delete each other's.
    """
    given = config.option.basetemp
    if given is None:
        # pytest makes it when a test asks for one
        root = Path(os.environ.get("PYTEST_DEBUG_TEMPROOT") or tempfile.gettempdir())
        config.option.basetemp = config.stash[_TEMPORARY] = root / f"pytest-{uuid.uuid4().hex}"
    elif (comm := _mpi.mpi().COMM_WORLD).size > 1:
        Path(given).mkdir(parents=True, exist_ok=True)
        config.option.basetemp = Path(given) / f"rank{comm.rank}"


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Find this rank's place, before the reporter prints anything."""
    global _session  # noqa: PLW0603  # pytest's hooks are functions
    if _session is None and not session.config.option.collectonly:
        _session = _Session(session.config)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Do so now if a conftest that was found during collection (--pyargs) has named this plugin."""
    pytest_sessionstart(session)


@pytest.hookimpl(optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool | None:
    """Take pytest-timeout's deadline over: its own way shows one rank's stacks and kills the rest unseen."""
    if _session is None:
        return None
    timer = threading.Timer(settings.timeout, _session.deadline_passed, (item.nodeid, settings.timeout))
    timer.daemon = True
    timer.start()
    item.stash[_TIMER] = timer
    item.stash[_GUARD_S] = settings.timeout + 2 * _GRACE_S
    _guard(item)
    return True


def _guard(item: pytest.Item) -> None:
    """End a rank that is stuck in C with the GIL held, where the timer's thread cannot run."""
    if _session is not None and _GUARD_S in item.stash:
        faulthandler.dump_traceback_later(item.stash[_GUARD_S], exit=True, file=_session.stderr)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Guard once more: a process has one such timer, and with ``faulthandler_timeout`` pytest has taken it since."""
    _guard(item)


@pytest.hookimpl(optionalhook=True)
def pytest_timeout_cancel_timer(item: pytest.Item) -> bool | None:
    """Stop the deadline of a test that is over."""
    timer = item.stash.get(_TIMER, None)
    if timer is None:
        return None
    timer.cancel()
    faulthandler.cancel_dump_traceback_later()
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    """Count what passed, and tell the fixtures of a test that it failed."""
    report = yield
    if report.failed:
        item.stash[_FAILED] = True
    if _session is not None and report.when == "call" and report.passed:
        _session.passed += 1
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Compare the ranks' counts."""
    if _session is None or _session.comm.size == 1 or exitstatus != pytest.ExitCode.OK:
        return
    counts = gather_on_all_ranks(_session.passed)
    if len(set(counts)) > 1 or not counts[0]:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if _session.comm.rank == 0:
            _session.say(f"passed tests per rank: {counts}; expected the same number, above 0, on each")


def pytest_unconfigure(config: pytest.Config) -> None:
    """Show a failed rank's report and end the job with it: the others may wait for this rank."""
    session: Any = config.pluginmanager.getplugin("session")
    status = getattr(session, "exitstatus", pytest.ExitCode.OK)
    failed = status not in {pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED}
    if failed and _session is not None and _session.comm.size > 1:
        if _session.buffer is not None:
            _session.say("its report:\n" + _session.buffer.getvalue())
        _session.end_job()
    if not failed and _TEMPORARY in config.stash:
        shutil.rmtree(config.stash[_TEMPORARY], ignore_errors=True)


@pytest.fixture(scope="session")
def world(request: pytest.FixtureRequest) -> Iterator[hi.World]:
    """The world that `hpc_inflight.init` makes, for the whole session."""
    # with init's long timeout: pytest-timeout's deadline comes first, and shows more. And every test is looked at by
    # itself for works that nobody waited for.
    made = hi.init(device="cpu" if requested_device_type() == "cpu" else None, on_unwaited="ignore")
    yield made
    if not request.session.testsfailed:  # else the others may be elsewhere, and the job ends in a moment
        hi.finalize()


@pytest.fixture(scope="session")
def device(world: hi.World) -> torch.device:
    """Where tests that run on any device put their tensors: the CPU, or this rank's GPU."""
    kind = requested_device_type()
    if kind == "cuda" and world.device.type != "cuda":
        pytest.fail(f"{DEVICE_VARIABLE}=cuda: this rank has no GPU that torch {torch.__version__} can use")
    return world.device if kind == "cuda" else torch.device("cpu")


@pytest.fixture(scope="session")
def late(world: hi.World, device: torch.device) -> Late:
    """What makes the data of rank 0 arrive late on the others, on that device."""
    return Late(device, world.rank)


@pytest.fixture
def fully_collective(request: pytest.FixtureRequest, world: hi.World) -> Iterator[None]:  # noqa: ARG001  # made first
    """Fail a test that was not the same on every rank, or that left something behind."""
    yield
    if request.node.stash.get(_FAILED, False):
        return  # the session ends with -x; the other ranks may not come here
    deadline = time.monotonic() + _SETTLE_S
    while any(group.pending_works() for group in group_set.groups()) and time.monotonic() < deadline:
        time.sleep(1e-3)
    work_registry.sweep()
    default = dist.group.WORLD
    facts = {
        "test": request.node.nodeid,
        "collectives on the default group": None if default is None else sequence_number(default),
        "pending works": sum(len(group.pending_works()) for group in group_set.groups()),
        "works in flight": [w.op for w in hi.inflight()],
        "works in torch's registry": _torch_compat.registry_size(),
    }
    ranks = gather_on_all_ranks(facts)
    for key, value in ranks[0].items():
        values = [rank[key] for rank in ranks]
        if any(v != value for v in values):
            pytest.fail(f"not fully collective: {key} per rank: {values}")
    for key in ("pending works", "works in flight", "works in torch's registry"):
        if ranks[0][key]:
            pytest.fail(f"left behind: {key}: {ranks[0][key]}")
