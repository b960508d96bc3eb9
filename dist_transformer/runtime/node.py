"""Processes of a launch on one machine: one leads, and sends messages and open files to the others.

Messages go through Unix sockets. Files go with them as descriptors (SCM_RIGHTS), so a shared file has no name that
another process could open, and nothing of it is left when the processes end, however they end. If a peer has died,
the connection is closed.
"""

import hmac
import json
import os
import secrets
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from dist_transformer.base.errors import UserError
from dist_transformer.base.files import read_small
from dist_transformer.runtime import distributed

_HEADER = struct.Struct("<Q")
_CREDENTIALS = struct.Struct("3i")
_TOKEN_BYTES = 32
_CONNECT_SECONDS = 120.0
_INTACT = "the last checkpoint is intact"


class Node:
    """This process and the other processes of its node; made by `join_node`.

    Args:
        members: ranks of the node's processes, in order; the first one leads.
        leaders: the leading ranks of all nodes.
        links: for the leader, sockets to the other members; for each other member, the socket to the leader.
    """

    def __init__(self, rank: int, members: Sequence[int], leaders: Sequence[int], links: dict[int, socket.socket]):
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
            message: a JSON value.
            descriptor: an open file to send with the message.

        Raises:
            UserError: one of the processes has ended.
        """
        text = json.dumps(message).encode()
        header = _HEADER.pack(len(text))
        for rank, link in self._links.items():
            try:
                socket.send_fds(link, [header], [] if descriptor is None else [descriptor])
                link.sendall(text)
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
            header, descriptors, _, _ = socket.recv_fds(link, _HEADER.size, 1, socket.MSG_CMSG_CLOEXEC)
            header += _receive(link, _HEADER.size - len(header))
            message = json.loads(_receive(link, *_HEADER.unpack(header)))
        except OSError:
            raise UserError(
                f"rank {self.members[0]}, which reads the data for this node, has ended: see its message; {_INTACT}"
            ) from None
        return message, descriptors[0] if descriptors else None

    def hang_up(self) -> None:
        """Close all connections; a thread that waits in `tell` or `hear` gets its error."""
        for link in self._links.values():
            with suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)


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
    server = _listen() if members[0] == rank and len(members) > 1 else None
    token = secrets.token_bytes(_TOKEN_BYTES)
    addresses = distributed.gather_objects((server.getsockname(), token) if server else None)
    address, token = addresses[members[0]] or (b"", token)

    def connect() -> dict[int, socket.socket]:
        if server is not None:
            return _accept(server, members[1:], token)
        return {members[0]: _connect(address, token, rank)} if len(members) > 1 else {}

    links = distributed.on_all_ranks(
        connect,
        errors=(OSError,),
        describe=lambda error: (
            f"the processes of {socket.gethostname()} cannot connect to each other ({type(error).__name__}: {error}): "
            "start the job again, or on other nodes"
        ),
    )
    return Node(rank, members, leaders, links)


def _place(rank: int) -> tuple[str, ...]:
    """Return a value that is equal for processes that can share memory: same boot, network namespace and user."""
    if not hasattr(os, "memfd_create"):
        return (str(rank),)
    try:
        # A file in /proc has no size, and the kernel allocates a buffer of the size that is asked for.
        boot = read_small(Path("/proc/sys/kernel/random/boot_id"), most=100).decode()
        namespace = os.readlink("/proc/self/ns/net")
    except OSError:
        return (str(rank),)
    return socket.gethostname(), boot, namespace, str(os.getuid())


def _listen() -> socket.socket:
    """Open a socket whose name is in no file system, and that ends with its process."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.bind(f"\0dist_transformer-{secrets.token_hex(16)}")
    server.listen(128)
    server.settimeout(_CONNECT_SECONDS)
    return server


def _accept(server: socket.socket, ranks: Sequence[int], token: bytes) -> dict[int, socket.socket]:
    """Accept connections of the given ranks; close others, which do not know the token."""
    links: dict[int, socket.socket] = {}
    with server:
        while len(links) < len(ranks):
            link, _ = server.accept()
            link.settimeout(_CONNECT_SECONDS)
            with suppress(OSError):
                hello = _receive(link, _TOKEN_BYTES + 8) if _is_ours(link) else b""
                rank = int.from_bytes(hello[_TOKEN_BYTES:], "little")
                if hmac.compare_digest(hello[:_TOKEN_BYTES], token) and rank in ranks:
                    link.settimeout(None)
                    links[rank] = link
                    continue
            link.close()
    return dict(sorted(links.items()))


def _connect(address: bytes, token: bytes, rank: int) -> socket.socket:
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    link.settimeout(_CONNECT_SECONDS)
    link.connect(address)
    if not _is_ours(link):
        raise ConnectionError("another user's process answers")
    link.sendall(token + rank.to_bytes(8, "little"))
    link.settimeout(None)
    return link


def _is_ours(link: socket.socket) -> bool:
    """Decide whether the process at the other end belongs to this user."""
    found = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(found)[1]) == os.getuid()


def _receive(link: socket.socket, size: int) -> bytearray:
    content = bytearray(size)
    view, filled = memoryview(content), 0
    while filled < size:
        count = link.recv_into(view[filled:])
        if count == 0:
            raise ConnectionError("the connection is closed")
        filled += count
    return content
