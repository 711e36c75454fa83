"""A real Slurm cluster of two nodes on this one machine, for tests: ``python tests/slurm/cluster.py -h``.

Needs root and the Debian packages of `PACKAGES`; neither systemd nor cgroups. Each node is a slurmd in its own UTS and
mount namespace, so that it has its own host name (n1, n2): MPI libraries tell nodes apart by that. The files, the
loopback network and /dev/shm are shared. Authentication, ports and state are the cluster's own: several run side by
side, and beside a Slurm that the machine has already.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGES = ("slurm-wlm", "munge", "libpmix2")
NODES = ("n1", "n2")
CPUS = 4
GPUS = 4
_START_S = 120.0
_STOP_S = 30.0
_APT_S = 600.0

_SLURM_CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={root}/munge.sock
CredType=cred/munge
MailProg=/bin/true
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0,sched_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
ReturnToService=2
SlurmctldPort={ports[0]}
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool-%n
TmpFS={root}/tmp-%n
SlurmdParameters=config_overrides
KillWait=5
PropagateResourceLimits=NONE
NodeName=n1 NodeAddr=127.0.0.11 Port={ports[1]} CPUs={cpus} RealMemory=4000 Gres=gpu:fake:{gpus}
NodeName=n2 NodeAddr=127.0.0.12 Port={ports[2]} CPUs={cpus} RealMemory=4000 Gres=gpu:fake:{gpus}
PartitionName=debug Nodes=n[1-2] Default=YES MaxTime=INFINITE DefaultTime=600 State=UP
"""

# In the node's namespaces. The daemon ends with the process that started the cluster, also when that is killed.
_NODE = """
hostname "$1"
mount --make-rprivate /
mount --bind "$2/hosts" /etc/hosts
mount --bind "$2/own-$1" "$2/own"
exec setpriv --pdeathsig TERM slurmd -D -N "$1" -f "$2/slurm.conf"
"""


class ClusterError(RuntimeError):
    """No cluster can run here; the message says why."""


def install() -> None:
    """Install the packages where they are missing.

    Raises:
        ClusterError: This is no Debian, not root, or apt-get failed.
    """
    if all(shutil.which(name, path=_path()) for name in ("slurmctld", "slurmd", "srun", "munged")):
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise ClusterError(f"Slurm is not installed; as root on Debian: apt-get install {' '.join(PACKAGES)}")
    env = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for command in (
        ["apt-get", "update", "-qq"],
        ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *PACKAGES],
    ):
        try:
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=_APT_S, check=False)
        except subprocess.TimeoutExpired:
            raise ClusterError(f"{' '.join(command)} took over {_APT_S:.0f} s") from None
        if done.returncode:
            raise ClusterError(f"{' '.join(command)} failed: {(done.stderr or done.stdout)[-1000:].strip()}")


class Cluster:
    """The cluster's daemons and its folder.

    Attributes:
        root: Folder with configuration, state and logs. On each node ``own`` in it is another folder, which the
            machine itself sees as ``own-n1`` and ``own-n2``.
        env: What Slurm's commands need in their environment.
    """

    def __init__(self) -> None:
        """Check what a cluster needs; nothing is started.

        Raises:
            ClusterError: It cannot run here.
        """
        if os.geteuid() != 0:
            raise ClusterError("a Slurm cluster on one machine needs root, for namespaces and device nodes")
        missing = [
            n for n in ("slurmctld", "slurmd", "munged", "unshare", "setpriv") if not shutil.which(n, path=_path())
        ]
        if missing:
            raise ClusterError(f"{', '.join(missing)} not found: apt-get install {' '.join(PACKAGES)}")
        if subprocess.run(["unshare", "--uts", "--mount", "true"], capture_output=True, check=False).returncode:
            raise ClusterError("this container may not make UTS and mount namespaces (unshare --uts --mount fails)")
        _link_pmix()
        # not in /tmp: a test may want a node to have its own
        self.root = Path(tempfile.mkdtemp(prefix="slurm-test-", dir="/var/tmp"))
        self.env = {"SLURM_CONF": str(self.root / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start the daemons and return when both nodes are idle.

        Raises:
            ClusterError: They did not come up; the logs' ends are in the message.
        """
        self._configure()
        root = str(self.root)
        munge = [f"--{name}-file={root}/munge.{name}" for name in ("key", "pid", "log", "seed")]
        self._daemon("munged", ["munged", "--foreground", "--force", f"--socket={root}/munge.sock", *munge])
        self._wait_for("munged", (self.root / "munge.sock").exists)
        self._daemon("slurmctld", ["slurmctld", "-D", "-c", "-f", f"{root}/slurm.conf"])
        for node in NODES:
            self._daemon(node, ["unshare", "--uts", "--mount", "sh", "-euc", _NODE, "node", node, root], wrapped=True)
        self._wait_for("the nodes", self._idle)

    def run(self, *command: str, timeout_s: float = 60.0, **env: str) -> subprocess.CompletedProcess[str]:
        """Run one of Slurm's commands."""
        return subprocess.run(
            command,
            env=os.environ | self.env | env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )

    def stop(self) -> None:
        """Cancel all jobs, end what `start` started, and remove the folder."""
        with contextlib.suppress(OSError, subprocess.TimeoutExpired, ClusterError):
            self.run("scancel", "--user=root", timeout_s=10)
            self._wait_for("the jobs", lambda: not self.run("squeue", "-h", timeout_s=5).stdout.strip(), _STOP_S)
        # munged last: the others sign with it what they still have to say
        for daemons in (self._daemons[1:], self._daemons[:1]):
            for daemon in daemons:
                daemon.terminate()
            deadline = time.monotonic() + _STOP_S
            while any(daemon.poll() is None for daemon in daemons) and time.monotonic() < deadline:
                time.sleep(0.05)
            for daemon in daemons:
                daemon.kill()
                daemon.wait()
        self._daemons.clear()
        shutil.rmtree(self.root, ignore_errors=True)

    def logs(self) -> str:
        """Return the ends of the daemons' logs."""
        return "\n".join(
            f"--- {f.name}\n{f.read_text(errors='replace')[-3000:]}" for f in sorted(self.root.glob("*.log"))
        )

    def _configure(self) -> None:
        root, host = self.root, socket.gethostname()
        for folder in ("state", "own", *(f"{kind}-{node}" for kind in ("spool", "tmp", "own") for node in NODES)):
            (root / folder).mkdir()
        for index in range(GPUS):
            os.mknod(root / f"gpu{index}", stat.S_IFCHR | 0o666, os.makedev(1, 3))  # /dev/null by another name
        (root / "munge.key").write_bytes(os.urandom(128))
        (root / "munge.key").chmod(0o600)
        (root / "hosts").write_text(f"127.0.0.1 localhost {host}\n127.0.0.11 n1\n127.0.0.12 n2\n")
        (root / "gres.conf").write_text(f"NodeName=n[1-2] Name=gpu Type=fake File={root}/gpu[0-{GPUS - 1}]\n")
        ports = _free_ports(3)
        text = _SLURM_CONF.format(root=root, host=host.split(".")[0], ports=ports, cpus=CPUS, gpus=GPUS)
        (root / "slurm.conf").write_text(text)

    def _daemon(self, name: str, command: list[str], *, wrapped: bool = False) -> None:
        if not wrapped:
            command = ["setpriv", "--pdeathsig", "TERM", *command]
        with (self.root / f"{name}.log").open("wb") as log:
            self._daemons.append(
                subprocess.Popen(
                    command,
                    env={"PATH": _path(), "LANG": "C.UTF-8"},  # nothing of the tests' environment in the jobs
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )

    def _idle(self) -> bool:
        return len(set(self.run("sinfo", "-h", "-N", "-t", "idle", "-o", "%N").stdout.split())) == len(NODES)

    def _wait_for(self, what: str, done: object, timeout_s: float = _START_S) -> None:
        assert callable(done)
        deadline = time.monotonic() + timeout_s
        while not done():
            if any(daemon.poll() is not None for daemon in self._daemons) or time.monotonic() > deadline:
                raise ClusterError(f"{what} did not get ready within {timeout_s:.0f} s\n{self.logs()}")
            time.sleep(0.05)


@contextlib.contextmanager
def running() -> Iterator[Cluster]:
    """Give a cluster that has started, and stop it at the end."""
    cluster = Cluster()
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def _path() -> str:
    return os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"  # where a user's PATH may lack Debian's daemons


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("", 0))
        return [one.getsockname()[1] for one in sockets]


def _link_pmix() -> None:
    """Debian's plugin loads libpmix.so, which is in libpmix-dev; the library itself is there."""
    for library in Path("/usr/lib").glob("*/pmix2/lib/libpmix.so.2"):
        with contextlib.suppress(FileExistsError):
            (library.parent / "libpmix.so").symlink_to(library.name)


def main() -> int:
    """Keep a cluster up for a command, or until interrupted."""
    parser = argparse.ArgumentParser(description="Run COMMAND beside a Slurm cluster of two nodes, n1 and n2.")
    parser.add_argument("--install", action="store_true", help=f"first apt-get install {' '.join(PACKAGES)}")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="default: a shell")
    options = parser.parse_args()
    try:
        if options.install:
            install()
        with running() as cluster:
            command = options.command or [os.environ.get("SHELL", "/bin/sh")]
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command's, if it wants it
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # through `running`, which ends the jobs
            return subprocess.run(command, env=os.environ | cluster.env, check=False).returncode
    except ClusterError as error:
        sys.stderr.write(f"cluster.py: {error}\n")
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
