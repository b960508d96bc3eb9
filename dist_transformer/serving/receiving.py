"""Bytes of requests: received whole before anything is computed, and decompressed to a limit.

Everything that fails here is the client's fault, and the answer is a 4xx status with one sentence.
"""

import zlib

from aiohttp import web

# Sizes of windows by which zlib recognises a format.
_WINDOWS = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
_PLAIN = ("", "identity")
_CUT = "the body of the request is not valid HTTP: send it again"


async def receive(request: web.Request) -> None:
    """Read the body of a request, which `request.read` then returns at once.

    Raises:
        web.HTTPRequestEntityTooLarge: it is longer than the application allows.
        web.HTTPBadRequest: it is not valid HTTP.
    """
    try:
        await request.read()
    except web.HTTPException:
        raise
    except Exception:
        raise web.HTTPBadRequest(text=_CUT) from None


async def content(request: web.Request) -> bytes:
    """Return the content of a request, decompressed.

    Raises:
        web.HTTPUnsupportedMediaType: its encoding is not gzip or deflate.
        web.HTTPBadRequest: the body is not of that encoding, or not complete.
        web.HTTPRequestEntityTooLarge: the content has more bytes than a body may have.
    """
    encoding = ", ".join(request.headers.getall("Content-Encoding", ())).strip().lower()
    body = await request.read()
    if encoding in _PLAIN:
        return body
    if encoding not in _WINDOWS:
        raise web.HTTPUnsupportedMediaType(
            headers={"Accept-Encoding": "gzip, deflate"},
            text="the content encoding of the request is neither gzip nor deflate: send the text as it is",
        )
    return _decompressed(body, encoding, request.client_max_size)


def _decompressed(body: bytes, encoding: str, most_bytes: int) -> bytes:
    window = _WINDOWS[encoding]
    # Some clients send deflate without the header of zlib (RFC 1950), whose first byte ends with 8.
    if encoding == "deflate" and body[:1] and body[0] & 15 != 8:
        window = -zlib.MAX_WBITS
    stream = zlib.decompressobj(window)
    try:
        content = stream.decompress(body, most_bytes + 1)
    except zlib.error:
        raise web.HTTPBadRequest(text=f"the body of the request is not {encoding}: send the text as it is") from None
    if len(content) > most_bytes:
        raise web.HTTPRequestEntityTooLarge(most_bytes)
    if not stream.eof or stream.unused_data:
        raise web.HTTPBadRequest(
            text=f"the body of the request is not one complete {encoding} stream: send the text as it is"
        )
    return content
