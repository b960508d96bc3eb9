"""Requests of the page and of programs: untrusted, received within limits, and checked before anything is computed.

A body arrives within a time, is decompressed up to a size, and is JSON or a form. Everything that fails here is the
client's fault, and the answer is a 4xx status with one sentence.
"""

import asyncio
import email
import unicodedata
import urllib.parse
import zlib
from typing import Annotated, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, NonNegativeInt
from starlette.exceptions import HTTPException
from starlette.requests import Request

from dist_transformer.base.errors import UserError
from dist_transformer.inference.aligned.markup import Segment, parse

B = TypeVar("B", bound=BaseModel)
Kind = Literal["cross", "encoder", "decoder"]
"""Kind of attention: cross-attention, self-attention of the encoder, self-attention of the decoder."""
NO_TEXT = "there is no text: type a sentence"
"""Error for a text that has nothing to translate."""
SECONDS_TO_SEND = 20
"""Time to send a body."""
MOST_LINES = 128
"""Lines of the texts of a program's request; lines take time each, however short they are."""
_JSON, _URLENCODED, _MULTIPART = "application/json", "application/x-www-form-urlencoded", "multipart/form-data"
_MOST_FIELDS = 16
# JSON may escape a character outside the Basic Multilingual Plane as \ud83d\ude00.
_BYTES_PER_CHARACTER = 12
# Room for names, numbers and the ids of a hypothesis that is short enough for a map.
_OTHER_BYTES = 4096
# zlib recognises gzip and zlib by their first bytes.
_EITHER = 32 + zlib.MAX_WBITS


def one_line(text: str) -> str:
    """Convert a text to one line.

    Raises:
        UserError: it holds a control character or half of a character.
    """
    line = " ".join(text.replace("\t", " ").splitlines())
    # Half of a surrogate pair is not a character and not valid UTF-8.
    bad = next((c for c in line if unicodedata.category(c) in ("Cc", "Cs")), None)
    if bad is not None:
        raise UserError(f"the text holds U+{ord(bad):04X}, which is a control character or half of one: leave it out")
    return line


def _not_blank(line: str) -> str:
    if not line.strip():
        raise UserError(NO_TEXT)
    return line


Line = Annotated[str, AfterValidator(one_line)]
Text = Annotated[Line, AfterValidator(_not_blank)]


class TextRequest(BaseModel):
    """A request for translations that begin with a prefix."""

    model_config = ConfigDict(strict=True, extra="forbid")
    text: Text
    prefix: Line = ""


class AttentionRequest(BaseModel):
    """A request for one layer's attention of one hypothesis, whose ids are `tokens`."""

    model_config = ConfigDict(strict=True, extra="forbid")
    model: NonNegativeInt
    text: Text
    tokens: list[NonNegativeInt]
    kind: Kind
    layer: NonNegativeInt


class DetectRequest(BaseModel):
    """A program's request for the language of a text, or of several.

    Requests of programs are those of LibreTranslate (https://docs.libretranslate.com), which has many clients. Fields
    that it has besides, such as `api_key`, have no effect.
    """

    model_config = ConfigDict(strict=True)
    q: str | list[str]


class BatchRequest(DetectRequest):
    """A program's request for translations of a text, or of several, from a language, or `auto`, to another."""

    source: str
    target: str
    format: Literal["text", "html", "", None] = None

    def lines(self, max_characters: int) -> list[list[str]]:
        """Return the lines of each text; a text with HTML tags is one.

        Raises:
            UserError: the texts have too many lines or characters, or a control character.
        """
        texts = [self.q] if isinstance(self.q, str) else self.q
        characters = sum(map(len, texts))
        if characters > max_characters:
            raise UserError(
                f"q has {characters:,} characters and {max_characters:,} are allowed: send several requests"
            )
        lines = [[*map(one_line, text.replace("\r\n", "\n").replace("\r", "\n").split("\n"))] for text in texts]
        count = sum(bool(line.strip()) for text in lines for line in text)
        if self.format == "html":
            lines = [[text] for text in texts]
            count = sum(isinstance(part, Segment) for text in texts for part in parse(text))
        if count > MOST_LINES:
            raise UserError(f"q has {count:,} lines and {MOST_LINES} are allowed: send several requests")
        return lines


async def receive(request: Request, kind: type[B], max_characters: int, *, forms: bool = False) -> B:
    """Receive a body that only a page of this server, or a program, can send.

    Args:
        kind: what the body must be.
        max_characters: characters of the longest text, and of the longest prefix.
        forms: whether it may also be a form.

    Raises:
        HTTPException: it has another content type or is from another site, or it is late, too long or damaged.
        UserError: it is not a form in UTF-8, or has a field twice.
        ValidationError: it is not JSON, or not of this kind.
    """
    content_type = request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    is_form = forms and content_type in (_URLENCODED, _MULTIPART)
    # A form of another site cannot send the content type of JSON. A script of another site needs CORS permission, which
    # is never given. Browsers name the site of each form that is sent; programs do not.
    if not is_form and content_type != _JSON:
        raise HTTPException(415, "the request must have the content type application/json")
    origin = request.headers.get("Origin")
    if is_form and origin is not None and origin.partition("://")[2] != request.headers.get("Host"):
        raise HTTPException(403, "forms of other sites are not answered: send JSON, or no Origin header")
    body = await _body(request, 2 * _BYTES_PER_CHARACTER * max_characters + _OTHER_BYTES)
    found = _read_form(request, kind, body) if is_form else kind.model_validate_json(body)
    for text in (getattr(found, "text", ""), getattr(found, "prefix", "")):
        if len(text) > max_characters:
            allowed = f"at most {max_characters:,} are allowed: send a shorter one"
            raise UserError(f"the text has {len(text):,} characters, and {allowed}")
    return found


def _read_form(request: Request, kind: type[B], body: bytes) -> B:
    try:
        fields = _fields(request.headers["Content-Type"], body)
    except (ValueError, TypeError, RecursionError):
        # The parser of multipart forms raises the latter two for some damaged ones.
        raise UserError("the request is not a form in UTF-8 with q, source, target") from None
    if len(dict(fields)) < len(fields):
        raise UserError("the form has a field twice: send lists as JSON")
    return kind.model_validate(dict(fields))


def _fields(content_type: str, body: bytes) -> list[tuple[str, str]]:
    if _MULTIPART not in content_type.lower():
        # Not Starlette's parser: it reads UTF-8 that is not escaped, as `curl -d` sends it, as Latin-1.
        return urllib.parse.parse_qsl(
            body.decode(), keep_blank_values=True, errors="strict", max_num_fields=_MOST_FIELDS
        )
    return [
        (str(part.get_param("name", header="Content-Disposition")), payload.decode())
        for part in email.message_from_bytes(f"Content-Type: {content_type}\r\n\r\n".encode("latin-1") + body).walk()
        if isinstance(payload := part.get_payload(decode=True), bytes)
    ]


async def _body(request: Request, most_bytes: int) -> bytes:
    """Receive a body, and decompress it."""
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
    content, is_whole = bytes(body), True
    if encoding not in ("", "identity"):
        stream = zlib.decompressobj(_EITHER)
        try:
            content = stream.decompress(body, most_bytes + 1)
            is_whole = stream.eof and not stream.unused_data
        except zlib.error:
            content, is_whole = b"", False
    if len(content) > most_bytes:
        raise HTTPException(413, "the request is too long: send a shorter text")
    if not is_whole:
        sentence = f"the body of the request is not one complete {encoding} stream: send the text as it is"
        raise HTTPException(400, sentence)
    return content
