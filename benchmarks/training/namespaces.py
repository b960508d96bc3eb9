"""Simulated nodes on this machine: network namespaces on one bridge, whose links have a limited rate."""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dist_transformer.base.errors import UserError

INTERFACE = "eth0"
"""Interface of each node towards the other nodes."""
_SYSTEM_PATH = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))
# Depth of the token bucket: two packets of the kernel's largest size.
_BURST = "128kb"


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    space: str
    """Name of the node's namespace."""
    address: str

    @property
    def entry(self) -> list[str]:
        """Give the command prefix that runs a command on the node."""
        return ["ip", "netns", "exec", self.space]


@contextmanager
def namespace_nodes(count: int) -> Iterator[list[Node]]:
    """Make nodes that reach each other. At the end, kill the processes that still run there and remove the nodes.

    Raises:
        UserError: the nodes cannot be made on this machine.
    """
    missing = [name for name in ("ip", "tc") if shutil.which(name, path=_SYSTEM_PATH) is None]
    if os.geteuid() != 0 or missing:
        lack = "root" if os.geteuid() != 0 else f"{' and '.join(missing)} (Debian and Ubuntu: apt-get install iproute2)"
        raise UserError(f"nodes are simulated with network namespaces, which need {lack}")
    # Names of links have at most 15 letters. The process id keeps the names of two runs distinct.
    tag, number = f"ln{os.getpid()}", os.getpid() % 64_000
    network = f"10.{number // 256}.{number % 256}"
    nodes = [Node(space=f"{tag}-{rank}", address=f"{network}.{rank + 1}") for rank in range(count)]
    bridge = f"{tag}br"
    try:
        _ip("link", "add", bridge, "type", "bridge")
        _ip("link", "set", bridge, "up")
        for rank, node in enumerate(nodes):
            _ip("netns", "add", node.space)
            cable = f"{tag}v{rank}"
            _ip("link", "add", cable, "type", "veth", "peer", "name", INTERFACE, "netns", node.space)
            _ip("link", "set", cable, "master", bridge, "up")
            _ip("-n", node.space, "addr", "add", f"{node.address}/24", "dev", INTERFACE)
            _ip("-n", node.space, "link", "set", "lo", "up")
            _ip("-n", node.space, "link", "set", INTERFACE, "up")
        yield nodes
    finally:
        _remove(nodes, bridge)


def limit_link(mbit: float) -> None:
    """Limit the rate at which this namespace's node sends. Packets wait in a queue and are not dropped."""
    words = ["qdisc", "replace", "dev", INTERFACE, "root", "tbf", "rate", f"{mbit:g}mbit", "burst", _BURST]
    _run("tc", *words, "limit", "64mb")


def sent_bytes() -> int:
    """Count the bytes that this node has sent."""
    return int(Path("/sys/class/net", INTERFACE, "statistics", "tx_bytes").read_text(encoding="ascii"))


def _remove(nodes: Sequence[Node], bridge: str) -> None:
    existing = {line.split()[0] for line in _ip("netns", "list").splitlines()}
    for node in nodes:
        if node.space in existing:
            for process in _ip("netns", "pids", node.space).split():
                os.kill(int(process), 9)
            _ip("netns", "del", node.space)
    if bridge in _ip("-br", "link"):
        _ip("link", "del", bridge)


def _ip(*words: str) -> str:
    return _run("ip", *words)


def _run(*words: str) -> str:
    environment = {**os.environ, "PATH": _SYSTEM_PATH}
    done = subprocess.run(words, env=environment, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise UserError(f"links between nodes cannot be made here: {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout
