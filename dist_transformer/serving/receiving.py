"""Bodies of requests: received within a time, decompressed to a size, and read as JSON or as a form.

Everything that fails here is the client's fault, and the answer is a 4xx status with one sentence.
"""

import asyncio
import email
import email.policy
import urllib.parse
import zlib

from starlette.exceptions import HTTPException
from starlette.requests import Request

from dist_transformer.base.errors import UserError

SECONDS_TO_SEND = 20
"""Time to send a body."""
_FORMS = ("application/x-www-form-urlencoded", "multipart/form-data")
_MOST_FIELDS = 16
# zlib recognises gzip and zlib by their first bytes.
_EITHER = 32 + zlib.MAX_WBITS


async def receive_json(request: Request, most_bytes: int) -> bytes:
    """Receive a body that only a page of this server, or a program, can send.

    Raises:
        HTTPException: the content type is not that of JSON, or the body is late, too long or damaged.
    """
    # A form of another site cannot send this content type. A script of another site needs CORS permission, which is
    # never given.
    if _kind(request) != "application/json":
        raise HTTPException(415, "the request must have the content type application/json")
    return await _receive(request, most_bytes)


async def receive_form(request: Request, most_bytes: int) -> dict[str, str] | None:
    """Receive a form from a program, or from a page of this server; None: the body is no form.

    Raises:
        HTTPException: the form is from another site, or the body is late, too long or damaged.
        UserError: it is not a form in UTF-8, or has a field twice.
    """
    if _kind(request) not in _FORMS:
        return None
    # Browsers name the site of each form that is sent; programs do not.
    origin = request.headers.get("Origin")
    if origin is not None and origin.partition("://")[2] != request.headers.get("Host"):
        raise HTTPException(403, "forms of other sites are not answered: send JSON, or no Origin header")
    body = await _receive(request, most_bytes)
    try:
        pairs = _multipart(request, body) if _kind(request) == _FORMS[1] else _urlencoded(body)
    except ValueError:
        raise UserError("the request is not a form in UTF-8 with q, source, target") from None
    if len(dict(pairs)) < len(pairs):
        raise UserError("the form has a field twice: send lists as JSON")
    return dict(pairs)


def _kind(request: Request) -> str:
    return request.headers.get("Content-Type", "").partition(";")[0].strip().lower()


def _urlencoded(body: bytes) -> list[tuple[str, str]]:
    # Not Starlette's parser: it reads UTF-8 that is not escaped, as `curl -d` sends it, as Latin-1.
    return urllib.parse.parse_qsl(body.decode(), keep_blank_values=True, errors="strict", max_num_fields=_MOST_FIELDS)


def _multipart(request: Request, body: bytes) -> list[tuple[str, str]]:
    head = f"Content-Type: {request.headers['Content-Type']}\r\n\r\n".encode("latin-1")
    form = email.message_from_bytes(head + body, policy=email.policy.HTTP)
    return [
        (str(part.get_param("name", header="Content-Disposition")), payload.decode())
        for part in form.iter_parts()
        if isinstance(payload := part.get_payload(decode=True), bytes)
    ]


async def _receive(request: Request, most_bytes: int) -> bytes:
    encoding = request.headers.get("Content-Encoding", "").strip().lower()
    if encoding not in ("", "identity", "gzip", "x-gzip", "deflate"):
        raise HTTPException(
            415,
            "the content encoding of the request is neither gzip nor deflate: send the text as it is",
            {"Accept-Encoding": "gzip, deflate"},
        )
    body = bytearray()
    try:
        async with asyncio.timeout(SECONDS_TO_SEND):
            async for part in request.stream():
                # The rest of one that is too long is also received; otherwise its client could not read the answer.
                if len(body) <= most_bytes:
                    body += part
    except TimeoutError:
        raise HTTPException(408, "the request took too long to arrive: send it again") from None
    content = _decompressed(body, encoding, most_bytes) if encoding not in ("", "identity") else bytes(body)
    if len(content) > most_bytes:
        raise HTTPException(413, "the request is too long: send a shorter text")
    return content


def _decompressed(body: bytearray, encoding: str, most_bytes: int) -> bytes:
    stream = zlib.decompressobj(_EITHER)
    try:
        content = stream.decompress(body, most_bytes + 1)
    except zlib.error:
        raise HTTPException(400, f"the body of the request is not {encoding}: send the text as it is") from None
    if len(content) <= most_bytes and (not stream.eof or stream.unused_data):
        sentence = f"the body of the request is not one complete {encoding} stream: send the text as it is"
        raise HTTPException(400, sentence)
    return content
