"""Connections of the server: how many there may be, and how long a client may take.

aiohttp has limits for idle clients only. Here each connection is in one of three states:

waiting    nothing of a request has come, or an answer is being sent or was sent: `seconds_idle`
arriving   a part of a request has come: `seconds_to_send`
working    the request is complete: no limit, because a search may last

A connection that outstays its state is closed. If all connections are in use, a new one takes the place of the one that
has waited or arrived for longest, so clients that never finish do not keep others out.
"""

import asyncio
import json
import logging
import resource
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, cast

State = Literal["waiting", "arriving", "working"]

# Time for a file to become free, so that a process without one neither spins nor refuses for long.
_SECONDS_WITHOUT_FILES = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits for the clients of a server."""

    seconds_to_send: float = 20
    """Seconds from the first byte of a request to its last one."""
    seconds_idle: float = 60
    """Seconds to begin a request; after an answer is computed, seconds to read it and begin the next request."""
    most_connections: int = 512
    """Connections at a time; fewer if they would take more than half of the files that the process may still open."""


class Connections:
    """The open connections of a server.

    Args:
        make_protocol: makes the HTTP protocol of one connection.
        log: logger for exceptions of such a protocol.
    """

    def __init__(self, make_protocol: Callable[[], asyncio.Protocol], limits: Limits, log: logging.Logger) -> None:
        self.limits, self.log = limits, log
        self._make_protocol = make_protocol
        self._most = max(1, min(limits.most_connections, _free_files() // 2))
        self._working: set[Connection] = set()
        # In the order in which they came into their states.
        self._others: dict[Connection, None] = {}
        self._has_warned = False

    async def accept(self, listening: socket.socket) -> None:
        """Accept connections until the task is cancelled."""
        loop = asyncio.get_running_loop()
        listening.setblocking(False)
        while True:
            # Not `loop.create_server`: without free files, it logs 128 tracebacks at a time and starts 128 more tries.
            try:
                accepted, _ = await loop.sock_accept(listening)
                if self._make_room():
                    await loop.connect_accepted_socket(self._make_connection, accepted)
                else:
                    accepted.close()
            except OSError as error:
                self._warn(error)
                # The wait comes first, so that requests that are just arriving are answered.
                await asyncio.sleep(_SECONDS_WITHOUT_FILES)
                self._close_oldest()

    def move(self, connection: "Connection", state: State | None) -> None:
        """Note the state that a connection has come into; None: it is closed."""
        self._working.discard(connection)
        self._others.pop(connection, None)
        if state == "working":
            self._working.add(connection)
        elif state is not None:
            self._others[connection] = None

    def _make_connection(self) -> "Connection":
        return Connection(self._make_protocol(), self)

    def _make_room(self) -> bool:
        return len(self._working) + len(self._others) < self._most or self._close_oldest()

    def _close_oldest(self) -> bool:
        oldest = next(iter(self._others), None)
        if oldest is not None:
            oldest.close()
        return oldest is not None

    def _warn(self, error: OSError) -> None:
        # A client that left before it was accepted is no news.
        if self._has_warned or isinstance(error, ConnectionError):
            return
        self._has_warned = True
        self.log.warning(
            f"warning: a connection cannot be accepted yet ({error.strerror}), so the oldest one is closed: "
            "raise the limit, for example with ulimit -n"
        )


class Connection(asyncio.Protocol):
    """A connection: passes everything to an HTTP protocol and closes it when the client takes too long."""

    def __init__(self, inner: asyncio.Protocol, connections: Connections) -> None:
        self._inner, self._connections = inner, connections
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._state: State = "waiting"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._enter("waiting")
        with self._no_failure():
            self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self._state == "waiting":
            self._enter("arriving")
        with self._no_failure():
            self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        self.close()
        self._transport = None
        self._inner.connection_lost(error)

    def close(self) -> None:
        """Close the connection at once; what the client has not taken yet of an answer is dropped."""
        if self._timer is not None:
            self._timer.cancel()
        self._connections.move(self, None)
        if self._transport is not None:
            self._transport.abort()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Lift the limits while a complete request is answered."""
        self._enter("working")
        try:
            yield
        finally:
            self._enter("waiting")

    def _enter(self, state: State) -> None:
        if self._transport is None:
            return
        self._state = state
        self._connections.move(self, state)
        if self._timer is not None:
            self._timer.cancel()
        limits = self._connections.limits
        seconds = {"waiting": limits.seconds_idle, "arriving": limits.seconds_to_send, "working": None}[state]
        loop = asyncio.get_running_loop()
        self._timer = None if seconds is None else loop.call_later(seconds, self._end_late)

    def _end_late(self) -> None:
        if self._state == "arriving" and self._transport is not None:
            self._transport.write(_TOO_LATE)
        self.close()

    @contextmanager
    def _no_failure(self) -> Iterator[None]:
        """Close the connection if its protocol fails, with an entry in the log: asyncio would print each traceback."""
        try:
            yield
        except Exception:
            self._connections.log.exception("a connection failed")
            self.close()


@contextmanager
def while_working(transport: asyncio.BaseTransport | None) -> Iterator[None]:
    """Lift the limits of the connection behind a transport, if it is still open."""
    connection = transport.get_protocol() if isinstance(transport, asyncio.Transport) else None
    if not isinstance(connection, Connection):
        yield
        return
    with connection.working():
        yield


def _free_files() -> int:
    """Return how many files the process may still open."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    with socket.socket() as probe:
        # A new file has the lowest free number.
        return sys.maxsize if most == resource.RLIM_INFINITY else most - probe.fileno()


def _late_response() -> bytes:
    body = json.dumps({"error": "the request took too long to arrive: send it again"}).encode()
    head = (
        "HTTP/1.1 408 Request Timeout\r\nContent-Type: application/json; charset=utf-8\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


_TOO_LATE = _late_response()
