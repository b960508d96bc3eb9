"""An opened split of a data folder: its lengths, and its shards, which are read on demand."""

import io
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dist_transformer.base.errors import UserError
from dist_transformer.base.verified import Held, hold_verified
from dist_transformer.data.folder.format import (
    INDEX_FILE,
    REMEDY,
    Columns,
    SplitInfo,
    copy_rows,
    index_states,
    read_shard,
)
from dist_transformer.data.folder.storage import LocalFiles

# Shards kept in memory besides those that a plan holds. 100,000 pairs of 30 tokens per side take 13 MB.
_KEPT_SHARDS = 64
# Largest size in bytes of an array's header in format 1.0.
_LARGEST_HEADER = 2**16 + 10
# Columns of the table in `Memory`: the first two hold ids of pairs.
_IDS = slice(0, 2)


@dataclass(frozen=True, slots=True)
class Memory:
    """Addresses of the ids of some shards, for compiled code."""

    table: np.ndarray
    """Shape: (shards, 8), int64, in ascending order. First pair id of the shard and that after its last, then for
    source and target each: address of the ids, address of the rows' offsets (int32), bytes of an id."""
    owners: tuple[object, ...]
    """Keeps this memory in place."""

    @classmethod
    def join(cls, parts: Sequence["Memory"], first_ids: Sequence[int]) -> "Memory":
        """Join the memory of several splits, whose pairs are numbered from `first_ids` on."""
        tables = [part.table.copy() for part in parts]
        for table, first in zip(tables, first_ids, strict=True):
            table[:, _IDS] += first
        nothing = np.empty((0, 8), dtype=np.int64)
        return cls(np.concatenate([nothing, *tables]), tuple(owner for part in parts for owner in part.owners))


class _Loaded:
    """A shard in memory."""

    __slots__ = ("addresses", "columns")

    def __init__(self, columns: Columns) -> None:
        self.columns = columns
        self.addresses = [
            number
            for column in columns[:2]
            for number in (column.values.ctypes.data, column.offsets.ctypes.data, column.values.itemsize)
        ]


class Split:
    """An opened split. Its lengths are a verified copy, which later changes of the file do not affect.

    Shards are read and verified on demand; a plan holds those of its window.

    Args:
        lengths: content of the file of lengths, if another process of this node has read and verified it.
    """

    def __init__(
        self,
        folder: Path,
        info: SplitInfo,
        files: LocalFiles | None = None,
        *,
        lengths: Held | None = None,
    ) -> None:
        self.folder = folder
        self.info = info
        self.files = files or LocalFiles(folder)
        self.shard_starts = np.concatenate([[0], np.cumsum([shard.pairs for shard in info.shards], dtype=np.int64)])
        """Shape: (shards + 1). First pair id of each shard."""
        file = folder / info.lengths_file
        self.held_lengths = lengths or hold_verified(file, index_states(info.lengths_sha256))
        header = io.BytesIO(self.held_lengths.content[:_LARGEST_HEADER])
        np.lib.format.read_magic(header)
        shape, _, dtype = np.lib.format.read_array_header_1_0(header)
        self.lengths = np.frombuffer(self.held_lengths.content, dtype, offset=header.tell()).reshape(shape)
        """Shape: (pairs, 2). Tokens per side, with one special token. In memory that other processes may map."""
        if len(self.lengths) != self.shard_starts[-1] or (self.lengths.max(axis=0, initial=0) > self.longest).any():
            # The lengths have their hash, so a number of the index is damaged.
            raise UserError(f"{file} does not hold the pairs that {INDEX_FILE} states: {REMEDY}")
        self.kept_bytes = 0
        """Bytes of past windows that `forget_past` leaves in memory for the next epoch: the newest shards."""
        self.kept_shards = 0
        """Most past shards that stay there. Each takes two open files in every process of the node."""
        self._held: dict[int, _Loaded] = {}
        self._kept: list[int] = []
        self._used: OrderedDict[int, _Loaded] = OrderedDict()

    def tokens(self, pair_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Read the ids of the given pairs, end to end in the given order, without special tokens.

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
        """Tokens of the longest source and target, each with one special token."""
        return self.info.max_source_tokens, self.info.max_target_tokens

    def sizes(self, pair_ids: np.ndarray) -> np.ndarray:
        """Return source and target tokens of the given pairs, each with one special token; shape (2, pairs), int64."""
        return self.lengths.take(pair_ids, axis=0).T.astype(np.int64, order="C")

    def copy_tokens(self, pair_ids: np.ndarray, source: np.ndarray, target: np.ndarray, places: np.ndarray) -> None:
        """Write the ids of the given pairs, without special tokens, to two buffers.

        Args:
            places: (2, pairs), where each pair starts in `source` and in `target`.
        """
        self._copy(pair_ids, ((0, 0, source, places[0]), (1, 1, target, places[1])))

    def copy_links(self, pair_ids: np.ndarray, links: np.ndarray, places: np.ndarray) -> None:
        """Write the links of the given pairs to a buffer, if there are any, where each pair starts in it."""
        self._copy(pair_ids, ((2, 1, links, places),))

    def _copy(self, pair_ids: np.ndarray, wanted: Sequence[tuple[int, int, np.ndarray, np.ndarray]]) -> None:
        """Write columns of the given pairs.

        Args:
            wanted: number of each column, side whose lengths it has, buffer, and places of the pairs in it.
        """
        shards = np.searchsorted(self.shard_starts, pair_ids, side="right") - 1
        counts = np.bincount(shards)
        # numpy sorts small integer types by radix.
        by_shard = np.argsort(shards.astype(np.min_scalar_type(len(counts))), kind="stable")
        sorted_ids, stops = pair_ids[by_shard], np.cumsum(counts)
        present = np.flatnonzero(counts)
        rows = [sorted_ids[stops[shard] - counts[shard] : stops[shard]] - self.shard_starts[shard] for shard in present]
        columns = [self._shard(int(shard)).columns for shard in present]
        lengths = self.sizes(sorted_ids) - 1
        for number, side, out, places in wanted:
            parts = [(lists[number], of_shard) for lists, of_shard in zip(columns, rows, strict=True) if lists[number:]]
            if parts:
                copy_rows(parts, lengths[side], out, places[by_shard])

    def memory(self, pair_ids: np.ndarray) -> Memory:
        """Return where the ids of the given pairs are in memory."""
        present = np.flatnonzero(np.bincount(np.searchsorted(self.shard_starts, pair_ids, side="right") - 1)).tolist()
        loaded = tuple(self._shard(shard) for shard in present)
        table = np.empty((len(present), 8), dtype=np.int64)
        table[:, 0], table[:, 1] = self.shard_starts[present], self.shard_starts[1:][present]
        table[:, 2:] = np.array([shard.addresses for shard in loaded], dtype=np.int64).reshape(-1, 6)
        return Memory(table, loaded)

    def hold(self, shards: Sequence[int], share: Callable[[int, Held], None] = lambda *_: None) -> dict[int, str]:
        """Read the given shards and keep them, whatever happens to their files.

        Shards held before stay until `forget_past`, because waiting packs may need them.

        Args:
            share: receives each shard that was not held before, and its content.

        Returns:
            the reason for each shard that cannot be read.
        """
        problems = {}
        self.want(shards)
        for shard in shards:
            if shard in self._held:
                continue
            try:
                columns, content = self.read(shard)
            except UserError as error:
                problems[shard] = str(error)
            except OSError as error:
                # A cache that was removed or is full on this machine only. All ranks must report it, like the rest.
                problems[shard] = (
                    f"{self.info.shards[shard].file} in {self.folder} cannot be read ({error.strerror or error}): "
                    "check that folder, its rights and its free space"
                )
            else:
                self._held[shard] = _Loaded(columns)
                share(shard, content)
        return problems

    def want(self, shards: Sequence[int]) -> None:
        """Choose which shards `forget_past` must keep; after the same calls, all processes of a node keep the same."""
        past = [shard for shard in self._kept if shard not in set(shards)]
        after = np.cumsum([self.info.shards[shard].bytes for shard in reversed(past)])
        fitting = min(int((after <= self.kept_bytes).sum()), self.kept_shards)
        self._kept = [*past[len(past) - fitting :], *shards]

    def put(self, shard: int, content: Held) -> None:
        """Keep a shard that another process of this node has read and verified."""
        path = self.folder / self.info.shards[shard].file
        self._held[shard] = _Loaded(read_shard(path, content.content))

    def fetch_ahead(self, shards: Iterable[int]) -> None:
        self.files.fetch_ahead(self.info.shards[shard] for shard in shards)

    def forget_past(self) -> None:
        """Release the shards that the last `hold` did not name, except the newest that may be kept."""
        self._held = {shard: loaded for shard, loaded in self._held.items() if shard in self._kept}

    def close(self) -> None:
        """Release all shards."""
        self._held.clear()
        self._used.clear()

    def read(self, shard: int) -> tuple[Columns, Held]:
        """Read and verify a shard; also return its content.

        Raises:
            UserError: it cannot be read, or does not have the hash that the index states.
        """
        info = self.info.shards[shard]
        content = self.files.read(info)
        return read_shard(self.folder / info.file, content.content), content

    def _shard(self, shard: int) -> _Loaded:
        if shard in self._held:
            return self._held[shard]
        if shard not in self._used:
            self._used[shard] = _Loaded(self.read(shard)[0])
            if len(self._used) > _KEPT_SHARDS:
                self._used.popitem(last=False)
        self._used.move_to_end(shard)
        return self._used[shard]
