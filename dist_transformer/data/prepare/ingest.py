"""The first stages: sources are copied into chunks, so that each is read once, and the chunks are looked at."""

import itertools
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dist_transformer.data.folder import format as shards
from dist_transformer.data.prepare.settings import PrepareSettings
from dist_transformer.data.prepare.tasks import TaskRunner
from dist_transformer.data.prepare.work_dir import Work
from dist_transformer.data.prepare.worker_pool import Progress
from dist_transformer.data.text.files import Pair, PairSource
from dist_transformer.data.tokenizer import first_folded

Report = Callable[[str], None]

# 4 bytes each at most, so that a column stays below the 2 GiB that Arrow's strings may take together.
CHUNK_CHARACTERS = 2**26

# What the hash of a pair's number decides; other values give other hashes.
SHUFFLE, HOLD_OUT, VOCABULARY = 1, 2, 3
# Share of target lines that NFKC may change in silence: above it, scores on the raw references have a ceiling.
_FOLDED_ALLOWANCE = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """A staged piece of the corpus; pair `first` + i is row i of the text."""

    name: str
    first: int
    pairs: int

    def text(self, work: Work) -> Path:
        return work.folder / f"text-{self.name}.arrow"

    def ids(self, work: Work) -> Path:
        return work.folder / f"ids-{self.name}.arrow"

    def keys(self, work: Work) -> Path:
        return work.folder / f"keys-{self.name}.arrow"

    def texts(self, work: Work, rows: np.ndarray) -> tuple[list[str], list[str]]:
        """Source and target of the rows; both are empty where the pair was not read."""
        batch = shards.read_batch(self.text(work)).take(pa.array(rows))
        source, target = (pc.fill_null(batch.column(side), "").to_pylist() for side in ("src", "tgt"))
        return source, target

    def sizes(self, work: Work) -> np.ndarray:
        """Bytes of text of each row; -1 where a line of the pair was above the limit, so that it was not read."""
        batch = shards.read_batch(self.text(work))
        source, target = (pc.binary_length(batch.column(side)) for side in ("src", "tgt"))
        return pc.fill_null(pc.add(source, target), -1).to_numpy(zero_copy_only=False)

    def rows_of(self, numbers: np.ndarray) -> np.ndarray:
        """The rows of those of sorted pair numbers that it holds."""
        start, stop = np.searchsorted(numbers, [self.first, self.first + self.pairs])
        return numbers[start:stop] - self.first


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadSource:
    """Copy a source into chunks. Its result: the pairs of each chunk."""

    work: Work
    source: PairSource
    number: int
    chunk_pairs: int

    @property
    def name(self) -> str:
        return f"read-{self.number:05}"

    def run(self, progress: Progress) -> list[int]:
        sizes = self._kept()
        progress(sum(sizes))
        pairs = itertools.islice(self.source.pairs(), sum(sizes), None)
        while batch := self._next_chunk(pairs):
            texts = dict(zip(("src", "tgt"), map(list, zip(*batch, strict=True)), strict=True))
            columns = {side: pa.array(column, pa.string()) for side, column in texts.items()}
            shards.write_batch(self._chunk(len(sizes)), columns)
            sizes.append(len(batch))
            progress(len(batch))
        return sizes

    def _next_chunk(self, pairs: Iterator[Pair | None]) -> list[Pair | tuple[None, None]]:
        """Up to `chunk_pairs` pairs, and not many more than `CHUNK_CHARACTERS`; a pair above the limit is null."""
        batch: list[Pair | tuple[None, None]] = []
        characters = 0
        for pair in pairs:
            batch.append(pair or (None, None))
            characters += len(pair[0]) + len(pair[1]) if pair else 0
            if len(batch) >= self.chunk_pairs or characters >= CHUNK_CHARACTERS:
                break
        return batch

    def _kept(self) -> list[int]:
        """The chunks that an interrupted preparation has written."""
        paths = itertools.takewhile(Path.exists, map(self._chunk, itertools.count()))
        return [shards.read_batch(path).num_rows for path in paths]

    def _chunk(self, chunk: int) -> Path:
        return Chunk(name=chunk_name(self.number, chunk), first=0, pairs=0).text(self.work)


@dataclass(frozen=True, kw_only=True, slots=True)
class SurveyChunk:
    """What must be known of all chunks before one can be encoded."""

    work: Work
    chunk: Chunk
    seed: int
    valid_pairs: int
    """Candidates for the validation text wanted; 0 when it is given."""
    folding: bool
    """Whether to count the target lines that NFKC changes."""

    @property
    def name(self) -> str:
        return f"survey-{self.chunk.name}"

    def run(self, progress: Progress) -> dict[str, Any]:
        # A pair that was not read counts as empty here.
        sources, targets = self.chunk.texts(self.work, np.arange(self.chunk.pairs))
        empty = np.fromiter(map(is_empty, sources, targets), dtype=bool, count=len(sources))
        numbers = self.chunk.first + np.flatnonzero(~empty)
        folded = Counter(filter(None, map(first_folded, targets))) if self.folding else Counter()
        progress(self.chunk.pairs)
        return {
            "usable": len(numbers),
            "candidates": first_by_hash(numbers, self.seed, self.valid_pairs).tolist(),
            "folded": dict(folded),
        }


@dataclass(kw_only=True, slots=True)
class Survey:
    """The surveys of many chunks, added up in any order."""

    usable: int
    candidates: np.ndarray
    folded: Counter[str]

    def add(self, usable: int, candidates: Sequence[int] | np.ndarray, folded: dict[str, int]) -> None:
        self.usable += usable
        self.candidates = np.concatenate([self.candidates, np.array(candidates, dtype=np.int64)])
        self.folded.update(folded)

    def held_out(self) -> np.ndarray:
        """Numbers of the pairs to hold out, sorted: at most a tenth, so that a small corpus keeps its training text."""
        return np.sort(self.candidates[: max(1, self.usable // 10)] if self.usable > 1 else self.candidates[:0])


def chunk_name(source: int, chunk: int) -> str:
    return f"{source:05}-{chunk:05}"


def read_sources(runner: TaskRunner, settings: PrepareSettings, chunk_pairs: int, report: Report) -> list[Chunk]:
    """Copy all sources into chunks, numbered in the order of the sources."""
    sizes: dict[int, list[int]] = {}
    reported = 0

    def collect(number: int, found: list[int]) -> None:
        nonlocal reported
        sizes[number] = found
        while reported in sizes:
            report(f"read: {sum(sizes[reported]):,} pairs from {settings.sources[reported].name}")
            reported += 1

    tasks = [
        ReadSource(work=runner.work, source=source, number=number, chunk_pairs=chunk_pairs)
        for number, source in enumerate(settings.sources)
    ]
    runner.run("read", tasks, collect)
    for others in runner.ranks.gather(dict(sizes)):
        for number in others.keys() - sizes.keys():
            collect(number, others[number])
    pairs = [(chunk_name(number, chunk), size) for number in sorted(sizes) for chunk, size in enumerate(sizes[number])]
    firsts = itertools.accumulate((size for _, size in pairs), initial=0)
    return [Chunk(name=name, first=first, pairs=size) for (name, size), first in zip(pairs, firsts, strict=False)]


def survey_chunks(runner: TaskRunner, settings: PrepareSettings, chunks: Sequence[Chunk], normalization: str) -> Survey:
    wanted = 0 if settings.validation else settings.valid_pairs
    survey = Survey(usable=0, candidates=np.zeros(0, dtype=np.int64), folded=Counter())

    def add(found: dict[str, Any]) -> None:
        survey.add(**found)
        survey.candidates = first_by_hash(survey.candidates, settings.seed, wanted)

    tasks = [
        SurveyChunk(
            work=runner.work,
            chunk=chunk,
            seed=settings.seed,
            valid_pairs=wanted,
            folding=normalization == "nfkc",
        )
        for chunk in chunks
    ]
    runner.run("look", tasks, lambda _, found: add(found), sizes=[chunk.pairs for chunk in chunks])
    mine = {"usable": survey.usable, "candidates": survey.candidates, "folded": dict(survey.folded)}
    for rank, others in enumerate(runner.ranks.gather(mine)):
        if rank != runner.ranks.rank:
            add(others)
    return survey


def warn_of_folding(settings: PrepareSettings, survey: Survey, pairs: int, report: Report) -> None:
    share = survey.folded.total() / max(1, pairs)
    if share > _FOLDED_ALLOWANCE:
        # The first by code point of several that are as frequent: the order of the chunks must not decide.
        character = min(survey.folded, key=lambda found: (-survey.folded[found], found))
        report(
            f"warning: NFKC changes {share:.1%} of the target lines, for example {character!r} -> "
            f"{unicodedata.normalize('NFKC', character)!r}: --normalization nfc keeps them"
            + (", without --tokenizer" if settings.tokenizer else "")
        )


def pair_hash(numbers: np.ndarray, seed: int, purpose: int) -> np.ndarray:
    """A uint64 for each pair number, no two alike: SplitMix64 (Steele et al. 2014), started from seed and purpose."""
    key = np.uint64((seed * 0xD1342543DE82EF95 + purpose * 0xDA942042E4DD58B5) % 2**64)
    z = (numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + key
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def first_by_hash(numbers: np.ndarray, seed: int, count: int) -> np.ndarray:
    """The `count` pairs that come first in the order of the hold-out."""
    return numbers[np.argsort(pair_hash(numbers, seed, HOLD_OUT))[:count]]


def is_empty(source: str, target: str) -> bool:
    """One side at least holds nothing but white space."""
    return not source or not target or source.isspace() or target.isspace()
