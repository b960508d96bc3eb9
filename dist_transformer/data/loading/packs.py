"""Packs as arrays, because a step has hundreds of them and a plan millions."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np


@dataclass(frozen=True, kw_only=True, slots=True)
class Pack:
    """Sentence pairs that fit the budgets."""

    pair_ids: np.ndarray
    source_tokens: int
    target_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Packs(Sequence[Pack | None]):
    """Packs in order, followed by packs of weight zero, which are None when accessed one by one."""

    pair_ids: np.ndarray
    """Pairs of all packs, end to end."""
    stops: np.ndarray
    """End of each pack in `pair_ids`."""
    source_tokens: np.ndarray
    """Source tokens of each pack."""
    target_tokens: np.ndarray
    empty: int = 0
    """Number of packs of weight zero."""

    @classmethod
    def of(cls, packs: Sequence[Pack], *, empty: int = 0) -> "Packs":
        return cls(
            pair_ids=np.concatenate([np.empty(0, dtype=np.int64), *(pack.pair_ids for pack in packs)]),
            stops=np.cumsum([len(pack.pair_ids) for pack in packs], dtype=np.int64),
            source_tokens=np.array([pack.source_tokens for pack in packs], dtype=np.int64),
            target_tokens=np.array([pack.target_tokens for pack in packs], dtype=np.int64),
            empty=empty,
        )

    @classmethod
    def join(cls, parts: Sequence["Packs"], *, empty: int = 0) -> "Packs":
        """Concatenate parts that have no packs of weight zero."""
        if len(parts) == 1 and not empty:
            return parts[0]
        before = np.cumsum([0, *(len(part.pair_ids) for part in parts)])
        nothing = np.empty(0, dtype=np.int64)
        return cls(
            pair_ids=np.concatenate([nothing, *(part.pair_ids for part in parts)]),
            stops=np.concatenate([nothing, *(part.stops + first for part, first in zip(parts, before, strict=False))]),
            source_tokens=np.concatenate([nothing, *(part.source_tokens for part in parts)]),
            target_tokens=np.concatenate([nothing, *(part.target_tokens for part in parts)]),
            empty=empty,
        )

    def __len__(self) -> int:
        return len(self.stops) + self.empty

    @overload
    def __getitem__(self, index: int) -> Pack | None: ...

    @overload
    def __getitem__(self, index: slice) -> "Packs": ...

    def __getitem__(self, index: int | slice) -> "Pack | Packs | None":
        if isinstance(index, slice):
            first, after, _ = index.indices(len(self))
            return self._between(first, max(first, after))
        if not 0 <= index < len(self):
            raise IndexError(f"pack {index} of {len(self)}")
        if index >= len(self.stops):
            return None
        one = self._between(index, index + 1)
        return Pack(
            pair_ids=one.pair_ids, source_tokens=int(one.source_tokens[0]), target_tokens=int(one.target_tokens[0])
        )

    def __iter__(self) -> Iterator[Pack | None]:
        return (self[number] for number in range(len(self)))

    def taken(self, order: np.ndarray) -> "Packs":
        """Return the given packs in the given order."""
        counts = np.diff(self.stops, prepend=0)
        stops = np.cumsum(counts[order])
        first = (self.stops - counts)[order] - (stops - counts[order])
        return Packs(
            pair_ids=self.pair_ids[np.arange(stops[-1]) + np.repeat(first, counts[order])],
            stops=stops,
            source_tokens=self.source_tokens[order],
            target_tokens=self.target_tokens[order],
        )

    def pairs_between(self, firsts: np.ndarray, afters: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the pairs of several slices of packs, end to end, and how many there are in each slice."""
        edges = np.concatenate([[0], self.stops, np.full(self.empty, len(self.pair_ids))])
        starts, stops = (edges[np.minimum(place, len(self))] for place in (firsts, afters))
        counts = stops - starts
        before = np.cumsum(counts) - counts
        return self.pair_ids[np.repeat(starts - before, counts) + np.arange(counts.sum())], counts

    def _between(self, first: int, after: int) -> "Packs":
        full = len(self.stops)
        first_full, after_full = min(first, full), min(after, full)
        start = int(self.stops[first_full - 1]) if first_full else 0
        stop = int(self.stops[after_full - 1]) if after_full else 0
        return Packs(
            pair_ids=self.pair_ids[start:stop],
            stops=self.stops[first_full:after_full] - start,
            source_tokens=self.source_tokens[first_full:after_full],
            target_tokens=self.target_tokens[first_full:after_full],
            empty=(after - first) - (after_full - first_full),
        )
