"""launch/run.sh and its twin run_ranks: launcher, exit codes, signals, one sentence for every wrong call."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import pytest

from hpc_inflight.launch_command import SESSION_BASES
from hpc_inflight.launch_find import find_launcher
from hpc_inflight.testing.launch import (
    RanksFailedError,
    RanksTimeoutError,
    clean_env,
    run_plain,
    run_ranks,
)

RUN_SH = Path(__file__).parents[2] / "launch" / "run.sh"
REPORT = (
    "import os; from mpi4py import MPI; w = MPI.COMM_WORLD; "
    "rows = w.gather((w.rank, w.size, os.environ['OMP_NUM_THREADS'], len(os.sched_getaffinity(0)))); "
    "w.rank or print(*rows, sep='\\n')"
)
# One write a line: two writes, as by an unbuffered print, may have another rank's between them.
SAYS_UP = "import os, time; from mpi4py import MPI; os.write(1, b'up\\n')"


def environment(**changes: str | None) -> dict[str, str]:
    """Return this process's environment, with the Python under test in it and an outer launcher out of it."""
    env = clean_env(os.environ) | {"VIRTUAL_ENV": sys.prefix}
    for name in ("OMP_NUM_THREADS", "MPI"):
        env.pop(name, None)
    for name, value in changes.items():
        env.pop(name, None)
        if value is not None:
            env[name] = value
    return env


def run(*arguments: str, **changes: str | None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(RUN_SH), *arguments],
        env=environment(**changes),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def processes_with(marker: str) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                arguments = (entry / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue  # ended meanwhile
            if marker in arguments:
                found.append(f"{entry.name}: {arguments}")
    return found


def wait_until_none(marker: str, timeout_s: float) -> list[str]:
    """Return the processes that still have the marker among their arguments after the timeout."""
    deadline = time.monotonic() + timeout_s
    while (found := processes_with(marker)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


@pytest.mark.parametrize("n", [1, 2, 4])
def test_starts_n_ranks_of_one_world_unbound(n: int) -> None:
    done = run("-n", str(n), "python", "-c", REPORT)
    assert done.returncode == 0, done.stderr
    threads = str(max(1, cores() // n))
    allowed = len(os.sched_getaffinity(0))
    assert done.stdout.splitlines() == [str((rank, n, threads, allowed)) for rank in range(n)]


def cores() -> int:
    # Of the script's own count only the division is checked here; hardware threads are not told apart.
    probe = run("-n", "1", "sh", "-c", "echo $OMP_NUM_THREADS")
    assert probe.returncode == 0, probe.stderr
    return int(probe.stdout)


def test_a_user_s_omp_num_threads_stays() -> None:
    done = run("-n", "2", "sh", "-c", "echo $OMP_NUM_THREADS", OMP_NUM_THREADS="3")
    assert done.stdout.split() == ["3", "3"], done.stderr


def test_says_on_stderr_what_it_allows() -> None:
    n = cores() + 1
    done = run("-n", str(n), "python", "-c", REPORT)
    assert done.returncode == 0, done.stderr
    assert f"oversubscribed: {n} ranks" in done.stderr
    assert "oversubscribed" not in run("-n", "1", "true").stderr


@pytest.mark.parametrize("code", ["raise SystemExit(3)", "raise ValueError('no')", "import os; os._exit(3)"])
def test_one_rank_s_failure_is_the_job_s(code: str) -> None:
    program = f"from mpi4py import MPI\nif MPI.COMM_WORLD.rank == 1:\n    {code}\nMPI.COMM_WORLD.Barrier()"
    assert run("-n", "2", "python", "-m", "mpi4py", "-c", program).returncode != 0


def test_exit_code_0_when_all_ranks_end_well() -> None:
    assert run("-n", "2", "true").returncode == 0


def test_options_after_the_command_are_the_command_s() -> None:
    done = run("-n", "1", "python", "-c", "import sys; print(sys.argv[1:])", "-n", "5", "a b", "$HOME")
    assert done.stdout.strip() == "['-n', '5', 'a b', '$HOME']", done.stderr


def test_sigterm_leaves_no_process_behind() -> None:
    marker = f"marker-{uuid.uuid4().hex}"
    program = f"{SAYS_UP}; time.sleep(600)"
    job = subprocess.Popen(
        [str(RUN_SH), "-n", "2", "python", "-c", program, marker],
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    with job:
        assert job.stdout is not None
        assert [job.stdout.readline() for _ in range(2)] == ["up\n", "up\n"]
        assert len(processes_with(marker)) >= 3, "the launcher and two ranks"
        job.send_signal(signal.SIGTERM)
        assert job.wait(timeout=120) != 0
    assert wait_until_none(marker, timeout_s=120) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "how many ranks"),
        (["true"], "how many ranks"),
        (["-n"], "-n wants a number"),
        (["-n", "0", "true"], "got '0'"),
        (["-n", "-2", "true"], "got '-2'"),
        (["-n", "two", "true"], "got 'two'"),
        (["-n", "1.5", "true"], "got '1.5'"),
        (["-n", "2"], "what to run"),
        (["-n", "2", "no-such-command"], "no command 'no-such-command'"),
        (["-x"], "no option -x"),
    ],
)
def test_a_wrong_call_gets_one_sentence_and_2(arguments: list[str], words: str) -> None:
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


def test_h_shows_the_usage() -> None:
    done = run("-h")
    assert done.returncode == 0
    assert done.stdout.startswith("usage: launch/run.sh -n N COMMAND")


def test_an_unknown_mpi_is_refused() -> None:
    done = run("-n", "2", "true", MPI="lam")
    assert done.returncode == 2
    assert "got 'lam'" in done.stderr


def test_no_mpi_library_is_said(tmp_path: Path) -> None:
    done = run("-n", "2", "true", MPI4PY_LIBMPI=str(tmp_path / "libmpi.so"))
    assert done.returncode == 2
    assert "cannot load an MPI library" in done.stderr
    assert done.stderr.count("\n") == 1


def stand_in_mpi(folder: Path, vendor: str, launcher_says: str) -> dict[str, str]:
    """Make an mpi4py of this vendor and an mpirun that prints how it is called; return their paths."""
    package = folder / "modules" / "mpi4py"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("class rc: pass\n")
    (package / "MPI.py").write_text(f"def get_vendor(): return ({vendor!r}, (4, 1, 4))\n")
    launcher = folder / "bin" / "mpirun"
    launcher.parent.mkdir()
    launcher.write_text(
        f"#!/bin/sh\n[ \"$1\" = --version ] && echo '{launcher_says}' && exit\n"
        'echo "$*"\necho "$OMPI_ALLOW_RUN_AS_ROOT$OMPI_ALLOW_RUN_AS_ROOT_CONFIRM $OMPI_MCA_btl"\n'
    )
    launcher.chmod(0o755)
    return {"PYTHONPATH": str(package.parent), "PATH": f"{launcher.parent}{os.pathsep}{os.environ['PATH']}"}


@pytest.mark.parametrize("btl", [None, "self,tcp"])
def test_open_mpi_gets_what_it_needs_and_no_more(tmp_path: Path, btl: str | None) -> None:
    n = cores() + 1
    paths = stand_in_mpi(tmp_path, "Open MPI", "mpirun (Open MPI) 4.1.4")
    one, more = (run("-n", str(k), "true", OMPI_MCA_btl=btl, **paths) for k in (1, n))
    assert one.returncode == 0, one.stderr
    as_root = "11" if os.geteuid() == 0 else ""
    assert one.stdout.splitlines() == ["--bind-to none -n 1 true", f"{as_root} {btl or '^ofi'}"]
    assert more.stdout.splitlines()[0] == f"--bind-to none --oversubscribe -n {n} true"


def test_the_launcher_of_another_mpi_is_refused(tmp_path: Path) -> None:
    done = run("-n", "2", "true", **stand_in_mpi(tmp_path, "Open MPI", "mpirun (Open MPI) 5.0.1"))
    assert (done.returncode, done.stdout) == (2, "")
    assert "start another MPI: put the bin folder of Open MPI 4 first on PATH" in done.stderr
    assert done.stderr.count("\n") == 1


def test_an_mpi_without_a_known_launcher_is_refused(tmp_path: Path) -> None:
    done = run("-n", "2", "true", **stand_in_mpi(tmp_path, "Some MPI", "some mpirun"))
    assert (done.returncode, done.stdout) == (2, "")
    assert "loads Some MPI" in done.stderr
    assert done.stderr.count("\n") == 1


def test_an_mpi_without_its_launcher_is_said(tmp_path: Path) -> None:
    paths = stand_in_mpi(tmp_path, "MPICH", "")
    folder = tmp_path / "alone"
    folder.mkdir()
    for name in ("bash", "dirname", "env", "true"):
        (folder / name).symlink_to(str(shutil.which(name)))
    (folder / "python3").symlink_to(sys.executable)
    done = run("-n", "2", "true", **paths | {"PATH": str(folder), "VIRTUAL_ENV": str(tmp_path)})
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        "but there is no mpiexec.hydra or mpiexec or mpiexec.mpich: put the bin folder of MPICH on PATH" in done.stderr
    )
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("base", ["TMPDIR", *SESSION_BASES])
def test_what_a_killed_job_left_is_in_nobody_s_way(tmp_path: Path, base: str) -> None:
    if find_launcher(os.environ)[0] != "Open MPI":
        pytest.skip("only Open MPI 5 names the folder of a job by the launcher's process id")
    leave = f'mkdir "${base}/ompi.$$"; touch "${base}/ompi.$$/pmix.$(uname -n).tool"; exec "$@"'
    done = subprocess.run(
        ["/bin/sh", "-c", leave, "sh", str(RUN_SH), "-n", "2", "echo", "up"],
        env=environment(**dict.fromkeys(SESSION_BASES) | {base: str(tmp_path)}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stdout.split()) == (0, ["up", "up"]), done.stderr
    assert "is left from another job" in done.stderr


@pytest.mark.parametrize("name", SESSION_BASES)
def test_a_user_s_folder_for_the_launcher_stays(tmp_path: Path, name: str) -> None:
    done = run_ranks(1, ["-c", "import os; print(os.environ.get('PMIX_SERVER_TMPDIR'))"], env={name: str(tmp_path)})
    assert done.returncode == 0, done.stderr
    if find_launcher(os.environ)[0] == "Open MPI":
        assert Path(done.stdout.strip()).parent == tmp_path


def test_run_ranks_leaves_nothing_of_a_killed_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    # A launcher that is stopped does nothing on SIGTERM, and SIGKILL follows.
    stopped = tmp_path / "stopped"
    program = f"import os, signal; os.kill(os.getppid(), signal.SIGSTOP); open({str(stopped)!r}, 'w').close()"
    for timeout_s in (4, 20, 100):  # until it is enough for the rank to come up
        with pytest.raises(RanksTimeoutError):
            run_ranks(1, ["-S", "-c", program + "; signal.pause()"], timeout_s=timeout_s, env={"TMPDIR": str(tmp_path)})
        if stopped.exists():
            break
    assert list(tmp_path.iterdir()) == [stopped]


def test_run_ranks_returns_both_streams() -> None:
    program = (
        "import sys; from mpi4py import MPI; sys.stdout.write(f'{MPI.COMM_WORLD.size}\\n'); sys.stderr.write('e\\n')"
    )
    done = run_ranks(2, ["-c", program], check=True)
    assert done.stdout.split() == ["2", "2"]
    assert done.stderr.split().count("e") == 2


def test_run_ranks_works_in_a_rank_of_another_job() -> None:
    inner = "from mpi4py import MPI; import sys; sys.stdout.write(f'size {MPI.COMM_WORLD.size}\\n')"
    outer = (
        "from mpi4py import MPI; from hpc_inflight.testing.launch import run_ranks; "
        f"print(run_ranks(3, ['-c', {inner!r}], check=True).stdout)"
    )
    done = run_ranks(1, ["-c", outer], check=True)
    assert done.stdout.split() == ["size", "3"] * 3


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("ignores_term", [False, True])
def test_run_ranks_stops_at_the_deadline(ignores_term: bool) -> None:
    marker = f"marker-{uuid.uuid4().hex}"
    ignore = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " if ignores_term else ""
    program = f"{SAYS_UP}; time.sleep(600)"
    for timeout_s in (3, 15, 75, 300):  # until it is enough for the ranks to come up
        with pytest.raises(RanksTimeoutError, match=f"not ended after {timeout_s} s") as caught:
            run_ranks(2, ["-c", ignore + program, marker], timeout_s=timeout_s)
        assert wait_until_none(marker, timeout_s=120) == []
        # Hydra adds to it what it thinks of the end of the ranks.
        if caught.value.stdout.splitlines()[:2] == ["up", "up"]:
            break
    assert caught.value.stdout.splitlines()[:2] == ["up", "up"]
    assert "up" in str(caught.value)


def test_run_plain_has_no_world_and_says_how_it_failed() -> None:
    program = "import os, sys; print([k for k in os.environ if k.startswith('OMPI_COMM')]); sys.exit('no')"
    with pytest.raises(RanksFailedError, match="no") as caught:
        run_plain(["-c", program], check=True)
    assert caught.value.stdout.strip() == "[]"
