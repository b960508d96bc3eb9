"""The data folder: token ids in Arrow shards, all lengths in one array, and an index that says what is there.

    DATA/index.json            written last; format version, languages, counts, hashes
    DATA/tokenizer.json
    DATA/train-00000.arrow …   columns `src`, `tgt`: lists of ids without special tokens, one record batch a shard
    DATA/lengths.npy           [pairs, 2]: source and target tokens of each pair, one special token each included
    DATA/valid/                the same for the validation pairs, and their raw text: source.txt, target.txt

Shards are Arrow IPC streams, so `datasets.Dataset.from_file` opens them as they are. Nothing is pickled.
"""

import dataclasses
import json
import stat
import types
import typing
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from dist_transformer.data.tokenizer import Tokenizer
from dist_transformer.errors import UserError
from dist_transformer.files import sha256_of, sync, write_synced

FORMAT_VERSION = 1

INDEX_FILE, TOKENIZER_FILE, LENGTHS_FILE = "index.json", "tokenizer.json", "lengths.npy"
VALID_FOLDER, VALID_SOURCE_FILE, VALID_TARGET_FILE = "valid", "source.txt", "target.txt"

# Each open shard holds a file handle; systems allow 1,024, and a window of the plan reads a few shards.
_OPEN_SHARDS = 64


@dataclass(frozen=True, slots=True)
class TokenLists:
    """Rows of ids, laid end to end: row i is `values[offsets[i]:offsets[i + 1]]`."""

    values: np.ndarray
    offsets: np.ndarray

    @classmethod
    def from_lists(cls, rows: Sequence[Sequence[int]], dtype: Any) -> "TokenLists":
        offsets = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum(np.fromiter(map(len, rows), dtype=np.int64, count=len(rows)), out=offsets[1:])
        values = np.fromiter((token for row in rows for token in row), dtype=dtype, count=int(offsets[-1]))
        return cls(values, offsets)

    @classmethod
    def concatenate(cls, parts: Sequence["TokenLists"]) -> "TokenLists":
        lengths = np.concatenate([part.lengths for part in parts])
        values = [part.values[part.offsets[0] : part.offsets[-1]] for part in parts]
        return cls(np.concatenate(values), np.concatenate([[0], np.cumsum(lengths)]))

    @classmethod
    def from_arrow(cls, column: pa.ListArray) -> "TokenLists":
        return cls(column.values.to_numpy(zero_copy_only=True), column.offsets.to_numpy(zero_copy_only=True))

    def to_arrow(self) -> pa.ListArray:
        return pa.ListArray.from_arrays(pa.array(self.offsets.astype(np.int32)), pa.array(self.values))

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    def slice(self, start: int, stop: int) -> "TokenLists":
        return TokenLists(self.values, self.offsets[start : stop + 1])

    def take(self, rows: np.ndarray) -> "TokenLists":
        """The given rows in the given order."""
        starts, lengths = self.offsets[rows].astype(np.int64), self.lengths[rows].astype(np.int64)
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        # Position p of row r in the result comes from starts[r] + (p - offsets[r]).
        positions = np.repeat(starts - offsets[:-1], lengths) + np.arange(offsets[-1])
        return TokenLists(self.values[positions], offsets)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardInfo:
    file: str
    pairs: int
    source_tokens: int
    """Special tokens included, as everywhere in the index."""
    target_tokens: int
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitInfo:
    shards: tuple[ShardInfo, ...]
    lengths_file: str
    lengths_sha256: str
    max_source_tokens: int
    max_target_tokens: int

    @property
    def pairs(self) -> int:
        return sum(shard.pairs for shard in self.shards)

    @property
    def source_tokens(self) -> int:
        return sum(shard.source_tokens for shard in self.shards)

    @property
    def target_tokens(self) -> int:
        return sum(shard.target_tokens for shard in self.shards)


@dataclass(frozen=True, kw_only=True, slots=True)
class TextInfo:
    """The raw validation text, in full; its shards hold only the pairs that fit `max_tokens`."""

    pairs: int
    source_sha256: str
    target_sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class DataIndex:
    format_version: int
    corpus: str
    """A name for reports and model cards."""
    synthetic: bool
    source_language: str
    target_language: str
    lowercase: bool
    tokenizer_sha256: str
    vocab_size: int
    sources: tuple[str, ...]
    """Names of the files or datasets, without their folders: the same data prepared elsewhere has the same index."""
    seed: int
    max_tokens: int
    max_length_ratio: float
    pairs_per_shard: int
    pairs_read: int
    dropped: dict[str, int]
    """Training pairs left out, by reason."""
    valid_held_out: bool
    """True when the validation pairs were taken from the training text."""
    valid_dropped: dict[str, int]
    valid_text: TextInfo
    train: SplitInfo
    valid: SplitInfo


class Split:
    """An opened split. Shards are memory-mapped when first used, and at most 64 at a time."""

    def __init__(self, folder: Path, info: SplitInfo) -> None:
        self.folder = folder
        self.info = info
        self.shard_starts = np.concatenate([[0], np.cumsum([shard.pairs for shard in info.shards], dtype=np.int64)])
        """Shape: (shards + 1). First pair id of each shard."""
        self.lengths = _open_lengths(folder / info.lengths_file, info.pairs)
        """Shape: (pairs, 2), memory-mapped. Tokens with the one special token of each side."""
        self._opened: OrderedDict[int, tuple[TokenLists, TokenLists]] = OrderedDict()

    def tokens(self, pair_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Ids of the given pairs, laid end to end in the given order, without special tokens.

        Returns:
            source values, source lengths, target values, target lengths; all int64.
        """
        pair_ids = np.asarray(pair_ids, dtype=np.int64)
        if pair_ids.size == 0:
            return (np.zeros(0, dtype=np.int64),) * 4
        if pair_ids.min() < 0 or pair_ids.max() >= self.shard_starts[-1]:
            raise IndexError(f"pair ids must lie in [0, {self.shard_starts[-1]})")
        shards = np.searchsorted(self.shard_starts, pair_ids, side="right") - 1
        by_shard = np.argsort(shards, kind="stable")
        parts = []
        for shard in np.unique(shards):
            rows = pair_ids[by_shard[shards[by_shard] == shard]] - self.shard_starts[shard]
            parts.append([column.take(rows) for column in self._shard(int(shard))])
        back = np.empty_like(by_shard)
        back[by_shard] = np.arange(len(by_shard))
        source, target = (TokenLists.concatenate(column).take(back) for column in zip(*parts, strict=True))
        return source.values.astype(np.int64), source.lengths, target.values.astype(np.int64), target.lengths

    def close(self) -> None:
        """Forget the opened shards; their memory maps go when no array points into them."""
        self._opened.clear()

    def _shard(self, shard: int) -> tuple[TokenLists, TokenLists]:
        if shard in self._opened:
            self._opened.move_to_end(shard)
            return self._opened[shard]
        path = self.folder / self.info.shards[shard].file
        columns = read_shard(path)
        stated = self.lengths[self.shard_starts[shard] : self.shard_starts[shard + 1]]
        if not all(np.array_equal(column.lengths + 1, stated[:, side]) for side, column in enumerate(columns)):
            raise UserError(f"{path} does not hold the pairs that {self.info.lengths_file} states: {_REMEDY}")
        self._opened[shard] = columns
        if len(self._opened) > _OPEN_SHARDS:
            self._opened.popitem(last=False)
        return columns


class DataFolder:
    """A prepared data folder, opened for reading."""

    def __init__(self, path: Path, index: DataIndex) -> None:
        self.path = path
        self.index = index
        self.train = Split(path, index.train)
        self.valid = Split(path / VALID_FOLDER, index.valid)

    @classmethod
    def open(cls, path: Path) -> "DataFolder":
        """Open and check a folder; `verify` also checks every hash.

        Raises:
            UserError: not a data folder, a newer format, or a file that is missing, of another size or damaged.
        """
        index = _read_index(path)
        if (path / VALID_FOLDER).is_symlink():
            raise UserError(f"{path / VALID_FOLDER} is a link, which may lead out of the folder: {_REMEDY}")
        for folder, split in ((path, index.train), (path / VALID_FOLDER, index.valid)):
            _check_inside(folder, split.lengths_file)
            for shard in split.shards:
                file = _check_inside(folder, shard.file)
                if (size := file.stat().st_size) != shard.bytes:
                    raise UserError(f"{file} has {size:,} bytes where the index states {shard.bytes:,}: {_REMEDY}")
        for name in (VALID_SOURCE_FILE, VALID_TARGET_FILE):
            _check_inside(path / VALID_FOLDER, name)
        _check_hash(_check_inside(path, TOKENIZER_FILE), index.tokenizer_sha256)
        return cls(path, index)

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.load(self.path / TOKENIZER_FILE)

    def valid_text(self) -> tuple[list[str], list[str]]:
        """Source and target lines of the validation text, as the user gave them."""
        folder = self.path / VALID_FOLDER
        source, target = (
            (folder / name).read_bytes().decode("utf-8").split("\n")[:-1]
            for name in (VALID_SOURCE_FILE, VALID_TARGET_FILE)
        )
        if not len(source) == len(target) == self.index.valid_text.pairs:
            raise UserError(f"the texts in {folder} do not have {self.index.valid_text.pairs:,} lines each: {_REMEDY}")
        return source, target

    def verify(self) -> None:
        """Check the SHA-256 of every file.

        Raises:
            UserError: naming the first file that is not what the index states.
        """
        for path, sha256 in self._hashes():
            _check_hash(path, sha256)

    def close(self) -> None:
        self.train.close()
        self.valid.close()

    def _hashes(self) -> Iterator[tuple[Path, str]]:
        yield self.path / TOKENIZER_FILE, self.index.tokenizer_sha256
        yield self.path / VALID_FOLDER / VALID_SOURCE_FILE, self.index.valid_text.source_sha256
        yield self.path / VALID_FOLDER / VALID_TARGET_FILE, self.index.valid_text.target_sha256
        for split in (self.train, self.valid):
            yield split.folder / split.info.lengths_file, split.info.lengths_sha256
            for shard in split.info.shards:
                yield split.folder / shard.file, shard.sha256


def write_shard(path: Path, source: TokenLists, target: TokenLists) -> ShardInfo:
    """Write one shard. The values' type (uint16 or uint32) becomes the column type."""
    write_batch(path, {"src": source.to_arrow(), "tgt": target.to_arrow()})
    pairs = len(source.lengths)
    return ShardInfo(
        file=path.name,
        pairs=pairs,
        source_tokens=int(source.lengths.sum()) + pairs,
        target_tokens=int(target.lengths.sum()) + pairs,
        bytes=path.stat().st_size,
        sha256=sha256_of(path),
    )


def read_shard(path: Path) -> tuple[TokenLists, TokenLists]:
    """Memory-map a shard: its source and target ids."""
    batch = read_batch(path)
    return TokenLists.from_arrow(batch.column("src")), TokenLists.from_arrow(batch.column("tgt"))


def write_split(folder: Path, shards: Sequence[ShardInfo]) -> SplitInfo:
    """Write `lengths.npy` for the shards of a folder, in their order; memory does not grow with their number."""
    longest = [0, 0]
    for shard in shards:
        for side, column in enumerate(read_shard(folder / shard.file)):
            longest[side] = max(longest[side], int(column.lengths.max()) + 1)
    path = folder / LENGTHS_FILE
    dtype = np.uint16 if max(longest) <= np.iinfo(np.uint16).max else np.uint32
    pairs = sum(shard.pairs for shard in shards)
    lengths = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=(pairs, 2))
    start = 0
    for shard in shards:
        for side, column in enumerate(read_shard(folder / shard.file)):
            lengths[start : start + shard.pairs, side] = column.lengths + 1
        start += shard.pairs
    lengths.flush()
    del lengths
    sync(path)
    return SplitInfo(
        shards=tuple(shards),
        lengths_file=LENGTHS_FILE,
        lengths_sha256=sha256_of(path),
        max_source_tokens=longest[0],
        max_target_tokens=longest[1],
    )


def write_index(folder: Path, index: DataIndex) -> None:
    text = json.dumps(dataclasses.asdict(index), indent=2, ensure_ascii=False) + "\n"
    write_synced(folder / INDEX_FILE, text.encode("utf-8"))


def write_batch(path: Path, columns: dict[str, pa.Array]) -> None:
    """One record batch as an Arrow IPC stream, flushed to disk."""
    batch = pa.record_batch(columns)
    with path.open("wb") as file, pa.ipc.new_stream(file, batch.schema) as writer:
        writer.write_batch(batch)
    sync(path)


def read_batch(path: Path) -> pa.RecordBatch:
    try:
        with pa.memory_map(str(path)) as file, pa.ipc.open_stream(file) as stream:
            return stream.read_next_batch()
    except (pa.ArrowInvalid, StopIteration, OSError) as error:
        raise UserError(f"{path} cannot be read as Arrow ({error}): {_REMEDY}") from None


_REMEDY = "copy the data folder again, or prepare it again with tools/prepare_data.py"


def _open_lengths(path: Path, pairs: int) -> np.ndarray:
    try:
        lengths = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"{path} cannot be read ({error}): {_REMEDY}") from None
    if lengths.shape != (pairs, 2) or lengths.dtype not in (np.uint16, np.uint32):
        raise UserError(
            f"{path} holds {lengths.dtype} of shape {lengths.shape} where ({pairs}, 2) was stated: {_REMEDY}"
        )
    return lengths


def _check_inside(folder: Path, name: str) -> Path:
    """A file of the folder, refusing names that lead out of it."""
    if name in ("", ".", "..") or Path(name).name != name:
        raise UserError(f'"{name}" in the index of {folder} is not a plain file name: {_REMEDY}')
    path = folder / name
    try:
        mode = path.lstat().st_mode
    except OSError as error:
        raise UserError(f"{path} is missing or unreadable ({error.strerror}): {_REMEDY}") from None
    if not stat.S_ISREG(mode):
        raise UserError(f"{path} is not a regular file (a link or a folder): {_REMEDY}")
    return path


def _check_hash(path: Path, sha256: str) -> None:
    try:
        found = sha256_of(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): {_REMEDY}") from None
    if found != sha256:
        raise UserError(f"{path} is damaged or from another folder, for its SHA-256 is not the index's: {_REMEDY}")


def _read_index(folder: Path) -> DataIndex:
    path = folder / INDEX_FILE
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(
            f"{folder} is not a data folder, for {path} cannot be read ({error.strerror}): "
            "give a folder made by tools/prepare_data.py"
        ) from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON ({error}): {_REMEDY}") from None
    version = content.get("format_version") if isinstance(content, dict) else None
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise UserError(
            f"{path} has format version {version} and this program reads {FORMAT_VERSION}: "
            "upgrade dist_transformer, or prepare the data again"
        )
    try:
        if version != FORMAT_VERSION:
            raise ValueError(f"format_version must be {FORMAT_VERSION}, not {version!r}")
        return _decode(DataIndex, content, "index")
    except ValueError as error:
        raise UserError(f"{path}: {error}: {_REMEDY}") from None


def _decode(kind: Any, value: Any, field: str) -> Any:
    """Build a dataclass, tuple, dict or plain value from JSON, checking every type and every key."""
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        if not isinstance(value, dict) or value.keys() != hints.keys():
            wrong = set(value).symmetric_difference(hints) if isinstance(value, dict) else {field}
            raise ValueError(f"{field} has missing or unknown fields: {', '.join(sorted(wrong))}")
        return kind(**{name: _decode(hint, value[name], f"{field}.{name}") for name, hint in hints.items()})
    if isinstance(kind, types.GenericAlias) and kind.__origin__ is tuple and isinstance(value, list):
        return tuple(_decode(kind.__args__[0], item, f"{field}[{i}]") for i, item in enumerate(value))
    if isinstance(kind, types.GenericAlias) and kind.__origin__ is dict and isinstance(value, dict):
        return {name: _decode(kind.__args__[1], item, f"{field}.{name}") for name, item in value.items()}
    if type(value) is kind and not (kind is int and value < 0):
        return value
    raise ValueError(f"{field} must be {getattr(kind, '__name__', kind)}, not {value!r:.60}")
