"""Read parallel text from files, as (source, target) pairs of strings.

Only "\\n" and "\\r\\n" end a line. `str.splitlines` also breaks at \\x0b, \\x85 and \\u2028, which occur in web text on
only one side of a pair and would shift every later line of that side.
"""

import bz2
import functools
import glob
import gzip
import itertools
import json
import lzma
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Protocol

from dist_transformer.base.errors import UserError

Pair = tuple[str, str]

LONGEST_LINE = 2**20
"""Bytes of the longest line that is read. A compressed file of 458 KB can contain a line of 3 GB."""

_OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
_DAMAGED = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile)
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# Bytes after which a line is too long in any case, with a byte order mark before it and a line end behind it.
_BOUND = LONGEST_LINE + 8
_ENDED = object()

_LANGUAGE = re.compile(r"[a-z]{2,3}([-_][A-Za-z]{2,4})?")
# Suffixes of two or three letters that are not a language.
_NOT_A_LANGUAGE = re.compile("txt|tsv|csv|xml|sgm|raw|src|tgt|trg|ref|hyp|tok|low|lc|bpe|spm|in|out|dev|gz|xz|zst|zip")
_LINE_BREAK = re.compile(r"\r\n|\r|\n")


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


class PairSource(Protocol):
    """A source of pairs: a dataclass of plain values and paths."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def name(self) -> str:
        """Name without folders, for reports and the index."""

    @property
    def languages(self) -> tuple[str | None, str | None]:
        """Languages of source and target, if they are known."""

    def files(self) -> list[Path]:
        """List the local files that are read; if one of them changes, the pairs may change."""

    def pairs(self) -> Iterator[Pair | None]:
        """Yield the same pairs in the same order at every call; None for one with a line above `LONGEST_LINE`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LineFiles:
    """Two text files: line i of one is the translation of line i of the other."""

    source: Path
    target: Path
    spans: tuple[Span, ...] = ()
    """The lines to read of each of the two files; empty: all."""

    @property
    def name(self) -> str:
        return f"{self.source.name} + {self.target.name}"

    @property
    def languages(self) -> tuple[str | None, str | None]:
        return language_of(self.source), language_of(self.target)

    def files(self) -> list[Path]:
        return [self.source, self.target]

    def pairs(self) -> Iterator[Pair | None]:
        sources, targets = map(read_short_lines, self.files(), self.spans or (None, None))
        for number, (source, target) in enumerate(itertools.zip_longest(sources, targets, fillvalue=_ENDED)):
            if source is _ENDED or target is _ENDED:
                source_lines = number + _count(source, sources)
                target_lines = number + _count(target, targets)
                raise unequal_lines(self.source, source_lines, self.target, target_lines)
            yield (source, target) if isinstance(source, str) and isinstance(target, str) else None

    def whole_pairs(self) -> Iterator[Pair]:
        """Yield all pairs, for callers that may not leave one out.

        Raises:
            UserError: a line is above `LONGEST_LINE`; the error names the file and the line number.
        """
        for number, pair in enumerate(self.pairs(), 1):
            if pair is None:
                raise _too_long(f"{self.source} or {self.target},", number)
            yield pair


@dataclass(frozen=True, kw_only=True, slots=True)
class TsvFile:
    """A file of tab-separated columns without quoting."""

    path: Path
    source_column: int = 0
    """Column number, counted from 0."""
    target_column: int = 1
    spans: tuple[Span, ...] = ()
    """The lines to read; empty: all."""

    def __post_init__(self) -> None:
        if self.source_column < 0 or self.target_column < 0 or self.source_column == self.target_column:
            raise UserError(
                f"TSV columns {self.source_column} and {self.target_column} must be two different columns, "
                "counted from 0: fix --tsv-columns"
            )

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def languages(self) -> tuple[str | None, str | None]:
        return None, None

    def files(self) -> list[Path]:
        return [self.path]

    def pairs(self) -> Iterator[Pair | None]:
        needed = max(self.source_column, self.target_column) + 1
        for number, line in _numbered(self.path, self.spans):
            if line is None:
                yield None
                continue
            columns = line.split("\t")
            if len(columns) < needed:
                raise UserError(
                    f"{self.path} line {number} has {len(columns)} tab-separated columns, but {needed} are needed: "
                    "fix the line, or choose the columns with --tsv-columns"
                )
            yield columns[self.source_column], columns[self.target_column]


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldFile:
    """A file of rows whose two texts have field names."""

    path: Path
    source_field: str
    target_field: str

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def languages(self) -> tuple[str | None, str | None]:
        return as_language(self.source_field), as_language(self.target_field)

    def files(self) -> list[Path]:
        return [self.path]


@dataclass(frozen=True, kw_only=True, slots=True)
class JsonlFile(FieldFile):
    """A file of one JSON object per line; the two texts are string fields of it. Blank lines are skipped."""

    spans: tuple[Span, ...] = ()
    """The lines to read; empty: all."""

    def pairs(self) -> Iterator[Pair | None]:
        for number, line in _numbered(self.path, self.spans):
            if line is None:
                yield None
                continue
            if not line or line.isspace():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UserError(
                    f"{self.path} line {number} is not JSON ({error}): write one JSON object per line"
                ) from None
            if not isinstance(row, dict):
                raise UserError(f"{self.path} line {number} is not a JSON object: write one JSON object per line")
            yield self._text(row, self.source_field, number), self._text(row, self.target_field, number)

    def _text(self, row: dict[str, Any], field: str, number: int) -> str:
        where = f"{self.path} line {number}"
        if field not in row:
            raise UserError(
                f'{where} has no field "{field}" (it has {listed(row)}): '
                "name the fields with --src-field and --tgt-field"
            )
        if not isinstance(row[field], str):
            raise UserError(f'{where}: field "{field}" must be a string, not {type(row[field]).__name__}: fix the line')
        return one_line(row[field], where)


def expand(paths: Iterable[Path], flag: str) -> list[Path]:
    """Replace paths that are patterns (`*`, `?`, `[…]`, `**`) by the files that they match, sorted by name.

    Raises:
        UserError: a pattern matches nothing; the error names `flag` and the pattern.
    """
    files: list[Path] = []
    for path in paths:
        if path.exists() or not glob.has_magic(str(path)):
            files.append(path)
        elif found := sorted(glob.glob(str(path), recursive=True)):
            files += map(Path, found)
        else:
            raise UserError(f'{flag} "{path}" matches no file: check the pattern and the folder')
    return files


def line_files(sources: Iterable[Path], targets: Iterable[Path]) -> list[LineFiles]:
    """Pair the i-th source file with the i-th target file."""
    sources, targets = list(sources), list(targets)
    if len(sources) != len(targets):
        raise UserError(
            f"there are {len(sources)} source files ({listed(sources)}) and {len(targets)} target files "
            f"({listed(targets)}): give one target file for each source file, in the same order"
        )
    for source, target in zip(sources, targets, strict=True):
        if source == target:
            raise UserError(f"{source} is given as source and as target: give the file of the other language")
    return [LineFiles(source=source, target=target) for source, target in zip(sources, targets, strict=True)]


def read_lines(path: Path) -> Iterator[str]:
    """Read the lines of a UTF-8 text file, plain or compressed, without line ends and byte order mark.

    Raises:
        UserError: the file cannot be read, or a line is above `LONGEST_LINE` or not UTF-8; the error has its number.
    """
    for number, line in enumerate(read_short_lines(path), 1):
        if line is None:
            raise _too_long(str(path), number)
        yield line


def read_short_lines(path: Path, span: Span | None = None) -> Iterator[str | None]:
    """Read lines like `read_lines`, with None for each line above `LONGEST_LINE`.

    Args:
        span: the lines to read; None: all.
    """
    opener = _OPENERS.get(path.suffix, open)
    lines = 0
    try:
        with opener(path, "rb") as file:
            stream: Iterator[bytes] = bounded_lines(file)
            if span is not None:
                file.seek(span.place)
                stream = itertools.islice(stream, span.skipped, span.skipped + span.count)
            for line in _decoded(stream, str(path), before=span.first if span else 0):
                yield line
                lines += 1
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: check the name") from None
    except _DAMAGED as error:
        raise UserError(
            f"{path} is not a complete {path.suffix} file (after line {lines}: {error}): download it again, or rename "
            "it"
        ) from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}): check the file and its rights") from None
    if span is not None and lines < span.count:
        raise UserError(f"{path} became shorter while it was read: wait until it is whole, and give the command again")


def require_readable(path: Path) -> None:
    """Check early that a text file can be read, as far as its first line. A pipe, which is read once, is not opened.

    Raises:
        UserError: it cannot be read.
    """
    if os.path.isfile(path) or os.path.isdir(path) or not os.path.exists(path):
        next(read_short_lines(path), None)


def is_compressed(path: Path) -> bool:
    return path.suffix in _OPENERS


def _numbered(path: Path, spans: tuple[Span, ...]) -> Iterator[tuple[int, str | None]]:
    """Read lines with their numbers, counted from 1."""
    span = spans[0] if spans else None
    return enumerate(read_short_lines(path, span), 1 + (span.first if span else 0))


def read_aligned(*paths: Path) -> list[list[str]]:
    """Read the lines of small files; line i of each file belongs to line i of the others.

    Raises:
        UserError: a file cannot be read, the lengths differ, or the files are empty.
    """
    first, *others = paths
    texts = [list(read_lines(path)) for path in paths]
    for path, lines in zip(others, texts[1:], strict=True):
        if len(lines) != len(texts[0]):
            raise unequal_lines(first, len(texts[0]), path, len(lines))
    if not texts[0]:
        raise UserError(f"{first} is empty: give a file with at least one line")
    return texts


def unequal_lines(one: Path, one_lines: int, other: Path, other_lines: int) -> UserError:
    return UserError(
        f"{one} has {one_lines:,} lines and {other} has {other_lines:,}: "
        "line i of one must be the translation of line i of the other, so give files of equal length"
    )


def decode_lines(stream: Iterable[bytes], name: str) -> Iterator[str]:
    """Decode the lines of a UTF-8 byte stream, without line ends and byte order mark.

    Args:
        stream: lines; `bounded_lines` limits the memory that those of a file need.

    Raises:
        UserError: a line is not UTF-8, or above `LONGEST_LINE`; the error has `name` and the line number.
    """
    for number, line in enumerate(_decoded(stream, name), 1):
        if line is None:
            raise _too_long(name, number)
        yield line


def bounded_lines(file: BinaryIO) -> Iterator[bytes]:
    """Read the lines of an open file; of a line above `LONGEST_LINE`, only the first bytes are kept and returned."""
    for line in iter(functools.partial(file.readline, _BOUND), b""):
        yield line
        rest = line
        while len(rest) == _BOUND and not rest.endswith(b"\n"):
            rest = file.readline(_BOUND)


def _too_long(name: str, number: int) -> UserError:
    return UserError(f"{name} line {number} has more than {LONGEST_LINE:,} bytes: split it, or check that it is text")


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
                f"{error.start}): convert it, for instance with iconv -f LATIN1 -t UTF-8"
            ) from None


def language_of(path: Path) -> str | None:
    """Return the language in a file's suffixes: `train.en.gz` → `en`; None if there is none."""
    for suffix in reversed(path.suffixes):
        if (language := as_language(suffix[1:])) is not None:
            return language
    return None


def as_language(name: str) -> str | None:
    """Return the name if it looks like a language, otherwise None."""
    return name if _LANGUAGE.fullmatch(name) and not _NOT_A_LANGUAGE.fullmatch(name) else None


def short_pair(source: str, target: str) -> Pair | None:
    """Return the pair, or None if a side is above `LONGEST_LINE`."""
    longest = max(len(source), len(target))
    # A character takes at most four bytes.
    if longest * 4 > LONGEST_LINE and max(len(side.encode("utf-8")) for side in (source, target)) > LONGEST_LINE:
        return None
    return source, target


def one_line(text: str, where: str) -> str:
    """Replace line breaks, which text from JSON or a table may contain, by spaces, because files have one line each."""
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise UserError(f"{where} holds half of a surrogate pair (\\ud800 to \\udfff): fix the text") from None
    return _LINE_BREAK.sub(" ", text)


def _count(line: object, rest: Iterator[object]) -> int:
    return 0 if line is _ENDED else 1 + sum(1 for _ in rest)


def listed(names: Iterable[Any]) -> str:
    return ", ".join(str(name) for name in names) or "none"
