"""Clients that are slow, stop, or are many: real connections to a server in this process, with limits of a moment."""

import asyncio
import errno
import json
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from dist_transformer.serving import server
from dist_transformer.serving.connections import Limits
from tests.serving.running import server_here

SHORT = Limits(seconds_to_send=0.4, seconds_idle=0.4)
# A test that fails waits this long.
PATIENCE = 20

HEADERS = b"POST /api/translate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
BODY = b'{"text": "a"}'
REQUEST = HEADERS + b"Content-Length: 13\r\n\r\n" + BODY
HALVES = {
    "nothing": b"",
    "a line": b"GET / HT",
    "headers": b"GET / HTTP/1.1\r\nHost: localhost\r\n",
    "a body": HEADERS + b"Content-Length: 13\r\n\r\n" + BODY[:5],
    "a chunk": HEADERS + b"Transfer-Encoding: chunked\r\n\r\n5\r\nab",
    "a body that no route reads": b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 13\r\n\r\n" + BODY[:5],
}


@pytest.fixture(autouse=True)
def answer(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Seconds that a translation takes, and what it is."""
    settings: dict[str, Any] = {"seconds": 0, "text": "b"}

    def translate(*_: object) -> Any:
        time.sleep(settings["seconds"])
        return settings["text"]

    monkeypatch.setattr(server, "translate", translate)
    return settings


@pytest.fixture(autouse=True)
def nothing_is_printed(capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest) -> Any:
    yield
    if "has_output" not in request.fixturenames:
        assert capsys.readouterr() == ("", "")


def with_server(limits: Limits, use: Callable[[int], Awaitable[None]]) -> None:
    async def main() -> None:
        async with server_here(limits) as port:
            await asyncio.wait_for(use(port), PATIENCE)

    asyncio.run(main())


async def ask(port: int) -> bytes:
    """Send a whole request over a new connection; give the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(REQUEST.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
    try:
        return await reader.read()
    finally:
        writer.close()


@pytest.mark.parametrize("half", HALVES.values(), ids=HALVES)
def test_half_a_request_ends_with_its_time(half: bytes) -> None:
    async def use(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(half)
        found = await reader.read()
        if half:
            head, _, body = found.partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 408 ")
            assert json.loads(body) == {"error": "the request took too long to arrive: send it again"}
        else:
            assert found == b""
        writer.close()

    with_server(SHORT, use)


def test_a_byte_now_and_then_gives_no_more_time() -> None:
    async def use(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        reading = asyncio.create_task(reader.read())
        for byte in HALVES["headers"]:
            writer.write(bytes([byte]))
            await asyncio.wait([reading], timeout=0.05)
            if reading.done():
                break
        assert reading.done()
        writer.close()

    with_server(SHORT, use)


def test_a_client_that_sends_no_further_request_is_closed() -> None:
    async def use(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(REQUEST + REQUEST)
        found = await reader.read()
        assert found.count(b'{"results":["b"]}') == 2
        writer.close()

    with_server(SHORT, use)


def test_a_search_may_last_longer_than_a_request_may_take(answer: dict[str, Any]) -> None:
    answer["seconds"] = 1

    async def use(port: int) -> None:
        assert (await ask(port)).endswith(b'{"results":["b"]}')

    with_server(SHORT, use)


def test_an_answer_that_is_not_read_ends_with_its_time(answer: dict[str, Any]) -> None:
    answer["text"] = "b" * 20_000_000

    async def use(port: int) -> None:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(REQUEST)
            await asyncio.sleep(1.2)
            # Nobody listens any more: the system refuses the first of these, and says so for the next.
            connection.sendall(b"\r\n")
            await asyncio.sleep(0.1)
            with pytest.raises(ConnectionError):
                connection.sendall(b"\r\n")

    with_server(SHORT, use)


def test_the_oldest_that_sends_nothing_gives_its_place_to_a_new_client(answer: dict[str, Any]) -> None:
    answer["seconds"] = 0.5

    async def use(port: int) -> None:
        searching = asyncio.create_task(ask(port))
        await asyncio.sleep(0.2)
        halves = [await asyncio.open_connection("127.0.0.1", port) for _ in range(30)]
        for i, (_, writer) in enumerate(halves):
            writer.write(list(HALVES.values())[i % len(HALVES)])
        assert (await ask(port)).endswith(b'{"results":["b"]}')
        assert (await searching).endswith(b'{"results":["b"]}')
        closed = [reader.at_eof() for reader, _ in halves]
        assert closed == sorted(closed, reverse=True)
        assert closed.count(False) <= 5
        for _, writer in halves:
            writer.close()

    with_server(Limits(most_connections=5), use)


@pytest.fixture
def has_output() -> None:
    """Mark a test whose server prints something."""


@pytest.mark.usefixtures("has_output")
def test_a_process_without_files_says_so_once_and_answers_later(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tries = []

    async def use(port: int) -> None:
        loop = asyncio.get_running_loop()
        accept = loop.sock_accept

        async def refuse(listening: socket.socket) -> Any:
            tries.append(listening)
            if len(tries) > 3:
                return await accept(listening)
            raise OSError(errno.EMFILE, "Too many open files")

        monkeypatch.setattr(loop, "sock_accept", refuse)
        # The try that waits is still a real one.
        assert [(await ask(port)).endswith(b'{"results":["b"]}') for _ in range(2)] == [True, True]

    with_server(Limits(), use)
    assert len(tries) >= 4
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: a connection cannot be accepted yet (Too many open files)")


def test_clients_that_leave_cost_no_line(answer: dict[str, Any]) -> None:
    answer["seconds"] = 0.3

    async def use(port: int) -> None:
        for half in (*HALVES.values(), REQUEST, REQUEST[:-1]):
            for reset in (False, True):
                connection = socket.create_connection(("127.0.0.1", port))
                if reset:
                    linger = b"\1\0\0\0\0\0\0\0"
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                connection.sendall(half)
                await asyncio.sleep(0.02)
                connection.close()
        await asyncio.sleep(0.4)
        assert (await ask(port)).endswith(b'{"results":["b"]}')

    with_server(Limits(), use)
