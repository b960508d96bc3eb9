"""Processes of a launch on one machine: one leads, and sends messages and open files to the others.

Messages are sent through Unix sockets, and files with them as descriptors (SCM_RIGHTS). So a shared file has no name
that another process could open, and nothing of it is left when the processes end, also after a kill. If a peer dies,
the connection is closed.
"""

import os
import secrets
import socket
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Client, Connection
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any

from dist_transformer.base.errors import UserError
from dist_transformer.base.messages import pack, unpack
from dist_transformer.runtime import distributed

_CONNECT_SECONDS = 120.0
_INTACT = "the last checkpoint is intact"


class Node:
    """This process and the other processes of its node; made by `join_node`.

    Args:
        members: ranks of the node's processes, in order; the first one leads.
        leaders: the leading ranks of all nodes.
        links: for the leader, connections to the other members; for each other member, that to the leader. Only
            bytes go through them, because `send` and `recv` would use pickles.
    """

    def __init__(self, rank: int, members: Sequence[int], leaders: Sequence[int], links: dict[int, Connection]):
        self.rank, self.members, self.leaders = rank, tuple(members), tuple(leaders)
        self._links = links

    @property
    def leads(self) -> bool:
        return self.rank == self.members[0]

    @property
    def is_shared(self) -> bool:
        """Whether the node has other processes."""
        return len(self.members) > 1

    def tell(self, message: Any, descriptor: int | None = None) -> None:
        """Send a message from the leader to all others.

        Args:
            message: JSON value; `base.messages.pack` says what it changes.
            descriptor: an open file to send with the message.

        Raises:
            UserError: one of the processes has ended.
        """
        content = pack([message, descriptor is not None])
        for rank, link in self._links.items():
            try:
                link.send_bytes(content)
                if descriptor is not None:
                    send_handle(link, descriptor, None)
            except OSError:
                raise UserError(f"rank {rank} of this node has ended: see its message; {_INTACT}") from None

    def hear(self) -> tuple[Any, int | None]:
        """Wait for the next message of the leader.

        Returns:
            message and descriptor, as passed to `tell`; the caller closes the descriptor.

        Raises:
            UserError: the leader has ended.
        """
        (link,) = self._links.values()
        try:
            message, has_descriptor = unpack(link.recv_bytes())
            return message, recv_handle(link) if has_descriptor else None
        except (OSError, EOFError):
            raise UserError(
                f"rank {self.members[0]}, which reads the data for this node, has ended: see its message; {_INTACT}"
            ) from None

    def hang_up(self) -> None:
        """Close all connections; a thread that waits in `tell` or `hear` gets its error."""
        for link in self._links.values():
            with suppress(OSError), socket.fromfd(link.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as end:
                end.shutdown(socket.SHUT_RDWR)


def join_node() -> Node:
    """Find the processes of this node and connect them.

    Collective: every rank must call it.

    Raises:
        UserError: on all ranks, if the processes of a node cannot be connected.
    """
    rank = distributed.rank()
    places = distributed.gather_objects(_place(rank))
    members = [other for other, place in enumerate(places) if place == places[rank]]
    leaders = [other for other, place in enumerate(places) if places.index(place) == other]
    if len(leaders) == len(places):
        return Node(rank, members, leaders, {})
    # The socket's name is in no file system, and ends with its process. Other users may know it, but not the token.
    name, token = f"\0dist_transformer-{secrets.token_hex(16)}", secrets.token_hex(16)
    server = _listen(name) if members[0] == rank and len(members) > 1 else None
    name, token = distributed.gather_objects((name, token))[members[0]]

    def connect() -> dict[int, Connection]:
        if server is not None:
            return _accept(server, len(members) - 1, token)
        if len(members) == 1:
            return {}
        link = Client(name, "AF_UNIX")
        link.send_bytes(f"{token} {rank}".encode())
        return {members[0]: link}

    links = distributed.on_all_ranks(
        connect,
        errors=(OSError, EOFError),
        describe=lambda error: (
            f"the processes of {socket.gethostname()} cannot connect to each other ({type(error).__name__}: {error}): "
            "start the job again, or on other nodes"
        ),
    )
    return Node(rank, members, leaders, links)


def _place(rank: int) -> list[str]:
    """Return a value that is equal for processes that can share memory: same boot, network namespace and user."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        namespace = os.readlink("/proc/self/ns/net")
    except OSError:
        return [str(rank)]
    return [socket.gethostname(), boot, namespace, str(os.getuid())]


def _listen(name: str) -> socket.socket:
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.bind(name)
    server.listen(128)
    server.settimeout(_CONNECT_SECONDS)
    return server


def _accept(server: socket.socket, count: int, token: str) -> dict[int, Connection]:
    """Accept connections of so many ranks; close others, which do not know the token."""
    links: dict[int, Connection] = {}
    with server:
        while len(links) < count:
            link = Connection(server.accept()[0].detach())
            given, _, rank = link.recv_bytes().decode(errors="replace").partition(" ")
            if given == token:
                links[int(rank)] = link
            else:
                link.close()
    return dict(sorted(links.items()))
