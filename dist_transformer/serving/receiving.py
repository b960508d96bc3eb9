"""Bodies of requests: received within a time, decompressed to a size, and read as JSON or as a form.

Everything that fails here is the client's fault, and the answer is a 4xx status with one sentence.
"""

import asyncio
import email
import urllib.parse
import zlib
from typing import TypeVar

from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request

from dist_transformer.base.errors import UserError

B = TypeVar("B", bound=BaseModel)
SECONDS_TO_SEND = 20
"""Time to send a body."""
_FORMS = ("application/x-www-form-urlencoded", "multipart/form-data")
_MOST_FIELDS = 16
# zlib recognises gzip and zlib by their first bytes.
_EITHER = 32 + zlib.MAX_WBITS


async def receive_json(request: Request, kind: type[B], most_bytes: int) -> B:
    """Receive a body that only a page of this server, or a program, can send.

    Raises:
        HTTPException: the content type is not that of JSON, or the body is late, too long or damaged.
        ValidationError: it is not JSON of this kind.
    """
    # A form of another site cannot send this content type. A script of another site needs CORS permission, which is
    # never given.
    if _content_type(request) != "application/json":
        raise HTTPException(415, "the request must have the content type application/json")
    return kind.model_validate_json(await _receive(request, most_bytes))


async def receive_json_or_form(request: Request, kind: type[B], most_bytes: int) -> B:
    """Receive a body from a program, or from a page of this server.

    Raises:
        HTTPException: it is a form from another site, or neither JSON nor a form, or late, too long or damaged.
        UserError: it is not a form in UTF-8, or has a field twice.
        ValidationError: its fields are not those of this kind.
    """
    content_type = _content_type(request)
    if content_type not in _FORMS:
        return await receive_json(request, kind, most_bytes)
    # Browsers name the site of each form that is sent; programs do not.
    origin = request.headers.get("Origin")
    if origin is not None and origin.partition("://")[2] != request.headers.get("Host"):
        raise HTTPException(403, "forms of other sites are not answered: send JSON, or no Origin header")
    body = await _receive(request, most_bytes)
    try:
        pairs = _multipart(request, body) if content_type == _FORMS[1] else _urlencoded(body)
    except (ValueError, TypeError, RecursionError):
        # The parser of multipart forms raises the latter two for some damaged ones.
        raise UserError("the request is not a form in UTF-8 with q, source, target") from None
    if len(dict(pairs)) < len(pairs):
        raise UserError("the form has a field twice: send lists as JSON")
    return kind.model_validate(dict(pairs))


def _content_type(request: Request) -> str:
    return request.headers.get("Content-Type", "").partition(";")[0].strip().lower()


def _urlencoded(body: bytes) -> list[tuple[str, str]]:
    # Not Starlette's parser: it reads UTF-8 that is not escaped, as `curl -d` sends it, as Latin-1.
    return urllib.parse.parse_qsl(body.decode(), keep_blank_values=True, errors="strict", max_num_fields=_MOST_FIELDS)


def _multipart(request: Request, body: bytes) -> list[tuple[str, str]]:
    head = f"Content-Type: {request.headers['Content-Type']}\r\n\r\n".encode("latin-1")
    return [
        (str(part.get_param("name", header="Content-Disposition")), payload.decode())
        for part in email.message_from_bytes(head + body).walk()
        if isinstance(payload := part.get_payload(decode=True), bytes)
    ]


async def _receive(request: Request, most_bytes: int) -> bytes:
    encoding = request.headers.get("Content-Encoding", "").strip().lower()
    if encoding not in ("", "identity", "gzip", "x-gzip", "deflate"):
        sentence = "the content encoding of the request is neither gzip nor deflate: send the text as it is"
        raise HTTPException(415, sentence, {"Accept-Encoding": "gzip, deflate"})
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
        is_whole = (stream.eof and not stream.unused_data) or len(content) > most_bytes
    except zlib.error:
        is_whole = False
    if not is_whole:
        sentence = f"the body of the request is not one complete {encoding} stream: send the text as it is"
        raise HTTPException(400, sentence)
    return content
