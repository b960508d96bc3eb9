"""Compressed and damaged bodies, over connections to a server in this process."""

import asyncio
import gzip
import tracemalloc
import zlib
from types import SimpleNamespace
from typing import cast

import pytest
from aiohttp import web

from dist_transformer.serving import server
from dist_transformer.serving.connections import Limits
from dist_transformer.serving.receiving import receive
from tests.serving.running import server_here

BODY = b'{"text": "a dog"}'
GZIP = gzip.compress(BODY, mtime=0)
RAW = zlib.compressobj(wbits=-15)
BOMB = gzip.compress(bytes(5_000_000), mtime=0)[:5000]


@pytest.fixture(autouse=True)
def echo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "translate", lambda _, text, prefix: text)


def send(head: bytes, body: bytes, *, seconds: float = 10) -> bytes:
    """Send a POST with more header lines; give the status and the JSON of the answer."""

    async def main() -> bytes:
        async with server_here(Limits(seconds_to_send=seconds)) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            start = b"POST /api/translate HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            writer.write(start + b"Content-Type: application/json\r\n" + head + b"\r\n")
            # The handler begins before the body comes.
            await asyncio.sleep(0.05)
            writer.write(body)
            answer = await asyncio.wait_for(reader.read(), 20)
            writer.close()
        status, _, rest = answer.removeprefix(b"HTTP/1.1 ").partition(b" ")
        return status + b" " + rest.partition(b"\r\n\r\n")[2]

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("encoding", "body", "expected"),
    [
        ("GZip", GZIP, '200 {"results":["a dog"]}'),
        ("deflate", zlib.compress(BODY), '200 {"results":["a dog"]}'),
        ("deflate", RAW.compress(BODY) + RAW.flush(), '200 {"results":["a dog"]}'),
        ("gzip", BODY, "400 the body of the request is not gzip: send the text as it is"),
        ("gzip", GZIP[:-9], "400 the body of the request is not one complete gzip stream"),
        ("gzip", GZIP + b"more", "400 the body of the request is not one complete gzip stream"),
        ("gzip", BOMB, "413 the request is too long: send a shorter text"),
        ("gzip, gzip", BODY, "415 the content encoding of the request is neither gzip nor deflate"),
        ("\xe9", BODY, "415 the content encoding of the request is neither gzip nor deflate"),
    ],
)
def test_compressed_bodies(encoding: str, body: bytes, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    head = f"Content-Encoding: {encoding}\r\nContent-Length: {len(body)}\r\n".encode("latin-1")
    status, _, rest = expected.partition(" ")
    found = send(head, body).decode()
    assert found.startswith(expected if status == "200" else f'{status} {{"error": "{rest}')
    assert capsys.readouterr().err == ""


def test_a_body_that_expands_takes_no_memory(capsys: pytest.CaptureFixture[str]) -> None:
    head = f"Content-Encoding: gzip\r\nContent-Length: {len(BOMB)}\r\n".encode()
    tracemalloc.start()
    try:
        assert send(head, BOMB).startswith(b"413 ")
        # It would be 5 MB.
        assert tracemalloc.get_traced_memory()[1] < 3_000_000
    finally:
        tracemalloc.stop()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("chunks", [b"x\r\n", b"5\r\nabcdefgh", b"-1\r\n", b"0\r\nbad trailer\0\r\n\r\n"])
def test_a_body_that_is_no_http_is_the_fault_of_the_client(chunks: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    # aiohttp refuses it, or lets its handler wait for the rest, which ends with the time of the request.
    found = send(b"Transfer-Encoding: chunked\r\n", chunks + b"0\r\n\r\n", seconds=0.5)
    assert found[:4] in (b"400 ", b"408 ")
    assert capsys.readouterr().err == ""


def test_a_body_that_cannot_be_read_is_a_bad_request() -> None:
    async def read() -> bytes:
        raise web.RequestPayloadError("Not enough data")

    with pytest.raises(web.HTTPBadRequest) as refused:
        asyncio.run(receive(cast(web.Request, SimpleNamespace(read=read))))
    assert refused.value.text == "the body of the request is not valid HTTP: send it again"
