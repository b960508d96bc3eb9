"""A SLURM cluster on this machine, for tests: real daemons, and hosts of their own.

Each host has a folder `disk` and a network namespace of its own (address, loopback, host name), so ranks on two nodes
meet over a network as on real nodes, and a node can lose its power. What runs on a host is known by its namespace, and
ends with it. GPUs are declared and are not there: SLURM counts them, torch finds none. Half of a node's GPUs are near
each of its two sockets. Batch scripts find no Python, and srun has the options of pyxis (host.c). Everything lives in
one folder and ends with the cluster; the machine's own SLURM, if there is one, is not touched.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "libslurm-dev", "munge", "iproute2", "gcc", "libc6-dev")
PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "ip", "gcc")
PLUGIN_HEADER = Path("/usr/include/slurm/spank.h")
SYSTEM_PATH = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))

CONTROLLER = "controller"

CPUS, GPUS = 64, 8
"""Declared resources of each node."""

# `cred_expire` is also how long a requeued job waits before it starts again: 120 s, or what is given, at least 5.
# `SlurmdTimeout` bounds how long a node without power is believed in, `KillWait` how long a process may ignore SIGTERM.
# `MinJobAge` keeps jobs that are over, about which later tests ask.
_CONFIG = """\
ClusterName=tests
SlurmctldHost={controller}({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
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
MinJobAge=7200
ReturnToService=1
SlurmdTimeout=30
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
"""

URGENT = "urgent"
"""The partition whose jobs preempt those of the other."""
GRACE_SECONDS = 60


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
    if not PLUGIN_HEADER.exists():
        missing.append(str(PLUGIN_HEADER))
    if not missing:
        return
    if shutil.which("apt-get") is None:
        raise ClusterError(f"{', '.join(missing)} not found, and no apt-get to install them")
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update", "-qq"], ["install", "-y", "-qq", "--no-install-recommends", *PACKAGES]):
        try:
            subprocess.run(["apt-get", *command], check=True, env=quiet, capture_output=True, timeout=600)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            raise ClusterError(f"SLURM cannot be installed: {error}") from None


def interpreters() -> list[str]:
    """List the Pythons that a script could run on this machine, and this one."""
    folders = [Path(folder) for folder in SYSTEM_PATH.split(os.pathsep) if folder]
    named = {path.resolve() for folder in folders for path in folder.glob("python3*")}
    return sorted(str(path) for path in named | {Path(sys.executable).resolve()} if path.is_file())


def wait_until(condition: Callable[[], bool], what: str, *, seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not after {seconds:.0f} s")
        time.sleep(0.1)


class Cluster:
    """Nodes node1, node2, …, each of `CPUS` processors and `GPUS` GPUs, all in both partitions."""

    def __init__(self, folder: Path, network: str, tag: str, *, nodes: int) -> None:
        self.folder, self._network, self._tag = folder, network, tag
        self.nodes = [f"node{number}" for number in range(1, nodes + 1)]
        self._addresses = {host: f"{network}.{number}" for number, host in enumerate([CONTROLLER, *self.nodes], 1)}
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": SYSTEM_PATH}

    def run(
        self, *command: object, env: Mapping[str, str] | None = None, cwd: Path | None = None, status: int | None = 0
    ) -> str:
        """A client's command, as on a login node; its output, both streams. `status` None: any."""
        done = subprocess.run(
            [str(word) for word in command],
            cwd=cwd,
            env={**os.environ, **self.environment, **(env or {})},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=300,
            check=False,
        )
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

    def wait(self, job: str, *, seconds: float = 600.0) -> str:
        """Wait until a job is over; its state then."""
        over = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"}
        wait_until(lambda: self.state(job) in over, f"job {job} over", seconds=seconds)
        wait_until(lambda: not self.run("squeue", "-h", "-j", job, status=None), f"job {job} cleaned up")
        return self.state(job)

    def processes(self, host: str) -> list[int]:
        """Everything that runs on a host, its daemons included."""
        return [int(pid) for pid in self.run("ip", "netns", "pids", self._namespace(host)).split()]

    def start_node(self, node: str) -> None:
        """Start a node's daemon, at first or after it was killed."""
        self._run_on(node, "slurmd", "-f", self.folder / "slurm.conf", "-N", node)

    def kill_daemon(self, node: str) -> None:
        """Stop only that: the node's jobs continue, and no other node hears of them."""
        os.kill(int((self.folder / f"{node}.pid").read_text(encoding="utf-8")), signal.SIGKILL)

    def power_off(self, host: str) -> None:
        """Everything on the host ends at once."""
        _kill_all(self._namespace(host))

    def idle(self) -> bool:
        states = self.run("sinfo", "-h", "-N", "-p", "main", "-o", "%t", status=None).split()
        return states == ["idle"] * len(self.nodes)

    def start(self) -> None:
        self._write_files()
        self._build_plugin()
        self._connect()
        munge = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munged.pid", "log-file": "munged.log"}
        files = [f"--{option}={self.folder / name}" for option, name in munge.items()]
        self._run_on(CONTROLLER, "munged", *files, f"--seed-file={self.folder / 'munge.seed'}")
        self._run_on(CONTROLLER, "slurmctld", "-c", "-i", "-f", self.folder / "slurm.conf")
        for node in self.nodes:
            self.start_node(node)
        wait_until(self.idle, "nodes idle")

    def _run_on(self, host: str, *command: object) -> None:
        own = self.folder / f"disk-{host}"
        own.mkdir(exist_ok=True)
        prepare = 'hostname "$1"; mount --bind "$2/hosts" /etc/hosts; mount --bind "$3" "$2/disk"; shift 3; exec "$@"'
        unshare = ["unshare", "--uts", "--mount", "bash", "-ec", prepare, "_", host, self.folder, own]
        self.run("nsenter", f"--net=/run/netns/{self._namespace(host)}", *unshare, *command)

    def _namespace(self, host: str) -> str:
        return f"{self._tag}-{host}"

    def _write_files(self) -> None:
        for name in ("state", "disk", *(f"spool-{node}" for node in self.nodes)):
            (self.folder / name).mkdir()
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(1024))
        lines = [_CONFIG.format(controller=CONTROLLER, address=self._addresses[CONTROLLER], folder=self.folder)]
        lines += [
            f"NodeName={node} NodeHostname={node} NodeAddr={self._addresses[node]} CPUs={CPUS} Sockets=2 "
            f"CoresPerSocket={CPUS // 2} ThreadsPerCore=1 RealMemory=1000000 Gres=gpu:{GPUS} State=UNKNOWN\n"
            for node in self.nodes
        ]
        everywhere = f"Nodes={','.join(self.nodes)} MaxTime=INFINITE State=UP"
        lines += [
            f"PartitionName=main {everywhere} Default=YES PriorityTier=1 GraceTime={GRACE_SECONDS}\n",
            f"PartitionName={URGENT} {everywhere} PriorityTier=2\n",
        ]
        (self.folder / "slurm.conf").write_text("".join(lines), encoding="utf-8")
        # A GPU must name a device; a link to any will do.
        for number in range(GPUS):
            (self.folder / f"gpu{number}").symlink_to("/dev/null")
        half, everywhere = GPUS // 2, ",".join(self.nodes)
        gres = "".join(
            f"NodeName={everywhere} Name=gpu File={self.folder}/gpu[{first}-{first + half - 1}] "
            f"Cores={first // half * CPUS // 2}-{first // half * CPUS // 2 + CPUS // 2 - 1}\n"
            for first in (0, half)
        )
        (self.folder / "gres.conf").write_text(gres, encoding="utf-8")
        hosts = Path("/etc/hosts").read_text(encoding="utf-8")
        # torch asks for the names of addresses in the IPv6 form, too.
        hosts += "".join(f"\n{ip} {host}\n::ffff:{ip} {host}" for host, ip in self._addresses.items())
        (self.folder / "hosts").write_text(hosts + "\n", encoding="utf-8")

    def _build_plugin(self) -> None:
        plugin = self.folder / "host.so"
        source = Path(__file__).with_name("host.c")
        subprocess.run(["gcc", "-Wall", "-Werror", "-shared", "-fPIC", "-o", plugin, source], check=True, timeout=60)
        line = f"required {plugin} hide={':'.join(interpreters())}\n"
        (self.folder / "plugstack.conf").write_text(line, encoding="utf-8")

    def _connect(self) -> None:
        """A bridge, a cable from it to each host, and an address on it for the clients here."""
        bridge = f"{self._tag}br"
        _ip("link", "add", bridge, "type", "bridge")
        _ip("addr", "add", f"{self._network}.254/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        for number, (host, address) in enumerate(self._addresses.items()):
            space, cable = self._namespace(host), f"{self._tag}v{number}"
            _ip("netns", "add", space)
            _ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", space)
            _ip("link", "set", cable, "master", bridge, "up")
            _ip("-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "lo", "up")
            _ip("-n", space, "link", "set", "eth0", "up")


@contextmanager
def running_cluster(*, nodes: int = 2) -> Iterator[Cluster]:
    """A cluster, and its end.

    Raises:
        ClusterError: this machine can have none; the reason.
    """
    install()
    _remove_clusters_of_the_dead()
    # Links have names of 15 letters; the process id keeps those of two test runs apart.
    tag, number = f"st{os.getpid()}", os.getpid() % 64_000
    with ExitStack() as stack:
        # What has just been killed may still write.
        temporary = tempfile.TemporaryDirectory(prefix=f"{tag}-", ignore_cleanup_errors=True)
        folder = Path(stack.enter_context(temporary))
        # munge wants its socket where everybody may go.
        folder.chmod(0o711)
        cluster = Cluster(folder, f"10.{number // 256}.{number % 256}", tag, nodes=nodes)
        stack.callback(_remove, tag)
        cluster.start()
        yield cluster


def _remove_clusters_of_the_dead() -> None:
    """A test run that was killed cannot end its cluster; the next one does."""
    for line in _ip("-br", "link").splitlines():
        owner = line.split()[0].removeprefix("st").removesuffix("br")
        if line.startswith(f"st{owner}br") and owner.isdigit() and not Path("/proc", owner).exists():
            _remove(f"st{owner}")
            for folder in Path(tempfile.gettempdir()).glob(f"st{owner}-*"):
                shutil.rmtree(folder, ignore_errors=True)


def _remove(tag: str) -> None:
    """End all that runs on the hosts of a cluster, and take its network away."""
    for line in _ip("netns", "list").splitlines():
        space = line.split()[0]
        if space.startswith(f"{tag}-"):
            _kill_all(space)
            _ip("netns", "del", space)
    if f"{tag}br" in _ip("-br", "link"):
        _ip("link", "del", f"{tag}br")


def _kill_all(space: str) -> None:
    def kill() -> bool:
        pids = [int(pid) for pid in _ip("netns", "pids", space).split()]
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not pids

    wait_until(kill, f"{space} has no process")


def _ip(*words: str) -> str:
    done = subprocess.run(
        ["ip", *words], env={**os.environ, "PATH": SYSTEM_PATH}, check=False, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise ClusterError(f"no network for the nodes: ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout
