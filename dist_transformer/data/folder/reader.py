"""A prepared data folder, opened: in a folder of this machine, or behind a URL with a cache on local disk."""

import io
import stat
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from dist_transformer.config.plain import from_plain, parse_json
from dist_transformer.data.folder.format import (
    FORMAT_VERSION,
    INDEX_FILE,
    REMEDY,
    TOKENIZER_FILE,
    VALID_FOLDER,
    VALID_SOURCE_FILE,
    VALID_TARGET_FILE,
    DataIndex,
    SplitInfo,
    copy_rows,
)
from dist_transformer.data.folder.storage import (
    CachedFiles,
    CacheSettings,
    Columns,
    LocalFiles,
    ShardFiles,
    check_file,
    fetch,
)
from dist_transformer.data.folder.urls import is_url, refuse_secrets
from dist_transformer.data.tokenizer import Tokenizer
from dist_transformer.errors import UserError
from dist_transformer.files import make_folder, move, read_small, sha256_of
from dist_transformer.links import guard
from dist_transformer.locks import exclusive
from dist_transformer.verified import Stated, hold_verified, read_verified

# Shards in memory, besides those that a plan holds; 100,000 pairs of 30 tokens a side take 13 MB.
_KEPT_SHARDS = 64
# Bytes of the header of an array whose format is 1.0, at most.
_LARGEST_HEADER = 2**16 + 10


class Split:
    """An opened split: its lengths are a copy that was verified, which nothing that happens to the file can change.

    Shards are read and verified when they are used; a plan holds those of its window.

    Args:
        vocab_size: ids must lie below it.
    """

    def __init__(
        self, folder: Path, info: SplitInfo, files: ShardFiles | None = None, *, vocab_size: int | None = None
    ) -> None:
        self.folder = folder
        self.info = info
        self.files = files or LocalFiles(folder)
        self.vocab_size = vocab_size
        self.shard_starts = np.concatenate([[0], np.cumsum([shard.pairs for shard in info.shards], dtype=np.int64)])
        """Shape: (shards + 1). First pair id of each shard."""
        self.lengths = _read_lengths(folder / info.lengths_file, info)
        """Shape: (pairs, 2). Tokens with the one special token of each side. In memory, up to 1 GiB."""
        self._held: dict[int, Columns] = {}
        self._wanted: frozenset[int] = frozenset()
        self._used: OrderedDict[int, Columns] = OrderedDict()

    def tokens(self, pair_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Ids of the given pairs, laid end to end in the given order, without special tokens.

        Returns:
            source values, source lengths, target values, target lengths; all int64.
        """
        pair_ids = np.asarray(pair_ids, dtype=np.int64)
        if pair_ids.size and (pair_ids.min() < 0 or pair_ids.max() >= self.shard_starts[-1]):
            raise IndexError(f"pair ids must lie in [0, {self.shard_starts[-1]})")
        lengths = self.sizes(pair_ids) - 1
        ends = np.cumsum(lengths, axis=1)
        source, target = (np.empty(total, dtype=np.int64) for total in lengths.sum(axis=1))
        self.copy_tokens(pair_ids, source, target, ends - lengths)
        return source, lengths[0], target, lengths[1]

    @property
    def longest(self) -> tuple[int, int]:
        """Tokens of the longest source and target, one special token each."""
        return self.info.max_source_tokens, self.info.max_target_tokens

    def sizes(self, pair_ids: np.ndarray) -> np.ndarray:
        """Shape: (2, pairs), int64: source and target tokens of the given pairs, one special token each."""
        return self.lengths.take(pair_ids, axis=0).T.astype(np.int64, order="C")

    def copy_tokens(self, pair_ids: np.ndarray, source: np.ndarray, target: np.ndarray, places: np.ndarray) -> None:
        """Write the ids of the given pairs, without special tokens, to two buffers.

        Args:
            places: (2, pairs), where in `source` and in `target` each pair begins.
        """
        shards = np.searchsorted(self.shard_starts, pair_ids, side="right") - 1
        counts = np.bincount(shards)
        # Small numbers are sorted by radix.
        by_shard = np.argsort(shards.astype(np.min_scalar_type(len(counts))), kind="stable")
        sorted_ids, stops = pair_ids[by_shard], np.cumsum(counts)
        present = np.flatnonzero(counts)
        rows = [sorted_ids[stops[shard] - counts[shard] : stops[shard]] - self.shard_starts[shard] for shard in present]
        columns = [self._shard(int(shard)) for shard in present]
        lengths = self.sizes(sorted_ids) - 1
        for side, out in enumerate((source, target)):
            parts = [(column[side], of_shard) for column, of_shard in zip(columns, rows, strict=True)]
            if parts:
                copy_rows(parts, lengths[side], out, places[side, by_shard])

    def hold(self, shards: Sequence[int]) -> dict[int, str]:
        """Read the given shards and keep them, whatever happens to their files; says of those that cannot be read why.

        Those held before stay until `forget_past`: packs may be waiting that need them.
        """
        problems = {}
        self._wanted = frozenset(shards)
        for shard in shards:
            try:
                if shard not in self._held:
                    self._held[shard] = self.read(shard)
            except UserError as error:
                problems[shard] = str(error)
            except OSError as error:
                # A cache that was removed or is full, on this machine alone: to be said by all ranks, as the rest.
                problems[shard] = (
                    f"{self.info.shards[shard].file} in {self.folder} cannot be read ({error.strerror or error}): "
                    "check that folder, its rights and its free space"
                )
        return problems

    def fetch_ahead(self, shards: Iterable[int]) -> None:
        self.files.fetch_ahead(self.info.shards[shard] for shard in shards)

    def forget_past(self) -> None:
        """Let go of the shards that `hold` was not asked for last."""
        self._held = {shard: columns for shard, columns in self._held.items() if shard in self._wanted}

    def close(self) -> None:
        """Let go of all shards."""
        self._held.clear()
        self._used.clear()

    def read(self, shard: int) -> Columns:
        """Source and target ids of a shard, verified.

        Raises:
            UserError: it cannot be had, or is not what index and lengths state.
        """
        info = self.info.shards[shard]
        columns = self.files.read(info)
        stated = self.lengths[self.shard_starts[shard] : self.shard_starts[shard + 1]]
        tokens, longest = (info.source_tokens, info.target_tokens), self.longest
        for side, column in enumerate(columns):
            lengths = column.lengths + 1
            if not np.array_equal(lengths, stated[:, side]):
                raise UserError(
                    f"{self.folder / info.file} does not hold the pairs that {self.info.lengths_file} states: {REMEDY}"
                )
            if lengths.sum() != tokens[side] or lengths.max(initial=0) > longest[side]:
                raise UserError(
                    f"{self.folder / info.file} does not hold the tokens that the index states, or longer sentences: "
                    f"{REMEDY}"
                )
            if self.vocab_size is not None and column.values.max(initial=0) >= self.vocab_size:
                raise UserError(
                    f"{self.folder / info.file} holds id {column.values.max()}, but the vocabulary of the index has "
                    f"{self.vocab_size}: {REMEDY}"
                )
        return columns

    def _shard(self, shard: int) -> Columns:
        if shard in self._held:
            return self._held[shard]
        if shard not in self._used:
            self._used[shard] = self.read(shard)
            if len(self._used) > _KEPT_SHARDS:
                self._used.popitem(last=False)
        self._used.move_to_end(shard)
        return self._used[shard]


class DataFolder:
    """A prepared data folder, opened for reading. `path` is on local disk, and the cache when the folder is not."""

    def __init__(self, path: Path, index: DataIndex, files: ShardFiles | None = None) -> None:
        self.path = path
        self.index = index
        self.train = Split(path, index.train, files, vocab_size=index.vocab_size)
        self.valid = Split(path / VALID_FOLDER, index.valid, vocab_size=index.vocab_size)

    @classmethod
    def open(
        cls, place: Path | str, cache: CacheSettings | None = None, *, shards_may_be_bad: bool = False
    ) -> "DataFolder":
        """Open and check a folder. Shards are verified at their first use, or all by `verify`.

        Args:
            place: a folder, or a URL for `fsspec`.
            cache: for a URL.
            shards_may_be_bad: leave it to their first use whether training shards are there and of the right size.

        Raises:
            UserError: not a data folder, a newer format, or a file that is missing, of another size or damaged; a URL
                with a secret.
        """
        if is_url(str(place)):
            refuse_secrets(str(place))
            if cache is None:
                raise UserError(f"{place} is a URL, and only training reads those: copy the folder to this machine")
            return cls._open_url(str(place).rstrip("/"), cache)
        path = Path(place)
        index = _read_index(path)
        for shard in index.train.shards:
            if shards_may_be_bad and not _inside(path, shard.file).exists():
                continue
            file = _check_inside(path, shard.file)
            if (size := file.stat().st_size) != shard.bytes and not shards_may_be_bad:
                raise UserError(f"{file} has {size:,} bytes where the index states {shard.bytes:,}: {REMEDY}")
        _check_small_files(path, index)
        return cls(path, index)

    @classmethod
    def _open_url(cls, url: str, cache: CacheSettings) -> "DataFolder":
        """All but the training shards is copied to the cache; the processes of a node do it in turn."""
        try:
            make_folder(cache.folder)
            guard(cache.folder)
            with exclusive(cache.folder / "lock"):
                fetch(f"{url}/{INDEX_FILE}", cache.folder / INDEX_FILE)
                index = _read_index(cache.folder)
                path = cache.folder / sha256_of(cache.folder / INDEX_FILE)[:16]
                make_folder(path / VALID_FOLDER)
                for name, sha256 in _small_files(index):
                    _inside(path, Path(name).name)
                    if not (path / name).is_file() or sha256_of(path / name) != sha256:
                        fetch(f"{url}/{name}", path / name, sha256=sha256)
                move(cache.folder / INDEX_FILE, path / INDEX_FILE)
        except OSError as error:
            raise UserError(
                f"the cache {cache.folder} cannot be written ({error.strerror or error}): choose a place with room by "
                "--cache-dir"
            ) from None
        for shard in index.train.shards:
            _inside(path, shard.file)
        _check_small_files(path, index)
        return cls(path, index, CachedFiles(url, path, cache.limit_bytes))

    def tokenizer(self) -> Tokenizer:
        """
        Raises:
            UserError: it is no longer the one that the index states.
        """
        tokenizer = Tokenizer.load(self.path / TOKENIZER_FILE)
        _stated(self.index.tokenizer_sha256).require(self.path / TOKENIZER_FILE, tokenizer.sha256)
        return tokenizer

    def valid_text(self) -> tuple[list[str], list[str]]:
        """Source and target lines of the validation text, as the user gave them.

        Raises:
            UserError: they are missing, not those that the index states, no UTF-8, or not as many as it states.
        """
        folder, info = self.path / VALID_FOLDER, self.index.valid_text
        stated = ((VALID_SOURCE_FILE, info.source_sha256), (VALID_TARGET_FILE, info.target_sha256))
        try:
            source, target = (
                read_verified(folder / name, _stated(sha256)).decode("utf-8").split("\n")[:-1]
                for name, sha256 in stated
            )
        except UnicodeDecodeError as error:
            raise UserError(f"the texts in {folder} cannot be read ({error}): {REMEDY}") from None
        if not len(source) == len(target) == self.index.valid_text.pairs:
            raise UserError(f"the texts in {folder} do not have {self.index.valid_text.pairs:,} lines each: {REMEDY}")
        return source, target

    def verify(self, *, without: Collection[int] = ()) -> None:
        """Check every file against the index, shards behind a URL too, but for the training shards `without`.

        Raises:
            UserError: naming the first file that is not what the index states.
        """
        for name, sha256 in _small_files(self.index):
            check_file(self.path / name, sha256=sha256)
        for shard in range(len(self.valid.info.shards)):
            self.valid.read(shard)
        for shard in range(len(self.train.info.shards)):
            if shard not in without:
                self.train.read(shard)

    def files(self) -> Iterator[tuple[Path, str]]:
        """Every file that the index describes, and its SHA-256."""
        for name, sha256 in _small_files(self.index):
            yield self.path / name, sha256
        for shard in self.train.info.shards:
            yield self.train.folder / shard.file, shard.sha256

    def close(self) -> None:
        self.train.close()
        self.valid.close()


def _stated(sha256: str) -> Stated:
    return Stated(sha256, INDEX_FILE, REMEDY)


def _read_lengths(path: Path, info: SplitInfo) -> np.ndarray:
    most = _LARGEST_HEADER + 2 * info.pairs * np.dtype(np.uint32).itemsize
    content = hold_verified(path, replace(_stated(info.lengths_sha256), most_bytes=most))
    header = io.BytesIO(content[:_LARGEST_HEADER])
    try:
        version = np.lib.format.read_magic(header)
        shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(header)
    except Exception as error:  # numpy gives its header to Python's own parser, which has errors of many types
        raise UserError(f"{path} cannot be read ({error}): {REMEDY}") from None
    if version != (1, 0) or shape != (info.pairs, 2) or dtype not in (np.uint16, np.uint32) or is_fortran:
        raise UserError(f"{path} holds {dtype} of shape {shape} where ({info.pairs}, 2) was stated: {REMEDY}")
    if len(content) != header.tell() + 2 * info.pairs * dtype.itemsize:
        raise UserError(f"{path} has {len(content):,} bytes, which {info.pairs:,} pairs do not have: {REMEDY}")
    lengths = np.frombuffer(content, dtype, offset=header.tell()).reshape(shape)
    lengths.flags.writeable = False
    return lengths


def _small_files(index: DataIndex) -> Iterator[tuple[str, str]]:
    """All but the training shards: their names and SHA-256."""
    yield TOKENIZER_FILE, index.tokenizer_sha256
    yield index.train.lengths_file, index.train.lengths_sha256
    yield f"{VALID_FOLDER}/{VALID_SOURCE_FILE}", index.valid_text.source_sha256
    yield f"{VALID_FOLDER}/{VALID_TARGET_FILE}", index.valid_text.target_sha256
    yield f"{VALID_FOLDER}/{index.valid.lengths_file}", index.valid.lengths_sha256
    for shard in index.valid.shards:
        yield f"{VALID_FOLDER}/{shard.file}", shard.sha256


def _check_small_files(path: Path, index: DataIndex) -> None:
    valid = path / VALID_FOLDER
    if valid.is_symlink():
        raise UserError(f"{valid} is a link, which may lead out of the folder: {REMEDY}")
    names = [index.valid.lengths_file, VALID_SOURCE_FILE, VALID_TARGET_FILE]
    for file in (*names, *(shard.file for shard in index.valid.shards)):
        _check_inside(valid, file)
    _check_inside(path, index.train.lengths_file)
    for shard in index.valid.shards:
        if (size := (valid / shard.file).stat().st_size) != shard.bytes:
            raise UserError(f"{valid / shard.file} has {size:,} bytes where the index states {shard.bytes:,}: {REMEDY}")
    check_file(_check_inside(path, TOKENIZER_FILE), sha256=index.tokenizer_sha256)
    if (entries := Tokenizer.load(path / TOKENIZER_FILE).vocab_size) != index.vocab_size:
        raise UserError(
            f"the index of {path} states a vocab_size of {index.vocab_size:,}, and {TOKENIZER_FILE} has {entries:,} "
            f"entries: {REMEDY}"
        )


def _inside(folder: Path, name: str) -> Path:
    """A place in the folder; refuses names that lead out of it."""
    if name in ("", ".", "..") or Path(name).name != name:
        raise UserError(f'"{name}" in the index of {folder} is not a plain file name: {REMEDY}')
    return folder / name


def _check_inside(folder: Path, name: str) -> Path:
    """A regular file of the folder, or a link to one: in a cache of the hub all files are links."""
    path = _inside(folder, name)
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise UserError(f"{path} is missing or unreadable ({error.strerror}): {REMEDY}") from None
    if not stat.S_ISREG(mode):
        raise UserError(f"{path} is not a regular file (it is or leads to a folder, a pipe or a device): {REMEDY}")
    return path


def _read_index(folder: Path) -> DataIndex:
    path = folder / INDEX_FILE
    try:
        content = parse_json(read_small(path))
    except OSError as error:
        raise UserError(
            f"{folder} is not a data folder, for {path} cannot be read ({error.strerror}): "
            "give a folder made by dist-transformer prepare"
        ) from None
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}): {REMEDY}") from None
    version = content.get("format_version") if isinstance(content, dict) else None
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise UserError(
            f"{path} has format version {version!r:.60} and this program reads {FORMAT_VERSION}: "
            "upgrade dist_transformer, or prepare the data again"
        )
    if version != FORMAT_VERSION:
        raise UserError(f"{path}: format_version must be {FORMAT_VERSION}, not {version!r:.60}: {REMEDY}")
    return from_plain(DataIndex, content, str(path), remedy=REMEDY)
