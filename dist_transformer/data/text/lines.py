"""Read lines of text in UTF-8 from files, plain or compressed, and from standard input.

Only "\\n" and "\\r\\n" end a line. `str.splitlines` also breaks at \\x0b, \\x85 and \\u2028, which occur in web text on
only one side of a pair and would shift every later line of that side. A carriage return within a line is text, except
in a file that has no "\\n": there it is the end of lines of the old Mac, and the file is refused.
"""

import functools
import io
import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from dist_transformer.base.errors import UserError
from dist_transformer.data.text.compressed import DAMAGED, is_compressed, open_content

LONGEST_LINE = 2**20
"""Bytes of the longest line that is read. A compressed file of 458 KB can contain a line of 3 GB."""

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# Bytes after which a line is too long in any case, with a byte order mark before it and a line end behind it.
_BOUND = LONGEST_LINE + 8
# Bytes that are enough to recognise a file.
_FIRST_BYTES = 2**12
# Shares of zeros on the two sides of the bytes of UTF-16.
_LEAST_ZEROS = 0.3
_MOST_ZEROS = 0.03


@dataclass(frozen=True, slots=True)
class _Foreign:
    """A kind of content that is not lines of UTF-8 text."""

    name: str
    suffix: str = ""
    """Suffix under which such files are read; empty: they are not read."""
    remedy: str = "unpack it first"


def _utf(form: str) -> _Foreign:
    return _Foreign(f"text in {form}", remedy=f"convert it with iconv -f {form} -t UTF-8")


# The first bytes of each kind. None of them begins a text, except for PDF, whose version makes it clear. Text may begin
# with a tag, but not with those around a whole document.
_KINDS: tuple[tuple[bytes, _Foreign], ...] = (
    (rb"\x1f\x8b", _Foreign("a gzip file", ".gz")),
    (rb"BZh[1-9](1AY&SY|\x17rE8P\x90)", _Foreign("a bzip2 file", ".bz2")),
    (rb"\xfd7zXZ\x00", _Foreign("an xz file", ".xz")),
    (rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18", _Foreign("a Zstandard file", ".zst")),
    (rb"PK(\x03\x04|\x05\x06|\x07\x08)", _Foreign("a zip archive or a document in one, such as .docx")),
    (rb"7z\xbc\xaf\x27\x1c", _Foreign("a 7z archive")),
    (rb"Rar!\x1a\x07", _Foreign("a rar archive")),
    (rb"\x04\x22\x4d\x18", _Foreign("an lz4 file")),
    (rb"\x1f[\x9d\xa0]", _Foreign("a file of compress (.Z)")),
    (rb"(?s:.{257})ustar(\x00|  \x00)", _Foreign("a tar archive")),
    (rb"%PDF-\d\.\d", _Foreign("a PDF document", remedy="extract its text, for instance with pdftotext")),
    (rb"PAR1\x15", _Foreign("a Parquet file", remedy="pass it to prepare with --parquet")),
    (
        rb"(?i)(\xef\xbb\xbf)?\s*<(\?xml\s|!doctype\s|(tmx|xliff|html|mteval|srcset|refset|tstset)[\s>])",
        _Foreign(
            "a document in XML, SGML or HTML, such as TMX",
            remedy="pass TMX to prepare with --tmx; take sentences out of others first, a file for each language",
        ),
    ),
    # UTF-32 comes first, because its mark begins with that of UTF-16.
    (rb"\xff\xfe\x00\x00|\x00\x00\xfe\xff", _utf("UTF-32")),
    (rb"\xff\xfe|\xfe\xff", _utf("UTF-16")),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Consecutive lines of a file that is not compressed."""

    first: int
    """Number of lines before them."""
    count: int
    place: int
    """Byte at which reading begins."""
    skipped: int
    """Line ends from `place` up to the first of the lines."""


def read_lines(path: Path) -> Iterator[str]:
    """Read the lines of a UTF-8 text file, plain or compressed, without line ends and byte order mark.

    Raises:
        UserError: the file is a pipe, cannot be read or is not text, or a line is above `LONGEST_LINE` or not UTF-8;
            the error has its number.
    """
    for number, line in enumerate(read_short_lines(path), 1):
        if line is None:
            raise too_long(str(path), number)
        yield line


def read_short_lines(path: Path, span: Span | None = None) -> Iterator[str | None]:
    """Read lines like `read_lines`, with None for each line above `LONGEST_LINE`.

    Args:
        span: the lines to read; None: all.
    """
    lines = 0
    try:
        with open_content(path) as file:
            _refuse_foreign(file, path)
            if span is None:
                stream = _lines_of(file, str(path))
            else:
                file.seek(span.place)
                stream = _bounded(file) if span.place else _lines_of(file, str(path))
                stream = itertools.islice(stream, span.skipped, span.skipped + span.count)
            for line in _decoded(stream, str(path), before=span.first if span else 0):
                yield line
                lines += 1
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: check the name") from None
    except (OSError, *DAMAGED) as error:
        raise _unreadable(path, error, lines) from None
    if span is not None and lines < span.count:
        raise UserError(f"{path} became shorter while it was read: wait until it is whole, and run the command again")


def require_readable(path: Path) -> None:
    """Check early that a text file can be read, as far as its first line.

    Raises:
        UserError: it cannot be read.
    """
    next(read_short_lines(path), None)


def read_stream(file: BinaryIO, name: str) -> Iterator[str]:
    """Read the lines of an open file like `read_lines`.

    Raises:
        UserError: it cannot be read or is not text in UTF-8, or a line is above `LONGEST_LINE`; the error has `name`.
    """
    try:
        assert isinstance(file, io.BufferedReader)
        if (found := _recognise(file.peek(_FIRST_BYTES)[:_FIRST_BYTES])) is not None:
            raise UserError(f"{name} is {found.name}, not plain text in UTF-8: {found.remedy}")
        yield from decode_lines(_lines_of(file, name), name)
    except OSError as error:
        raise UserError(f"{name} cannot be read ({error.strerror or error}): connect it to a file or a pipe") from None


def decode_lines(stream: Iterable[bytes], name: str) -> Iterator[str]:
    """Decode lines in UTF-8, without line ends and byte order mark.

    Raises:
        UserError: a line is not UTF-8, or above `LONGEST_LINE`; the error has `name` and the line number.
    """
    for number, line in enumerate(_decoded(stream, name), 1):
        if line is None:
            raise too_long(name, number)
        yield line


def too_long(name: str, number: int) -> UserError:
    return UserError(f"{name} line {number} has more than {LONGEST_LINE:,} bytes: split it, or check that it is text")


def _refuse_foreign(file: io.BufferedReader, path: Path) -> None:
    found = _recognise(file.peek(_FIRST_BYTES)[:_FIRST_BYTES])
    if found is None:
        return
    if is_compressed(path):
        raise UserError(f"{path} contains {found.name}, not plain text in UTF-8: {found.remedy}")
    raise UserError(f"{path} is {found.name}, not plain text in UTF-8: {_renamed(found)}")


def _renamed(found: _Foreign) -> str:
    return f"rename it so that its name ends in {found.suffix}" if found.suffix else found.remedy


def _unreadable(path: Path, error: Exception, lines: int) -> UserError:
    # bz2 reports damage as an OSError without a number.
    damaged = isinstance(error, DAMAGED) or (is_compressed(path) and getattr(error, "errno", None) is None)
    if not damaged:
        reason = getattr(error, "strerror", None) or error
        return UserError(f"{path} cannot be read ({reason}): check the file and its rights")
    if lines == 0:
        with path.open("rb") as file:
            found = _recognise(file.read(_FIRST_BYTES))
        if found is not None and found.suffix != path.suffix:
            return UserError(f"{path} is {found.name}, not a {path.suffix} file: {_renamed(found)}")
    return UserError(
        f"{path} is not a complete {path.suffix} file (after line {lines}, {error}): download it again, or rename it "
        "if it is not compressed"
    )


def _lines_of(file: io.BufferedReader, name: str) -> Iterator[bytes]:
    """Read the lines of a file from its start, unless they end in carriage returns alone.

    Raises:
        UserError: the file has carriage returns within its only line, which has no other end.
    """
    stream = _bounded(file)
    first = next(stream, b"")
    if first.endswith(b"\n") or b"\r" not in first[:-1]:
        return itertools.chain([first] if first else [], stream)
    second = next(stream, None)
    if second is None:
        raise UserError(
            f"{name} has lines that end in CR alone, as on the old Mac, and no LF: convert it, for instance with "
            "tr '\\r' '\\n'"
        )
    return itertools.chain([first, second], stream)


def _bounded(file: io.BufferedReader) -> Iterator[bytes]:
    """Read the lines of an open file; of a line above `LONGEST_LINE`, only the first bytes are kept and returned."""
    for line in iter(functools.partial(file.readline, _BOUND), b""):
        yield line
        rest = line
        while len(rest) == _BOUND and not rest.endswith(b"\n"):
            rest = file.readline(_BOUND)


def _decoded(stream: Iterable[bytes], name: str, *, before: int = 0) -> Iterator[str | None]:
    for number, raw in enumerate(stream, 1 + before):
        line = raw.removeprefix(_BYTE_ORDER_MARK) if number == 1 else raw
        line = line.removesuffix(b"\n").removesuffix(b"\r")
        if len(line) > LONGEST_LINE:
            yield None
            continue
        try:
            yield line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise UserError(
                f"{name} line {number} is not UTF-8 (byte 0x{error.object[error.start]:02x} at position "
                f"{error.start}): convert it from its encoding; for languages of Western Europe this is mostly "
                "iconv -f CP1252 -t UTF-8"
            ) from None


def _recognise(start: bytes) -> _Foreign | None:
    """Recognise the kind of a file by its first bytes; None if it may be UTF-8 text."""
    for pattern, kind in _KINDS:
        if re.match(pattern, start):
            return kind
    # UTF-16 without a byte order mark has the zeros of its ASCII characters on one side of each pair.
    start = start[: len(start) // 2 * 2]
    if len(start) < 4:
        return None
    first, second = (start[side::2].count(0) / (len(start) // 2) for side in (0, 1))
    if second >= _LEAST_ZEROS and first <= _MOST_ZEROS:
        return _utf("UTF-16LE")
    if first >= _LEAST_ZEROS and second <= _MOST_ZEROS:
        return _utf("UTF-16BE")
    return None
