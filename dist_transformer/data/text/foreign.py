"""Recognise what is not lines of text in UTF-8 by its first bytes, so that the error names the right remedy."""

import re
from dataclasses import dataclass

FIRST_BYTES = 2**12
"""Bytes that are enough to recognise a file."""


@dataclass(frozen=True, slots=True)
class Foreign:
    """A kind of content that is not lines of UTF-8 text."""

    name: str
    suffix: str = ""
    """Suffix under which such files are read; empty: they are not read."""
    remedy: str = "unpack it first"


# The first bytes of each kind. None of them begins a text, except for PDF, whose version makes it clear. Text may begin
# with a tag, but not with those around a whole document.
_KINDS: tuple[tuple[bytes, Foreign], ...] = (
    (rb"\x1f\x8b", Foreign("a gzip file", ".gz")),
    (rb"BZh[1-9](1AY&SY|\x17rE8P\x90)", Foreign("a bzip2 file", ".bz2")),
    (rb"\xfd7zXZ\x00", Foreign("an xz file", ".xz")),
    (rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18", Foreign("a Zstandard file", ".zst")),
    (rb"PK(\x03\x04|\x05\x06|\x07\x08)", Foreign("a zip archive or a document in one, such as .docx")),
    (rb"7z\xbc\xaf\x27\x1c", Foreign("a 7z archive")),
    (rb"Rar!\x1a\x07", Foreign("a rar archive")),
    (rb"\x04\x22\x4d\x18", Foreign("an lz4 file")),
    (rb"\x1f[\x9d\xa0]", Foreign("a file of compress (.Z)")),
    (rb"(?s:.{257})ustar(\x00|  \x00)", Foreign("a tar archive")),
    (rb"%PDF-\d\.\d", Foreign("a PDF document", remedy="extract its text, for instance with pdftotext")),
    (rb"PAR1\x15", Foreign("a Parquet file", remedy="pass it to prepare with --parquet")),
    (
        rb"(?i)(\xef\xbb\xbf)?\s*<(\?xml\s|!doctype\s|(tmx|xliff|html|mteval|srcset|refset|tstset)[\s>])",
        Foreign(
            "a document in XML, SGML or HTML, such as TMX",
            remedy="take its sentences out first, one per line, into a file for each language",
        ),
    ),
)


def _utf(form: str) -> Foreign:
    return Foreign(f"text in {form}", remedy=f"convert it with iconv -f {form} -t UTF-8")


# UTF-32 comes first, because its mark begins with that of UTF-16.
_MARKS = (
    (b"\xff\xfe\x00\x00", _utf("UTF-32")),
    (b"\x00\x00\xfe\xff", _utf("UTF-32")),
    (b"\xff\xfe", _utf("UTF-16")),
    (b"\xfe\xff", _utf("UTF-16")),
)
_LEAST_ZEROS = 0.3
_MOST_ZEROS = 0.03


def recognise(start: bytes) -> Foreign | None:
    """Recognise the kind of a file by its first bytes; None if it may be UTF-8 text."""
    for pattern, kind in _KINDS:
        if re.match(pattern, start):
            return kind
    for mark, kind in _MARKS:
        if start.startswith(mark):
            return kind
    return _without_mark(start)


def _without_mark(start: bytes) -> Foreign | None:
    """Recognise UTF-16 without a byte order mark by the zeros of its ASCII characters, on one side of each pair."""
    start = start[: len(start) // 2 * 2]
    if len(start) < 4:
        return None
    first, second = (start[side::2].count(0) / (len(start) // 2) for side in (0, 1))
    if second >= _LEAST_ZEROS and first <= _MOST_ZEROS:
        return _utf("UTF-16LE")
    if first >= _LEAST_ZEROS and second <= _MOST_ZEROS:
        return _utf("UTF-16BE")
    return None
