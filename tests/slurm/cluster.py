"""A SLURM cluster on this machine, for tests: real daemons, and nodes that are hosts of their own.

Each node has its own network namespace (address, loopback, host name), so ranks on two nodes meet over a network as on
real nodes, and a node can lose its power. GPUs are declared and are not there: SLURM counts them, torch finds none.
Everything lives in one folder and ends with the cluster; the machine's own SLURM, if there is one, is not touched.
"""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge", "iproute2")
PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "ip")
SYSTEM_PATH = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))

CPUS, GPUS = 64, 8
"""Of each node, as they are declared."""

# `cred_expire` is also how long a requeued job waits before it starts again; the default is two minutes.
# `SlurmdTimeout` bounds how long a node without power is believed in, `KillWait` how long a process may ignore SIGTERM.
_CONFIG = """\
ClusterName=tests
SlurmctldHost={host}({address}.254)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=4
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
GresTypes=gpu
SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=0,bf_interval=1
KillWait=10
CompleteWait=0
ReturnToService=2
SlurmdTimeout=30
"""


class ClusterError(Exception):
    """Why there is no cluster on this machine."""


def install() -> None:
    """See that SLURM's programs are there: by apt where this process may install, in bounded time.

    Raises:
        ClusterError: they are not there and cannot be had.
    """
    missing = [name for name in PROGRAMS if shutil.which(name, path=SYSTEM_PATH) is None]
    if os.geteuid() != 0:
        raise ClusterError("a SLURM cluster needs root: it makes network namespaces")
    if not missing:
        return
    if shutil.which("apt-get") is None:
        raise ClusterError(f"{', '.join(missing)} not found, and no apt-get to install them")
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update", "-qq"], ["install", "-y", "-qq", "--no-install-recommends", *PACKAGES]):
        try:
            subprocess.run(["apt-get", *command], check=True, env=quiet, capture_output=True, timeout=180)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            raise ClusterError(f"SLURM cannot be installed: {error}") from None


def wait_until(condition: Callable[[], bool], what: str, *, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not after {seconds:.0f} s")
        time.sleep(0.1)


class Cluster:
    """Nodes node1, node2, …, each of `CPUS` processors and `GPUS` GPUs, in one partition."""

    def __init__(self, folder: Path, address: str, tag: str, *, nodes: int) -> None:
        self.folder, self._address, self._tag = folder, address, tag
        self.nodes = [f"node{number}" for number in range(1, nodes + 1)]
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": SYSTEM_PATH}

    def run(
        self, *command: object, env: Mapping[str, str] | None = None, cwd: Path | None = None, status: int | None = 0
    ) -> str:
        """A client's command, as on a login node; its output, both streams. `status` None: any."""
        done = subprocess.run(
            [str(word) for word in command], cwd=cwd, env={**os.environ, **self.environment, **(env or {})}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300, check=False,
        )  # fmt: skip
        assert status in (None, done.returncode), f"{command}: status {done.returncode}\n{done.stdout}"
        return done.stdout.strip()

    def state(self, job: str) -> str:
        """RUNNING, PENDING, COMPLETED, FAILED, CANCELLED, …"""
        return self._field(job, "JobState")

    def exit_code(self, job: str) -> int:
        return int(self._field(job, "ExitCode").partition(":")[0])

    def restarts(self, job: str) -> int:
        return int(self._field(job, "Restarts"))

    def _field(self, job: str, name: str) -> str:
        words = self.run("scontrol", "show", "job", job).split()
        return next(word.partition("=")[2] for word in words if word.startswith(f"{name}="))

    def wait(self, job: str, *, seconds: float = 240.0) -> str:
        """Wait until a job is over; its state then."""
        over = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"}
        wait_until(lambda: self.state(job) in over, f"job {job} over", seconds=seconds)
        wait_until(lambda: not self.run("squeue", "-h", "-j", job, status=None), f"job {job} cleaned up")
        return self.state(job)

    def processes(self, node: str) -> list[int]:
        """Everything that runs on a node, its daemon included."""
        return [int(pid) for pid in self.run("ip", "netns", "pids", self._namespace(node)).split()]

    def start_node(self, node: str) -> None:
        """Start a node's daemon, at first or after it was killed."""
        inside = 'hostname "$1"; mount --bind "$2/hosts" /etc/hosts; exec slurmd -f "$2/slurm.conf" -N "$1"'
        space = f"/run/netns/{self._namespace(node)}"
        self.run(
            "nsenter", f"--net={space}", "unshare", "--uts", "--mount", "bash", "-ec", inside, "_", node, self.folder
        )

    def power_off(self, node: str) -> None:
        """Everything on the node ends at once, its daemon and the steps' too."""
        for pid in self.processes(node):
            _signal(pid, signal.SIGKILL)

    def idle(self) -> bool:
        states = self.run("sinfo", "-h", "-N", "-o", "%t", status=None).split()
        return states == ["idle"] * len(self.nodes)

    def start(self) -> None:
        self._write_files()
        self._connect()
        munge = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munged.pid", "log-file": "munged.log"}
        files = [f"--{option}={self.folder / name}" for option, name in munge.items()]
        self.run("munged", *files, f"--seed-file={self.folder / 'munge.seed'}")
        self.run("slurmctld", "-c", "-i", "-f", self.folder / "slurm.conf")
        for node in self.nodes:
            self.start_node(node)
        wait_until(self.idle, "nodes idle", seconds=30)

    def stop(self) -> None:
        """Cancel the jobs, end the daemons that `start` started, take the network away."""
        if self.run("squeue", "-h", status=None):
            self.run("scancel", "--full", "--signal=KILL", "--user=root", status=None)
            self.run("scancel", "--user=root", status=None)
        for node in self.nodes:
            self.power_off(node)
        for name in ("slurmctld.pid", "munged.pid"):
            _end(self.folder / name)
        _remove_network(self._tag)

    def _namespace(self, node: str) -> str:
        return f"{self._tag}-{node}"

    def _write_files(self) -> None:
        for name in ("state", *(f"spool-{node}" for node in self.nodes)):
            (self.folder / name).mkdir()
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(1024))
        addresses = {node: f"{self._address}.{number}" for number, node in enumerate(self.nodes, 1)}
        ports = _free_ports(len(self.nodes) + 1)
        lines = [_CONFIG.format(host=socket.gethostname(), address=self._address, ports=ports, folder=self.folder)]
        for (node, address), port in zip(addresses.items(), ports[1:], strict=True):
            lines.append(
                f"NodeName={node} NodeHostname={node} NodeAddr={address} Port={port} CPUs={CPUS} RealMemory=1000000 "
                f"Gres=gpu:{GPUS} State=UNKNOWN\n"
            )
        lines.append(f"PartitionName=main Nodes={','.join(self.nodes)} Default=YES MaxTime=INFINITE State=UP\n")
        (self.folder / "slurm.conf").write_text("".join(lines), encoding="utf-8")
        # A GPU must name a device; a link to any will do.
        for number in range(GPUS):
            (self.folder / f"gpu{number}").symlink_to("/dev/null")
        gres = f"NodeName={','.join(self.nodes)} Name=gpu File={self.folder}/gpu[0-{GPUS - 1}]\n"
        (self.folder / "gres.conf").write_text(gres, encoding="utf-8")
        hosts = Path("/etc/hosts").read_text(encoding="utf-8")
        hosts += "".join(f"\n{address} {node}\n::ffff:{address} {node}" for node, address in addresses.items())
        (self.folder / "hosts").write_text(hosts + "\n", encoding="utf-8")

    def _connect(self) -> None:
        """A bridge, and a cable from it to each node."""
        bridge = f"{self._tag}br"
        self._ip("link", "add", bridge, "type", "bridge")
        self._ip("addr", "add", f"{self._address}.254/24", "dev", bridge)
        self._ip("link", "set", bridge, "up")
        for number, node in enumerate(self.nodes, 1):
            space, cable = self._namespace(node), f"{self._tag}v{number}"
            self._ip("netns", "add", space)
            self._ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", space)
            self._ip("link", "set", cable, "master", bridge, "up")
            self._ip("-n", space, "addr", "add", f"{self._address}.{number}/24", "dev", "eth0")
            self._ip("-n", space, "link", "set", "lo", "up")
            self._ip("-n", space, "link", "set", "eth0", "up")

    def _ip(self, *words: str) -> None:
        done = subprocess.run(
            ["ip", *words], env={**os.environ, "PATH": SYSTEM_PATH}, check=False, capture_output=True, text=True
        )
        if done.returncode != 0:
            raise ClusterError(f"no network for the nodes: ip {' '.join(words)}: {done.stderr.strip()}")


@contextmanager
def running_cluster(*, nodes: int = 2) -> Iterator[Cluster]:
    """A cluster, and its end.

    Raises:
        ClusterError: this machine can have none; the reason.
    """
    install()
    _remove_networks_of_the_dead()
    # The names of links have 15 letters; the process id keeps those of two test runs apart.
    tag, number = f"st{os.getpid()}", os.getpid() % 64_000
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slurm-")))
        # munge wants its socket where everybody may go.
        folder.chmod(0o711)
        cluster = Cluster(folder, f"10.{number // 256}.{number % 256}", tag, nodes=nodes)
        stack.callback(cluster.stop)
        cluster.start()
        yield cluster


def _remove_networks_of_the_dead() -> None:
    """A test run that was killed cannot take its network away; the next one does."""
    names = subprocess.run(
        ["ip", "-br", "link"], check=False, env={**os.environ, "PATH": SYSTEM_PATH}, capture_output=True, text=True
    )
    for line in names.stdout.splitlines():
        name = line.split()[0]
        owner = name.removeprefix("st").removesuffix("br")
        if name == f"st{owner}br" and owner.isdigit() and not Path("/proc", owner).exists():
            _remove_network(f"st{owner}")


def _remove_network(tag: str) -> None:
    environment = {**os.environ, "PATH": SYSTEM_PATH}
    listed = subprocess.run(["ip", "netns", "list"], env=environment, capture_output=True, text=True, check=False)
    spaces = [line.split()[0] for line in listed.stdout.splitlines() if line.startswith(f"{tag}-")]
    for space in spaces:
        pids = subprocess.run(
            ["ip", "netns", "pids", space], env=environment, capture_output=True, text=True, check=False
        )
        for pid in pids.stdout.split():
            _signal(int(pid), signal.SIGKILL)
        subprocess.run(["ip", "netns", "del", space], env=environment, check=False, capture_output=True)
    subprocess.run(["ip", "link", "del", f"{tag}br"], env=environment, check=False, capture_output=True)


def _end(pid_file: Path) -> None:
    if not pid_file.exists():
        return
    pid = int(pid_file.read_text())
    # Nothing of it is kept, and an orderly end takes seconds.
    _signal(pid, signal.SIGKILL)
    wait_until(lambda: not Path("/proc", str(pid)).exists(), f"process {pid} ended", seconds=10)


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in sockets:
            probe.bind(("", 0))
        return [probe.getsockname()[1] for probe in sockets]
