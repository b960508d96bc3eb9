"""Nodes on this machine: network namespaces on one bridge, each of which sends over a link of a limited rate."""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dist_transformer.errors import UserError

INTERFACE = "eth0"
"""Of each node, towards the others."""
_SYSTEM_PATH = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))
# A token bucket's depth: two packets as large as the kernel makes them.
_BURST = "128kb"


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    space: str
    """Name of its namespace."""
    address: str

    @property
    def entry(self) -> list[str]:
        """Words before a command that runs there."""
        return ["ip", "netns", "exec", self.space]


@contextmanager
def namespace_nodes(count: int) -> Iterator[list[Node]]:
    """Make nodes that reach each other, and remove them at the end with all that still runs there.

    Raises:
        UserError: this machine can have none; the reason.
    """
    missing = [name for name in ("ip", "tc") if shutil.which(name, path=_SYSTEM_PATH) is None]
    if os.geteuid() != 0 or missing:
        lack = "root" if os.geteuid() != 0 else f"{' and '.join(missing)} (Debian and Ubuntu: apt-get install iproute2)"
        raise UserError(f"nodes with links of their own are network namespaces, which need {lack}")
    # Names of links have 15 letters; the process id keeps those of two runs apart.
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
    """Let this node, in whose namespace the caller runs, send at most so many Mbit/s; what waits is not dropped."""
    words = ["qdisc", "replace", "dev", INTERFACE, "root", "tbf", "rate", f"{mbit:g}mbit", "burst", _BURST]
    _run("tc", *words, "limit", "64mb")


def sent_bytes() -> int:
    """Bytes that this node has sent."""
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
        raise UserError(f"no links between nodes on this machine: {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout
