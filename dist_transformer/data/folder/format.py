"""The format of a data folder: token ids in Arrow shards, all lengths in one array, and an index of both.

    DATA/index.json            written last; format version, languages, counts, hashes
    DATA/tokenizer.json
    DATA/train-00000.arrow …   columns `src`, `tgt`: lists of ids without special tokens, one record batch per shard;
                               the ids of the folder's tags are in front of each `src`
                               prepared with alignments, also `links`: for each token of `tgt` the place, from 1 on,
                               of the token of `src` that it is linked to, or 0
    DATA/lengths.npy           [pairs, 2]: source and target tokens of each pair, one special token each included
    DATA/valid/                the same for the validation pairs, and their raw text: source.txt, target.txt

Shards are Arrow IPC streams, so `datasets.Dataset.from_file` can open them. Nothing is pickled.
"""

import dataclasses
import itertools
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from dist_transformer.base.errors import UserError
from dist_transformer.base.files import sha256_of, whole_path, write_file
from dist_transformer.base.verified import Content, Stated
from dist_transformer.config.directions import Direction
from dist_transformer.config.plain import OMIT_DEFAULT, to_plain
from dist_transformer.data.folder.marks import LanguageMarks

FORMAT_VERSION = 1
REMEDY = "copy the data folder again, or prepare it again with dist-transformer prepare"

INDEX_FILE, TOKENIZER_FILE, LENGTHS_FILE = "index.json", "tokenizer.json", "lengths.npy"
VALID_FOLDER, VALID_SOURCE_FILE, VALID_TARGET_FILE = "valid", "source.txt", "target.txt"


@dataclass(frozen=True, slots=True)
class TokenLists:
    """Rows of ids, end to end: row i is `values[offsets[i]:offsets[i + 1]]`."""

    values: np.ndarray
    offsets: np.ndarray

    @classmethod
    def from_lists(cls, rows: Sequence[Sequence[int]], dtype: Any) -> "TokenLists":
        offsets = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum(np.fromiter(map(len, rows), dtype=np.int64, count=len(rows)), out=offsets[1:])
        values = np.fromiter(itertools.chain.from_iterable(rows), dtype=dtype, count=int(offsets[-1]))
        return cls(values, offsets)

    @classmethod
    def concatenate(cls, parts: Sequence["TokenLists"]) -> "TokenLists":
        lengths = np.concatenate([part.lengths for part in parts])
        values = [part.values[part.offsets[0] : part.offsets[-1]] for part in parts]
        return cls(np.concatenate(values), np.concatenate([[0], np.cumsum(lengths)]))

    @classmethod
    def from_arrow(cls, column: pa.ListArray) -> "TokenLists":
        # Views of Arrow's memory. Its own `to_numpy` imports pandas.
        return cls(np.from_dlpack(column.values), np.from_dlpack(column.offsets))

    def to_arrow(self) -> pa.ListArray:
        return pa.ListArray.from_arrays(pa.array(self.offsets.astype(np.int32)), pa.array(self.values))

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    def to_lists(self) -> list[list[int]]:
        return [row.tolist() for row in np.split(self.values, self.offsets[1:-1])] if len(self.offsets) > 1 else []

    def slice(self, start: int, stop: int) -> "TokenLists":
        return TokenLists(self.values, self.offsets[start : stop + 1])

    def prefixed(self, ids: Sequence[int]) -> "TokenLists":
        """Return all rows with `ids` in front of each."""
        if not ids:
            return self
        starts = self.offsets[:-1] - self.offsets[0]
        values = self.values[self.offsets[0] : self.offsets[-1]]
        values = np.insert(values, np.repeat(starts, len(ids)), np.tile(ids, len(starts)))
        return TokenLists(values, np.concatenate([[0], np.cumsum(self.lengths.astype(np.int64) + len(ids))]))

    def take(self, rows: np.ndarray) -> "TokenLists":
        """Return the given rows in the given order."""
        lengths = self.lengths[rows].astype(np.int64)
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        values = np.empty(offsets[-1], dtype=self.values.dtype)
        copy_rows([(self, rows)], lengths, values, offsets[:-1])
        return TokenLists(values, offsets)


def copy_rows(
    parts: Sequence[tuple[TokenLists, np.ndarray]], lengths: np.ndarray, out: np.ndarray, places: np.ndarray
) -> None:
    """Copy rows of several lists to `out`: the i-th of these rows has length `lengths[i]` and starts at `places[i]`."""
    begins = np.concatenate([lists.offsets.take(rows) for lists, rows in parts], dtype=np.int64)
    before = np.concatenate([[0], np.cumsum(lengths)])
    # Number all copied tokens, then turn the numbers into source indices and target places.
    number = np.arange(before[-1])
    index = np.repeat(begins - before[:-1], lengths)
    index += number
    number += np.repeat(places - before[:-1], lengths)
    tokens = np.empty(len(index), dtype=out.dtype)
    edges = np.cumsum([0, *(len(rows) for _, rows in parts)])
    chosen = [
        (lists.values, slice(first, last), slice(before[first], before[last]))
        for (lists, _), first, last in zip(parts, edges[:-1], edges[1:], strict=True)
        if before[first] < before[last]
    ]
    # Rows are scattered over large files. Reading the first and last token of each row before all others lets the
    # processor wait for many of them at once: 1.8 ns per token instead of 4.
    for values, rows, _ in chosen:
        values.take(begins[rows], mode="clip")
        values.take(begins[rows] + lengths[rows] - 1, mode="clip")
    for values, _, numbers in chosen:
        # No index needs clipping, but in this mode numpy is faster, because it never has to stop with an error.
        tokens[numbers] = values.take(index[numbers], mode="clip")
    out[number] = tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardInfo:
    file: str
    pairs: int
    source_tokens: int
    """Source tokens with special tokens, as everywhere in the index."""
    target_tokens: int
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitInfo:
    shards: tuple[ShardInfo, ...]
    """All pairs in their first segmentation, then in their second one, in as many shards, and so on."""
    segmentations: int = dataclasses.field(default=1, metadata=OMIT_DEFAULT)
    """Segmentations of each pair. An epoch takes one of them."""
    lengths_file: str
    lengths_sha256: str
    max_source_tokens: int
    max_target_tokens: int

    @property
    def rows(self) -> int:
        """Pairs of all segmentations."""
        return sum(shard.pairs for shard in self.shards)

    @property
    def pairs(self) -> int:
        return self.rows // self.segmentations

    @property
    def source_tokens(self) -> int:
        """Source tokens of an epoch, the mean over the segmentations; `target_tokens` likewise."""
        return sum(shard.source_tokens for shard in self.shards) // self.segmentations

    @property
    def target_tokens(self) -> int:
        return sum(shard.target_tokens for shard in self.shards) // self.segmentations

    def __post_init__(self) -> None:
        count, pairs = self.segmentations, [shard.pairs for shard in self.shards]
        if count < 1 or pairs != pairs[: len(pairs) // count] * count:
            raise UserError(f"segmentations is {count}, but the shards do not repeat as many times: {REMEDY}")


@dataclass(frozen=True, kw_only=True, slots=True)
class TextInfo:
    """The complete raw validation text. The shards hold only the pairs that fit `max_tokens`."""

    pairs: int
    source_sha256: str
    target_sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class DataIndex:
    format_version: int
    corpus: str
    """Name for reports and model cards."""
    synthetic: bool
    source_language: str
    target_language: str
    source_tags: tuple[str, ...] = dataclasses.field(default=(), metadata=OMIT_DEFAULT)
    """Tags in front of every source sentence of the shards, in this order; part of its tokens."""
    lowercase: bool
    tokenizer_sha256: str
    vocab_size: int
    """Entries of the vocabulary, or of that of the sources."""
    target_vocab_size: int = dataclasses.field(default=0, metadata=OMIT_DEFAULT)
    """Entries of the vocabulary of the targets; 0: both sides have the same one."""
    sources: tuple[str, ...]
    """Names of the files or datasets without their folders, so that the same data gives the same index elsewhere."""
    seed: int
    max_tokens: int
    max_length_ratio: float
    pairs_per_shard: int
    pairs_read: int
    dropped: dict[str, int]
    """Number of training pairs left out, by reason."""
    overlap: int
    """Training pairs that are also validation pairs; counted in `dropped` unless the user chose to keep them."""
    repeats: int
    """Kept training pairs that exactly repeat another one."""
    changed: dict[str, int] | None = dataclasses.field(default=None, metadata=OMIT_DEFAULT)
    """Training pairs of all variants, by the name of the change that was drawn for them; None: no change is drawn."""
    aligned: bool = dataclasses.field(default=False, metadata=OMIT_DEFAULT)
    """Whether the training shards have links."""
    several_sentences: int | None = dataclasses.field(default=None, metadata=OMIT_DEFAULT)
    """Kept training pairs whose source has more than one sentence; None in folders of older versions."""
    valid_held_out: bool
    """Whether the validation pairs were taken from the training text."""
    valid_dropped: dict[str, int]
    valid_text: TextInfo
    train: SplitInfo
    valid: SplitInfo
    marks: LanguageMarks = dataclasses.field(default=LanguageMarks(), metadata=OMIT_DEFAULT)
    """Pieces that are typical of one language, in the first shard; none in folders of older versions."""

    @property
    def vocab_sizes(self) -> tuple[int, int]:
        """Both sizes, as `Vocabulary.sizes`."""
        return self.vocab_size, self.target_vocab_size

    @property
    def direction(self) -> Direction:
        return Direction(
            source_language=self.source_language, target_language=self.target_language, tags=self.source_tags
        )


def write_shard(path: Path, source: TokenLists, target: TokenLists, *links: TokenLists) -> ShardInfo:
    """Write one shard, with or without links. The values' type (uint16 or uint32) becomes the column type."""
    columns = zip(_COLUMNS, (source, target, *links), strict=False)
    write_batch(path, {name: column.to_arrow() for name, column in columns})
    pairs = len(source.lengths)
    return ShardInfo(
        file=path.name,
        pairs=pairs,
        source_tokens=int(source.lengths.sum()) + pairs,
        target_tokens=int(target.lengths.sum()) + pairs,
        bytes=path.stat().st_size,
        sha256=sha256_of(path),
    )


Columns = tuple[TokenLists, ...]
"""Source and target ids and, in folders with alignments, links."""
_COLUMNS = ("src", "tgt", "links")


def read_shard(path: Path, content: Content | None = None) -> Columns:
    """Read the columns of a shard from its `content` if given, otherwise from the memory-mapped file.

    Raises:
        UserError: it cannot be read.
    """
    batch = read_batch(path, content)
    return tuple(TokenLists.from_arrow(batch.column(name)) for name in _COLUMNS if name in batch.schema.names)


def write_split(folder: Path, shards: Sequence[ShardInfo], *, segmentations: int = 1) -> SplitInfo:
    """Write `lengths.npy` for the shards of a folder, in their order. Memory does not grow with their number."""
    longest = [0, 0]
    for shard in shards:
        for side, column in enumerate(read_shard(folder / shard.file)[:2]):
            longest[side] = max(longest[side], int(column.lengths.max()) + 1)
    path = folder / LENGTHS_FILE
    dtype = np.uint16 if max(longest) <= np.iinfo(np.uint16).max else np.uint32
    pairs = sum(shard.pairs for shard in shards)
    with whole_path(path) as file:
        lengths = np.lib.format.open_memmap(file, mode="w+", dtype=dtype, shape=(pairs, 2))
        start = 0
        for shard in shards:
            for side, column in enumerate(read_shard(folder / shard.file)[:2]):
                lengths[start : start + shard.pairs, side] = column.lengths + 1
            start += shard.pairs
        lengths.flush()
        del lengths
    return SplitInfo(
        shards=tuple(shards),
        segmentations=segmentations,
        lengths_file=LENGTHS_FILE,
        lengths_sha256=sha256_of(path),
        max_source_tokens=longest[0],
        max_target_tokens=longest[1],
    )


def write_index(folder: Path, index: DataIndex) -> None:
    text = json.dumps(to_plain(index), indent=2, ensure_ascii=False) + "\n"
    write_file(folder / INDEX_FILE, text)


def write_batch(path: Path, columns: dict[str, pa.Array]) -> None:
    """Write one record batch as an Arrow IPC stream."""
    batch = pa.record_batch(columns)
    with (
        whole_path(path) as file,
        pa.OSFile(os.fsencode(file), "wb") as sink,
        pa.ipc.new_stream(sink, batch.schema) as writer,
    ):
        writer.write_batch(batch)


def read_batch(path: Path, content: Content | None = None) -> pa.RecordBatch:
    """Read the only record batch of an Arrow IPC stream.

    Args:
        content: content of the file, if it was read already.

    Raises:
        UserError: the file cannot be read.
    """
    try:
        opened = pa.memory_map(os.fsencode(path)) if content is None else pa.BufferReader(content)
        with opened as file, pa.ipc.open_stream(file) as stream:
            return stream.read_next_batch()
    except (pa.ArrowException, StopIteration, OSError) as error:
        problem = " ".join(str(error).split()) or "it holds no record batch"
        raise UserError(f"{path} cannot be read as Arrow ({problem}): {REMEDY}") from None


def index_states(sha256: str) -> Stated:
    return Stated(sha256, INDEX_FILE, REMEDY)
