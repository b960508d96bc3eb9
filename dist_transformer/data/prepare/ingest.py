"""The first stages: copy the sources into chunks, so that each source is read once, and survey the chunks."""

import functools
import itertools
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dist_transformer.data.folder import format as shards
from dist_transformer.data.prepare.settings import PrepareSettings
from dist_transformer.data.prepare.split_files import split_sources
from dist_transformer.data.prepare.tasks import TaskRunner
from dist_transformer.data.prepare.work_dir import Work
from dist_transformer.data.prepare.worker_pool import Progress
from dist_transformer.data.text.pairs import LineFiles, Pair, PairSource
from dist_transformer.data.vocabulary.normalization import Normalization, clean, first_folded, folds, is_blank

Report = Callable[[str], None]
Normalizations = tuple[Normalization | None, Normalization | None]

# At most 4 bytes each, so that a column stays below the 2 GiB limit of Arrow's strings.
CHUNK_CHARACTERS = 2**26

# Purposes of the hash of a pair's number; each gives other hashes.
SHUFFLE, HOLD_OUT, VOCABULARY = 1, 2, 3
SEGMENTATION = 4
"""The first of two purposes, of sources and of targets, for each segmentation."""
AUGMENTATION = 2**32
"""The first of one purpose for each variant."""
# Share of lines that may be odd without a warning: targets that NFKC changes, because scores on the raw references then
# have a ceiling, and traces of another program.
_ALLOWANCE = 0.01
# What other programs leave in text: a pattern, its name and the remedy.
_TRACES = (
    (r"&(amp|apos|quot|lt|gt|nbsp|#[0-9]+|#x[0-9a-fA-F]+);", "have escapes such as &apos;", "unescape them first"),
    (r"@@( |$)", "have pieces of BPE (@@)", "join them first (sed -E 's/@@( |$)//g')"),
    (r" @[-/.,]@ ", "are tokenised by Moses (@-@)", "detokenise them first (sacremoses detokenize)"),
    ("▁", "have pieces of SentencePiece (▁)", "join them first (spm_decode)"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """Staged piece of the corpus; pair `first` + i is row i of the text."""

    name: str
    first: int
    pairs: int

    def text(self, work: Work) -> Path:
        return work.folder / f"text-{self.name}.arrow"

    def ids(self, work: Work) -> Path:
        return work.folder / f"ids-{self.name}.arrow"

    def keys(self, work: Work) -> Path:
        return work.folder / f"keys-{self.name}.arrow"

    def several_keys(self, work: Work) -> Path:
        """Return the file of those keys whose source has several sentences."""
        return work.folder / f"several-{self.name}.arrow"

    def texts(self, work: Work, rows: np.ndarray) -> tuple[list[str], list[str]]:
        """Return source and target of the rows; both are empty if the pair was not read."""
        batch = shards.read_batch(self.text(work)).take(pa.array(rows))
        source, target = (pc.fill_null(batch.column(side), "").to_pylist() for side in ("src", "tgt"))
        return source, target

    def links(self, work: Work, rows: np.ndarray) -> list[str]:
        """Return the alignments of the rows, empty for those that have none."""
        batch = shards.read_batch(self.text(work))
        if "links" not in batch.schema.names:
            return [""] * len(rows)
        found: list[str] = pc.fill_null(batch.column("links").take(pa.array(rows)), "").to_pylist()
        return found

    def sizes(self, work: Work) -> np.ndarray:
        """Return the bytes of text of each row; -1 if a line of the pair was above the limit, so it was not read."""
        batch = shards.read_batch(self.text(work))
        source, target = (pc.binary_length(batch.column(side)) for side in ("src", "tgt"))
        return pc.fill_null(pc.add(source, target), -1).to_numpy(zero_copy_only=False)

    def rows_of(self, numbers: np.ndarray) -> np.ndarray:
        """Return the rows of this chunk for sorted pair numbers; numbers in other chunks are left out."""
        start, stop = np.searchsorted(numbers, [self.first, self.first + self.pairs])
        return numbers[start:stop] - self.first


def _read_source(work: Work, source: PairSource, number: int, chunk_pairs: int, progress: Progress) -> list[int]:
    """Copy a source, or a part of one, into chunks; return the number of pairs of each chunk."""

    def path(chunk: int) -> Path:
        return Chunk(name=chunk_name(number, chunk), first=0, pairs=0).text(work)

    # Those that an interrupted preparation has written.
    kept = itertools.takewhile(Path.exists, map(path, itertools.count()))
    sizes = [shards.read_batch(chunk).num_rows for chunk in kept]
    progress(sum(sizes))
    pairs = itertools.islice(source.pairs(), sum(sizes), None)
    names = ("src", "tgt", "links") if isinstance(source, LineFiles) and source.alignments else ("src", "tgt")
    while batch := _next_chunk(pairs, chunk_pairs):
        columns = {name: [pair and pair[side] for pair in batch] for side, name in enumerate(names)}
        shards.write_batch(path(len(sizes)), {name: pa.array(each, pa.string()) for name, each in columns.items()})
        sizes.append(len(batch))
        progress(len(batch))
    return sizes


def _next_chunk(pairs: Iterator[Pair | None], most: int) -> list[Pair | None]:
    """Take up to `most` pairs, and not many more characters than `CHUNK_CHARACTERS`.

    A pair above the limit of a line is None.
    """
    batch: list[Pair | None] = []
    characters = 0
    for pair in pairs:
        batch.append(pair)
        characters += len(pair[0]) + len(pair[1]) if pair else 0
        if len(batch) >= most or characters >= CHUNK_CHARACTERS:
            break
    return batch


def _survey(
    work: Work, chunk: Chunk, settings: PrepareSettings, normalizations: Normalizations, progress: Progress
) -> dict[str, Any]:
    """Collect the facts about a chunk that must be known of all chunks before one can be encoded.

    Args:
        normalizations: rules of both sides. Target lines that NFKC changes are counted if it is part of their rule.
    """
    # A pair that was not read counts as empty here.
    sources, targets = chunk.texts(work, np.arange(chunk.pairs))
    empty = np.fromiter(
        map(is_empty, sources, targets, itertools.repeat(normalizations)), dtype=bool, count=len(sources)
    )
    numbers = chunk.first + np.flatnonzero(~empty)
    rule = normalizations[1]
    cleaned = (clean(target, rule) for target in targets if folds(rule))
    progress(chunk.pairs)
    return {
        "usable": len(numbers),
        "candidates": first_by_hash(numbers, settings).tolist(),
        "folded": Counter(filter(None, map(first_folded, cleaned))),
        "traces": count_traces(sources, targets),
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Survey:
    """Facts about all chunks together."""

    usable: int
    """Number of pairs with text on both sides."""
    candidates: list[int]
    """Numbers of the first of these pairs in the order of the hold-out; none if validation text is given."""
    folded: Counter[str]
    """Number of target lines that NFKC changes, by the first such character."""
    traces: Counter[str]

    def held_out(self) -> np.ndarray:
        """Return the numbers of the pairs to hold out, sorted.

        They are at most a tenth of the pairs, so that a small corpus keeps its training text.
        """
        numbers = self.candidates[: max(1, self.usable // 10)] if self.usable > 1 else []
        return np.sort(np.array(numbers, dtype=np.int64))


def chunk_name(source: int, chunk: int) -> str:
    return f"{source:05}-{chunk:05}"


def read_sources(runner: TaskRunner, settings: PrepareSettings, chunk_pairs: int, report: Report) -> list[Chunk]:
    """Copy all sources into chunks, numbered in the order of the text.

    Collective: every rank must call it.
    """
    sources = settings.training_sources
    parts = split_sources(runner, sources)
    tasks = {
        f"read-{part:05}": functools.partial(_read_source, runner.work, source, part, chunk_pairs)
        for part, (_, source) in enumerate(parts)
    }
    sizes: list[list[int]] = runner.results("read", tasks)
    for number, source in enumerate(sources):
        pairs = sum(sum(found) for found, (of, _) in zip(sizes, parts, strict=True) if of == number)
        report(f"read: {pairs:,} pairs from {source.name}")
    pieces = [(chunk_name(part, chunk), size) for part, found in enumerate(sizes) for chunk, size in enumerate(found)]
    firsts = itertools.accumulate((size for _, size in pieces), initial=0)
    return [Chunk(name=name, first=first, pairs=size) for (name, size), first in zip(pieces, firsts, strict=False)]


def survey_chunks(
    runner: TaskRunner, settings: PrepareSettings, chunks: Sequence[Chunk], normalizations: Normalizations
) -> Survey:
    def merge(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
        candidates = np.array(one["candidates"] + other["candidates"], dtype=np.int64)
        return {
            "usable": one["usable"] + other["usable"],
            "candidates": first_by_hash(candidates, settings).tolist(),
            "folded": Counter(one["folded"]) + Counter(other["folded"]),
            "traces": Counter(one["traces"]) + Counter(other["traces"]),
        }

    tasks = {
        f"survey-{chunk.name}": functools.partial(_survey, runner.work, chunk, settings, normalizations)
        for chunk in chunks
    }
    nothing: dict[str, Any] = {"usable": 0, "candidates": [], "folded": Counter[str](), "traces": Counter[str]()}
    return Survey(**runner.merged("look", tasks, merge, nothing, sizes=[chunk.pairs for chunk in chunks]))


def warn_of_folding(settings: PrepareSettings, survey: Survey, pairs: int, report: Report) -> None:
    share = survey.folded.total() / max(1, pairs)
    if share > _ALLOWANCE:
        # Equally frequent characters are ordered by code point, so that the order of the chunks does not matter.
        flags, given = settings.vocabularies[-1].flags, settings.vocabularies[-1].tokenizer
        character = min(survey.folded, key=lambda found: (-survey.folded[found], found))
        report(
            f"warning: NFKC changes {share:.1%} of the target lines, for example {character!r} -> "
            f"{unicodedata.normalize('NFKC', character)!r}: --normalization clean-nfc keeps them"
            + (f", without {flags}tokenizer" if given else "")
        )


def count_traces(sources: Sequence[str], targets: Sequence[str]) -> dict[str, int]:
    """Count the lines with each trace of another program, by a sentence about them without its beginning."""
    found: dict[str, int] = {}
    for side, lines in (("source", sources), ("target", targets)):
        suspects = [line for line in lines if "&" in line or "@" in line or "▁" in line]
        for pattern, what, remedy in _TRACES:
            found[f"{side} lines {what}: {remedy}"] = sum(1 for line in suspects if re.search(pattern, line))
    return found


def warn_of_traces(traces: Mapping[str, int], pairs: int, report: Report, *, of: str = "") -> None:
    for sentence, lines in sorted(traces.items()):
        if lines > _ALLOWANCE * pairs:
            report(f"warning: {lines / pairs:.1%} of the {of}{sentence}")


def pair_hash(numbers: np.ndarray, seed: int, purpose: int) -> np.ndarray:
    """Hash each pair number to a distinct uint64 by SplitMix64 (Steele et al. 2014), seeded by seed and purpose."""
    key = np.uint64((seed * 0xD1342543DE82EF95 + purpose * 0xDA942042E4DD58B5) % 2**64)
    z = (numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + key
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def first_by_hash(numbers: np.ndarray, settings: PrepareSettings) -> np.ndarray:
    """Return the candidates for the hold-out among pairs, in its order; none if validation text is given."""
    wanted = 0 if settings.validation_sources else settings.valid_pairs
    return numbers[np.argsort(pair_hash(numbers, settings.seed, HOLD_OUT))[:wanted]]


def is_empty(source: str, target: str, normalizations: Normalizations) -> bool:
    """Return whether the rules leave nothing but white space of at least one side."""
    return any(map(is_blank, (source, target), normalizations))
