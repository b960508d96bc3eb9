"""Read parallel text from files, as (source, target) pairs of strings."""

import glob
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from dist_transformer.base.errors import UserError
from dist_transformer.base.paths import require_usable
from dist_transformer.config.plain import parse_json
from dist_transformer.data.text.alignments import parse_links
from dist_transformer.data.text.lines import LONGEST_LINE, Span, read_lines, read_short_lines, too_long

Pair = tuple[str, str]

NESTED = "translation"
"""Name of the field within which Hugging Face's translation datasets hold their texts."""

_ENDED = object()
# Share of lines with a tab above which a file has columns, if the share of another file is as far below.
_COLUMNS = 0.8

_LANGUAGE = re.compile(r"[a-z]{2,3}([-_]([A-Za-z]{2,4}|[0-9]{3})){0,2}")
# Suffixes of two or three letters that are not a language.
_NOT_A_LANGUAGE = re.compile("txt|tsv|csv|xml|sgm|raw|src|tgt|trg|ref|hyp|tok|low|lc|bpe|spm|in|out|dev|gz|xz|zst|zip")
_LINE_BREAK = re.compile(r"\r\n|\r|\n")


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
    """The lines to read of each of the files; empty: all."""
    alignments: Path | None = None
    """File of the alignments of their words, which are then a third text of each pair."""

    @property
    def name(self) -> str:
        return f"{self.source.name} + {self.target.name}"

    @property
    def languages(self) -> tuple[str | None, str | None]:
        return language_of(self.source), language_of(self.target)

    def files(self) -> list[Path]:
        return [self.source, self.target, *([] if self.alignments is None else [self.alignments])]

    def pairs(self) -> Iterator[Pair | None]:
        files = self.files()
        readers = [*map(read_short_lines, files, self.spans or (None,) * len(files))]
        before = self.spans[-1].first if self.spans else 0
        lines: Any
        for number, lines in enumerate(itertools.zip_longest(*readers, fillvalue=_ENDED)):
            if _ENDED in lines:
                counts = [number + _count(line, rest) for line, rest in zip(lines, readers, strict=True)]
                other = next(side for side, count in enumerate(counts) if count != counts[0])
                raise unequal_lines(files[0], counts[0], files[other], counts[other])
            try:
                # None: a line above the limit.
                if self.alignments is not None and None not in lines:
                    parse_links(lines[2], *lines[:2])
            except ValueError as error:
                raise UserError(f"{self.alignments} line {before + number + 1:,} {error}") from None
            yield None if None in lines else lines

    def whole_pairs(self) -> Iterator[Pair]:
        """Yield all pairs, for callers that may not leave one out.

        Raises:
            UserError: a line is above `LONGEST_LINE`; the error names the file and the line number.
        """
        for number, pair in enumerate(self.pairs(), 1):
            if pair is None:
                raise too_long(f"{self.source} or {self.target},", number)
            yield pair


@dataclass(frozen=True, kw_only=True, slots=True)
class OneFile:
    """A file of both texts."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def languages(self) -> tuple[str | None, str | None]:
        return None, None

    def files(self) -> list[Path]:
        return [self.path]


@dataclass(frozen=True, kw_only=True, slots=True)
class TsvFile(OneFile):
    """A file of tab-separated columns without quoting, as many in each row as in the first one.

    A blank line is a pair of empty texts.
    """

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

    def pairs(self) -> Iterator[Pair | None]:
        width = self._width() if self.spans else None
        for number, line in _numbered(self.path, self.spans):
            if line is None or not line.strip():
                yield None if line is None else ("", "")
                continue
            columns = line.split("\t")
            if width is None:
                width = self._checked_width(columns, number)
            if len(columns) != width:
                raise UserError(
                    f"{self.path} line {number} has {len(columns)} tab-separated columns, but the first row has "
                    f"{width}: fix the line, which may have a tab in its text"
                )
            yield columns[self.source_column], columns[self.target_column]

    def _width(self) -> int | None:
        """Return the number of columns of the first row; a part of the file may begin after it."""
        rows = ((number, line) for number, line in _numbered(self.path, ()) if line is not None and line.strip())
        number, line = next(rows, (0, None))
        return None if line is None else self._checked_width(line.split("\t"), number)

    def _checked_width(self, columns: list[str], number: int) -> int:
        needed = max(self.source_column, self.target_column) + 1
        if len(columns) < needed:
            raise UserError(
                f"{self.path} line {number} has {len(columns)} tab-separated columns, but {needed} are needed: "
                "fix the line, or choose the columns with --tsv-columns"
            )
        return len(columns)


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldFile(OneFile):
    """A file of rows whose two texts have field names.

    Names that are joined by dots lead to a field within another (`translation.en`). The fields of a field `translation`
    may also be given by their own names.
    """

    source_field: str
    target_field: str

    @property
    def languages(self) -> tuple[str | None, str | None]:
        source, target = (as_language(field.rpartition(".")[2]) for field in (self.source_field, self.target_field))
        return source, target


@dataclass(frozen=True, kw_only=True, slots=True)
class JsonlFile(FieldFile):
    """A file of one JSON object per line; the two texts are string fields of it.

    A blank line is a pair of empty texts.
    """

    spans: tuple[Span, ...] = ()
    """The lines to read; empty: all."""

    def pairs(self) -> Iterator[Pair | None]:
        for number, line in _numbered(self.path, self.spans):
            if line is None or not line.strip():
                yield None if line is None else ("", "")
                continue
            try:
                row = parse_json(line)
            except ValueError as error:
                raise UserError(
                    f"{self.path} line {number} is not JSON ({error}): write one JSON object per line"
                ) from None
            if not isinstance(row, dict):
                raise UserError(f"{self.path} line {number} is not a JSON object: write one JSON object per line")
            yield self._text(row, self.source_field, number), self._text(row, self.target_field, number)

    def _text(self, row: dict[str, Any], field: str, number: int) -> str:
        where = f"{self.path} line {number}"
        path = find_field(row, field)
        if path is None:
            raise UserError(
                f'{where} has no field "{field}" (it has {listed(field_names(row))}): '
                "name the fields with --src-field and --tgt-field"
            )
        text: Any = row
        for name in path:
            text = text[name]
        if not isinstance(text, str):
            raise UserError(f'{where} has {type(text).__name__} in field "{field}", not a string: fix the line')
        return one_line(text, where)


def find_field(row: Mapping[str, Any], field: str) -> list[str] | None:
    """Find the names that lead to a field; None if there is no such field.

    Args:
        row: values by name, which are mappings where a field has fields.
    """
    if field in row:
        return [field]
    if field in _inner(row, NESTED):
        return [NESTED, field]
    # A name may have dots of its own.
    for name in row:
        if field.startswith(f"{name}.") and (rest := find_field(_inner(row, name), field[len(name) + 1 :])) is not None:
            return [name, *rest]
    return None


def field_names(row: Mapping[str, Any]) -> list[str]:
    """List the fields of a row, and those within a field by names with dots."""
    return [*row, *(f"{name}.{field}" for name in row for field in _inner(row, name))]


def _inner(row: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = row.get(name)
    return value if isinstance(value, Mapping) else {}


def expand(paths: Iterable[Path], flag: str) -> list[Path]:
    """Replace paths that are patterns (`*`, `?`, `[…]`, `**`) by the files that they match, sorted by name.

    Raises:
        UserError: a pattern matches nothing, or a file whose name is not UTF-8; the error names the pattern and `flag`,
            or the file.
    """
    files: list[Path] = []
    for path in paths:
        if path.exists() or not glob.has_magic(str(path)):
            files.append(path)
        elif found := sorted(glob.glob(str(path), recursive=True)):
            files += map(Path, found)
        else:
            raise UserError(f'{flag} "{path}" matches no file: check the pattern and the folder')
    for path in files:
        require_usable(path)
    return files


def line_files(sources: Iterable[Path], targets: Iterable[Path], alignments: Sequence[Path] = ()) -> list[LineFiles]:
    """Pair the i-th source file with the i-th target file, and with the i-th file of alignments, if there are any."""
    sources, targets = list(sources), list(targets)
    if len(sources) != len(targets):
        raise UserError(
            f"there are {len(sources)} source files ({listed(sources)}) and {len(targets)} target files "
            f"({listed(targets)}): pass one target file for each source file, in the same order"
        )
    for source, target in zip(sources, targets, strict=True):
        if source == target:
            raise UserError(f"{source} is both source and target: pass the file of the other language for one of them")
    _refuse_crossed(sources, targets)
    if alignments and len(alignments) != len(sources):
        raise UserError(
            f"there are {len(alignments)} files of alignments ({listed(alignments)}) and {len(sources)} source files "
            f"({listed(sources)}): pass one for each source file, in the same order"
        )
    return [
        LineFiles(source=source, target=target, alignments=links)
        for source, target, links in zip(sources, targets, alignments or (None,) * len(sources), strict=True)
    ]


def _refuse_crossed(sources: list[Path], targets: list[Path]) -> None:
    """Refuse pairs whose names, apart from the language, are those of other pairs: `a.en` with `b.de`, and `a.de`."""
    for name_of in (str, lambda path: path.name):
        own, others = ([_without_language(path, name_of(path)) for path in side] for side in (sources, targets))
        if own != others and sorted(own) == sorted(others):
            i = next(i for i, name in enumerate(own) if name != others[i])
            raise UserError(
                f"{sources[i]} would be paired with {targets[i]}, but {targets[others.index(own[i])]} is given, too: "
                "pass the target files in the order of the source files"
            )


def _without_language(path: Path, name: str) -> str:
    """Return a file's name, or path, without the suffix of its language."""
    return "".join(name.rpartition(f".{language_of(path)}")[::2])


def _numbered(path: Path, spans: tuple[Span, ...]) -> Iterator[tuple[int, str | None]]:
    """Read lines with their numbers, counted from 1."""
    span = spans[0] if spans else None
    return enumerate(read_short_lines(path, span), 1 + (span.first if span else 0))


def read_aligned(*paths: Path) -> list[list[str]]:
    """Read the lines of small files; line i of each file belongs to line i of the others.

    Raises:
        UserError: a file cannot be read, the lengths differ, the files are empty, or one has columns, as if it were
            several texts.
    """
    first, *others = paths
    texts = [list(read_lines(path)) for path in paths]
    for path, lines in zip(others, texts[1:], strict=True):
        if len(lines) != len(texts[0]):
            raise unequal_lines(first, len(texts[0]), path, len(lines))
    if not texts[0]:
        raise UserError(f"{first} is empty: use a file with at least one line")
    shares = [sum("\t" in line for line in lines) / len(lines) for lines in texts]
    if max(shares) > _COLUMNS and min(shares) < 1 - _COLUMNS:
        path = paths[shares.index(max(shares))]
        raise UserError(
            f"{path} has a tab in {max(shares):.0%} of its lines, and {paths[shares.index(min(shares))]} in "
            f"{min(shares):.0%}, so it seems to hold several texts: cut it into a file for each (cut -f 1, cut -f 2); "
            "several references are several files after --ref. If the tabs are text, replace them by spaces"
        )
    return texts


def unequal_lines(one: Path, one_lines: int, other: Path, other_lines: int) -> UserError:
    return UserError(
        f"{one} and {other} must have the same number of lines ({one_lines:,} and {other_lines:,}): "
        "line i of one must be the translation of line i of the other"
    )


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


def refuse_surrogates(text: str, where: str) -> None:
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise UserError(f"{where} holds half of a surrogate pair (\\ud800 to \\udfff): fix the text") from None


def one_line(text: str, where: str) -> str:
    """Replace line breaks, which text from JSON or a table may contain, by spaces, because files have one line each."""
    refuse_surrogates(text, where)
    # A search for one character is thirty times as fast as the expression.
    return _LINE_BREAK.sub(" ", text) if "\n" in text or "\r" in text else text


def _count(line: object, rest: Iterator[object]) -> int:
    return 0 if line is _ENDED else 1 + sum(1 for _ in rest)


def listed(names: Iterable[Any]) -> str:
    return ", ".join(str(name) for name in names) or "none"
