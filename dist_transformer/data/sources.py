"""Parallel text from files and hub datasets, as (source, target) pairs of strings.

Only "\\n" and "\\r\\n" end a line. `str.splitlines` also breaks at \\x0b, \\x85 and \\u2028, which occur in web text on
one side of a pair only and would shift every later line of that side.
"""

import bz2
import gzip
import itertools
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dist_transformer.errors import UserError

Pair = tuple[str, str]

_OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
_DAMAGED = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile)
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"

_LANGUAGE = re.compile(r"[a-z]{2,3}([-_][A-Za-z]{2,4})?")
# Suffixes of two or three letters that are not a language.
_NOT_A_LANGUAGE = re.compile("txt|tsv|csv|xml|sgm|raw|src|tgt|trg|ref|hyp|tok|low|lc|bpe|spm|in|out|dev|gz|xz|zst|zip")
_LINE_BREAK = re.compile(r"\r\n|\r|\n")


@dataclass(frozen=True, kw_only=True, slots=True)
class LineFiles:
    """Two text files: line i of one is the translation of line i of the other."""

    source: Path
    target: Path

    @property
    def name(self) -> str:
        return f"{self.source.name} + {self.target.name}"

    @property
    def languages(self) -> tuple[str | None, str | None]:
        return language_of(self.source), language_of(self.target)

    def pairs(self) -> Iterator[Pair]:
        sources, targets = read_lines(self.source), read_lines(self.target)
        for number, (source, target) in enumerate(itertools.zip_longest(sources, targets)):
            if source is None or target is None:
                source_lines = number + _count(source, sources)
                target_lines = number + _count(target, targets)
                raise UserError(
                    f"{self.source} has {source_lines:,} lines and {self.target} has {target_lines:,}: "
                    "line i of one must be the translation of line i of the other, so give files of equal length"
                )
            yield source, target


@dataclass(frozen=True, kw_only=True, slots=True)
class TsvFile:
    """One file of tab-separated columns, no quoting."""

    path: Path
    source_column: int = 0
    """Counted from 0."""
    target_column: int = 1

    def __post_init__(self) -> None:
        if self.source_column < 0 or self.target_column < 0 or self.source_column == self.target_column:
            raise UserError(
                f"TSV columns {self.source_column} and {self.target_column} must be two different columns, "
                "counted from 0: mend --tsv-columns"
            )

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def languages(self) -> tuple[str | None, str | None]:
        return None, None

    def pairs(self) -> Iterator[Pair]:
        needed = max(self.source_column, self.target_column) + 1
        for number, line in enumerate(read_lines(self.path), 1):
            columns = line.split("\t")
            if len(columns) < needed:
                raise UserError(
                    f"{self.path} line {number} has {len(columns)} tab-separated columns and {needed} are needed: "
                    "mend the line, or choose the columns with --tsv-columns"
                )
            yield columns[self.source_column], columns[self.target_column]


@dataclass(frozen=True, kw_only=True, slots=True)
class JsonlFile:
    """One JSON object a line; the two texts are string fields of it. Blank lines are passed over."""

    path: Path
    source_field: str
    target_field: str

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def languages(self) -> tuple[str | None, str | None]:
        return _as_language(self.source_field), _as_language(self.target_field)

    def pairs(self) -> Iterator[Pair]:
        for number, line in enumerate(read_lines(self.path), 1):
            if not line or line.isspace():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UserError(
                    f"{self.path} line {number} is not JSON ({error}): write one JSON object a line"
                ) from None
            if not isinstance(row, dict):
                raise UserError(f"{self.path} line {number} is not a JSON object: write one JSON object a line")
            yield self._text(row, self.source_field, number), self._text(row, self.target_field, number)

    def _text(self, row: dict[str, Any], field: str, number: int) -> str:
        where = f"{self.path} line {number}"
        if field not in row:
            raise UserError(
                f'{where} has no field "{field}" (it has {_listed(row)}): '
                "name the fields with --src-field and --tgt-field"
            )
        if not isinstance(row[field], str):
            raise UserError(
                f'{where}: field "{field}" must be a string, not {type(row[field]).__name__}: mend the line'
            )
        return _one_line(row[field], where)


@dataclass(frozen=True, kw_only=True, slots=True)
class HubDataset:
    """A dataset that `datasets.load_dataset` opens: a hub name or a local folder of JSON, Parquet, … files.

    Its rows have a `translation` column of {language: text}, or one column a language. A missing text counts as empty.
    """

    dataset: str
    source_language: str
    target_language: str
    config: str | None = None
    split: str = "train"

    @property
    def name(self) -> str:
        return "/".join([Path(self.dataset).name if Path(self.dataset).exists() else self.dataset, self.split])

    @property
    def languages(self) -> tuple[str | None, str | None]:
        return self.source_language, self.target_language

    def pairs(self) -> Iterator[Pair]:
        where = f'dataset "{self.dataset}", split "{self.split}"'
        number = 0
        for batch in self._load().iter(batch_size=1000):
            sources, targets = (self._column(batch, lang) for lang in (self.source_language, self.target_language))
            for source, target in zip(sources, targets, strict=True):
                number += 1
                row = f"{where}, row {number}"
                yield _one_line(source or "", row), _one_line(target or "", row)

    def _load(self) -> Any:
        import datasets

        try:
            return datasets.load_dataset(self.dataset, self.config, split=self.split)
        except Exception as error:  # one of many types: not found, no network, unknown config or split, gated, …
            reason = str(error).strip().split("\n")[0] or type(error).__name__
            raise UserError(
                f'dataset "{self.dataset}" (config {self.config or "default"}, split {self.split}) cannot be loaded '
                f"({reason}): check --dataset, --dataset-config and --dataset-split, and that the hub can be reached"
            ) from error

    def _column(self, batch: Mapping[str, list[Any]], language: str) -> list[str | None]:
        if language in batch:
            texts = batch[language]
        elif "translation" in batch and all(isinstance(row, dict) for row in batch["translation"]):
            texts = [row.get(language) for row in batch["translation"]]
            known = sorted({name for row in batch["translation"] for name in row})
            if language not in known:
                raise UserError(
                    f'dataset "{self.dataset}" has no language "{language}" (it has {", ".join(known)}): '
                    "choose with --src-lang and --tgt-lang"
                )
        else:
            raise UserError(
                f'dataset "{self.dataset}" has neither a column "{language}" nor a column "translation" '
                f"(it has {_listed(batch)}): choose the columns with --src-lang and --tgt-lang"
            )
        for text in texts:
            if text is not None and not isinstance(text, str):
                raise UserError(
                    f'dataset "{self.dataset}": the texts of "{language}" must be strings, not {type(text).__name__}: '
                    "choose the columns with --src-lang and --tgt-lang"
                )
        return texts


PairSource = LineFiles | TsvFile | JsonlFile | HubDataset


def line_files(sources: Iterable[Path], targets: Iterable[Path]) -> list[LineFiles]:
    """Pair the i-th source file with the i-th target file."""
    sources, targets = list(sources), list(targets)
    if len(sources) != len(targets):
        raise UserError(
            f"there are {len(sources)} source files ({_listed(sources)}) and {len(targets)} target files "
            f"({_listed(targets)}): give one target file for each source file, in the same order"
        )
    for source, target in zip(sources, targets, strict=True):
        if source == target:
            raise UserError(f"{source} is given as source and as target: give the file of the other language")
    return [LineFiles(source=source, target=target) for source, target in zip(sources, targets, strict=True)]


def read_lines(path: Path) -> Iterator[str]:
    """The lines of a UTF-8 text file, plain or `.gz`, without their ends and without a byte order mark."""
    opener = _OPENERS.get(path.suffix, open)
    lines = 0
    try:
        with opener(path, "rb") as file:
            for line in decode_lines(file, str(path)):
                yield line
                lines += 1
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: check the name") from None
    except _DAMAGED as error:
        raise UserError(
            f"{path} is not a whole {path.suffix} file (after line {lines}: {error}): fetch it again, or rename it"
        ) from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}): check the file and its rights") from None


def decode_lines(stream: Iterable[bytes], name: str) -> Iterator[str]:
    """The lines of a UTF-8 byte stream without their ends and without a byte order mark.

    Raises:
        UserError: a line is not UTF-8; `name` and its number are given.
    """
    for number, raw in enumerate(stream, 1):
        line = raw.removeprefix(_BYTE_ORDER_MARK) if number == 1 else raw
        try:
            yield line.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8")
        except UnicodeDecodeError as error:
            raise UserError(
                f"{name} line {number} is not UTF-8 (byte 0x{error.object[error.start]:02x} at position "
                f"{error.start}): convert it, for instance with iconv -f LATIN1 -t UTF-8"
            ) from None


def language_of(path: Path) -> str | None:
    """The language that a file's suffixes name: `train.en.gz` → `en`; None when they name none."""
    for suffix in reversed(path.suffixes):
        if (language := _as_language(suffix[1:])) is not None:
            return language
    return None


def _as_language(name: str) -> str | None:
    return name if _LANGUAGE.fullmatch(name) and not _NOT_A_LANGUAGE.fullmatch(name) else None


def _one_line(text: str, where: str) -> str:
    """A text from JSON or a table may hold line breaks, which no line-based file can: they become spaces."""
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise UserError(f"{where} holds half of a surrogate pair (\\ud800 to \\udfff): mend the text") from None
    return _LINE_BREAK.sub(" ", text)


def _count(line: str | None, rest: Iterator[str]) -> int:
    return 0 if line is None else 1 + sum(1 for _ in rest)


def _listed(names: Iterable[Any]) -> str:
    return ", ".join(str(name) for name in names) or "none"
