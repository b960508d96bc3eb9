"""Clients that are slow, stop, or are many: real connections to a server in this process, with limits of a moment."""

import asyncio
import contextlib
import errno
import json
import resource
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dist_transformer.serving import requests, server
from tests.serving.running import MODEL, exchange, post, read_answer, running_server, send, with_server

HEADERS = b"POST /api/translate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
BODY = b'{"text": "a"}'
REQUEST = HEADERS + b"Content-Length: 13\r\n\r\n" + BODY
ANSWER = b'{"results":["b"]}'
# What the client sends, and the status of the answer.
HALVES = {
    "nothing": (b"", None),
    "a line": (b"GET / HT", None),
    "headers": (b"GET / HTTP/1.1\r\nHost: localhost\r\n", None),
    "a body": (HEADERS + b"Content-Length: 13\r\n\r\n" + BODY[:5], b"408"),
    "a chunk": (HEADERS + b"Transfer-Encoding: chunked\r\n\r\n5\r\nab", b"408"),
    "chunks that no route reads": (
        b"GET / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n" + 50 * b"1\r\na\r\n",
        b"200",
    ),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0", None),
    "no HTTP": (b"\x16\x03\x01\r\n\r\n", b"400"),
}


@pytest.fixture(autouse=True)
def answer(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Seconds that a translation takes, and what it is; the limits are short."""
    settings: dict[str, Any] = {"seconds": 0, "text": "b"}

    def translate(*_: object) -> Any:
        time.sleep(settings["seconds"])
        return settings["text"]

    monkeypatch.setattr(MODEL, "translate", translate)
    monkeypatch.setattr(server, "SECONDS_TO_BEGIN", 0.5)
    monkeypatch.setattr(server, "SECONDS_TO_READ", 1)
    monkeypatch.setattr(requests, "SECONDS_TO_SEND", 0.5)
    return settings


@pytest.fixture(autouse=True)
def nothing_is_printed(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    assert [record.getMessage() for record in caplog.get_records("call")] == []


@pytest.mark.parametrize(("half", "status"), HALVES.values(), ids=HALVES)
def test_half_a_request_ends_with_its_time(half: bytes, status: bytes | None) -> None:
    async def use(port: int) -> None:
        found = await exchange(port, half)
        assert found.startswith(b"HTTP/1.1 " + status if status else b"")
        assert bool(found) == bool(status)
        if status == b"408":
            sentence = "the request took too long to arrive: send it again"
            assert read_answer(found) == (408, {"error": sentence})

    with_server(use)


@pytest.mark.parametrize(
    ("begun", "is_body"), [(HEADERS, False), (HEADERS + b"Content-Length: 9999\r\n\r\n", True)], ids=["headers", "body"]
)
def test_a_byte_now_and_then_gives_no_more_time(begun: bytes, is_body: bool) -> None:
    async def use(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(begun)
        reading = asyncio.create_task(reader.read())
        while not reading.done():
            writer.write(b"a")
            await asyncio.wait([reading], timeout=0.1)
        assert (b" 408 " in reading.result()) == is_body
        writer.close()

    with_server(use)


def test_requests_follow_one_another_and_then_the_connection_ends(answer: dict[str, Any]) -> None:
    # A search may last longer than a request may take.
    answer["seconds"] = 0.7

    async def use(port: int) -> None:
        assert (await exchange(port, REQUEST + REQUEST)).count(ANSWER) == 2

    with_server(use)


def test_an_answer_that_is_not_read_ends_with_its_time(answer: dict[str, Any]) -> None:
    answer["text"] = "b" * 20_000_000

    async def use(port: int) -> None:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(REQUEST)
            with contextlib.suppress(ConnectionError):
                while True:
                    # Not sooner: each of these puts off the system's question whether the client reads now.
                    await asyncio.sleep(2)
                    connection.sendall(b"\r\n")

    with_server(use)


def test_half_clients_keep_no_one_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "SECONDS_TO_BEGIN", 600)

    async def use(port: int) -> None:
        halves = [await asyncio.open_connection("127.0.0.1", port) for _ in range(40)]
        for i, (_, writer) in enumerate(halves):
            writer.write((b"", b"GET / HT", HALVES["headers"][0], HALVES["a body"][0])[i % 4])
        one = REQUEST.replace(b"\r\n", b"\r\nConnection: close\r\n", 1)
        assert (await exchange(port, one)).endswith(ANSWER)
        for _, writer in halves:
            writer.close()

    with_server(use)


def test_clients_that_leave_cost_no_line(answer: dict[str, Any]) -> None:
    answer["seconds"] = 0.1

    async def use(port: int) -> None:
        for half in (*(half for half, _ in HALVES.values()), REQUEST, REQUEST[:-1]):
            for reset in (False, True):
                connection = socket.create_connection(("127.0.0.1", port))
                if reset:
                    linger = b"\1\0\0\0\0\0\0\0"
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                connection.sendall(half)
                await asyncio.sleep(0.02)
                connection.close()
        # asyncio says so if it happens to write five times to such a client.
        server.log.warning("socket.send() raised exception.")
        assert (await exchange(port, REQUEST)).endswith(ANSWER)

    with_server(use)


def test_a_process_without_files_says_so_once_and_answers_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    accept, tries = socket.socket.accept, []

    def refuse(listening: socket.socket) -> Any:
        tries.append(listening)
        if len(tries) < 200:
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(listening)

    async def use(port: int) -> None:
        monkeypatch.setattr(socket.socket, "accept", refuse)
        assert (await exchange(port, REQUEST)).endswith(ANSWER)

    with_server(use)
    (record,) = caplog.records
    caplog.clear()
    assert (record.exc_info, record.exc_text) == (None, None)
    assert record.getMessage().startswith(
        "warning: connections cannot be accepted until others end (Too many open files): raise the"
    )


@pytest.mark.system
def test_a_request_that_takes_the_last_file_is_answered(model_folder: Path) -> None:
    with running_server([model_folder]) as running:
        used = {int(file.name) for file in Path(f"/proc/{running.process.pid}/fd").iterdir()}
        most = min({*range(len(used) + 1)} - used) + 1
        resource.prlimit(running.process.pid, resource.RLIMIT_NOFILE, (most, most))
        headers = {"Content-Type": "application/json", "Connection": "close"}
        tagged = {"q": "<b>a</b> dog", "source": "auto", "target": "de", "format": "html"}
        seen = {"model": 0, "text": "a dog", "tokens": [5], "kind": "cross", "layer": 0}
        for path, value in {"/api/translate": {"text": "a dog"}, "/translate": tagged, "/api/attention": seen}.items():
            status, _, found = send(running, "POST", path, json.dumps(value).encode(), headers)
            assert status == 200, found
        assert running.end().stderr.count("\n") <= 1


@pytest.mark.system
def test_more_idle_clients_than_files_keep_no_one_out_for_long(model_folder: Path) -> None:
    with running_server([model_folder], most_files=400) as running, contextlib.ExitStack() as opened:
        for i in range(900):
            connection = socket.create_connection(("127.0.0.1", running.port), timeout=600)
            with contextlib.suppress(ConnectionError):
                opened.enter_context(connection).sendall((b"", b"GET / HT")[i % 2])
        begun = time.monotonic()
        assert post(running, "/api/translate", {"text": "a dog"})[0] == 200
        assert time.monotonic() - begun < 300
        assert running.end().stderr.count("\n") <= 1
