"""The plan: which sentence pairs make which pack, as a pure function of (lengths, seed, epoch, budgets).

An epoch takes the shards in random order, a window of them at a time; the pairs of a window are taken in random order
with a look-ahead that steers the ratio of source to target, so that both budgets of a pack fill together. Only lengths
are read, only one window is in memory, and a position inside an epoch is plain JSON from which planning goes on
without repeating what is past.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dist_transformer.config import BatchConfig
from dist_transformer.errors import UserError

# Pairs that the packer may choose from when it completes a pack; more than 99% of budgets of 4096 is then text.
LOOK_AHEAD = 64
# Share of the budgets that is filled in order, without choosing.
_BULK_SHARE = 0.93


@dataclass(frozen=True, kw_only=True, slots=True)
class Budgets:
    """What fits a pack; tokens include `<s>` and `</s>`."""

    max_source_tokens: int
    max_target_tokens: int
    max_sentences: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Pack:
    """Sentence pairs that fit the budgets."""

    pair_ids: np.ndarray
    source_tokens: int
    target_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """How far the plan is consumed; plain JSON through `to_json` and `from_json`."""

    epoch: int = 0
    window: int = 0
    packs_consumed: int = 0
    """Packs of this window that are past."""
    carry_over: tuple[int, ...] = ()
    """Pairs that the windows before left for this one, in order."""

    def to_json(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch, "window": self.window,
            "packs_consumed": self.packs_consumed, "carry_over": list(self.carry_over),
        }  # fmt: skip

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Position":
        return cls(**{**values, "carry_over": tuple(values["carry_over"])})


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """What one optimizer step trains on."""

    epoch: int
    packs: tuple[Pack | None, ...]
    """`packs_per_step` of them; None is a pack of weight zero, at the tail of an epoch."""
    position: Position
    """Where the plan stands after the step."""

    @property
    def source_tokens(self) -> int:
        return sum(pack.source_tokens for pack in self.packs if pack)

    @property
    def target_tokens(self) -> int:
        """What the step's summed gradient is divided by."""
        return sum(pack.target_tokens for pack in self.packs if pack)


def resolve_budgets(batch: BatchConfig, *, source_tokens: int, target_tokens: int) -> Budgets:
    """Budgets of a run, where the corpus' totals decide what the config leaves open."""
    max_source = batch.max_source_tokens
    if max_source is None:
        # A multiple of 16 keeps matrix shapes friendly.
        max_source = -(-batch.max_target_tokens * source_tokens // (16 * target_tokens)) * 16
    return Budgets(
        max_source_tokens=max_source,
        max_target_tokens=batch.max_target_tokens,
        max_sentences=batch.max_sentences or max(1, batch.max_target_tokens // 8),
    )


class Plan:
    """Packs and steps of a corpus.

    Args:
        lengths: (pairs, 2), source and target tokens of each pair; may be memory-mapped.
        shard_starts: first pair of each shard, and at the end the number of pairs.
    """

    def __init__(
        self, lengths: np.ndarray, shard_starts: np.ndarray, *, budgets: Budgets, window_shards: int, seed: int
    ) -> None:
        self.lengths, self.shard_starts = lengths, np.asarray(shard_starts)
        self.budgets, self.window_shards, self.seed = budgets, window_shards, seed
        self.shards = len(self.shard_starts) - 1
        self.windows = max(1, -(-self.shards // window_shards))
        self.skipped = self._count_unfit()
        if self.skipped == len(lengths):
            raise UserError(
                f"none of the {len(lengths)} pairs fits a pack of {budgets.max_source_tokens} source and "
                f"{budgets.max_target_tokens} target tokens: raise --batch.max-target-tokens, or prepare more data"
            )

    def steps(self, position: Position, packs_per_step: int) -> Iterator[Step]:
        """Endless steps from `position`, which must lie between steps."""
        start = position
        while True:
            packs: list[Pack] = []
            for pack, after in self._epoch(start):
                packs.append(pack)
                if len(packs) == packs_per_step:
                    yield Step(epoch=start.epoch, packs=tuple(packs), position=after)
                    packs = []
            next_epoch = Position(epoch=start.epoch + 1)
            if packs:
                tail = (None,) * (packs_per_step - len(packs))
                yield Step(epoch=start.epoch, packs=(*packs, *tail), position=next_epoch)
            start = next_epoch

    def _epoch(self, position: Position) -> Iterator[tuple[Pack, Position]]:
        """The packs of an epoch from `position` on, each with the position after it."""
        while position.window < self.windows:
            order = np.concatenate([np.array(position.carry_over, dtype=np.int64), self._window_pairs(position)])
            packer = _Packer(order, self.lengths, self.budgets, is_last=position.window == self.windows - 1)
            for number, pack in enumerate(packer):
                if number >= position.packs_consumed:
                    yield pack, replace(position, packs_consumed=number + 1)
            position = Position(epoch=position.epoch, window=position.window + 1, carry_over=packer.left_over())

    def _window_pairs(self, position: Position) -> np.ndarray:
        """Pairs of a window's shards, shuffled, without those that fit no pack."""
        shard_order = np.random.default_rng([self.seed, position.epoch]).permutation(self.shards)
        chosen = np.sort(shard_order[position.window * self.window_shards :][: self.window_shards])
        ranges = [np.arange(self.shard_starts[shard], self.shard_starts[shard + 1]) for shard in chosen]
        pairs = np.concatenate(ranges) if ranges else np.empty(0, dtype=np.int64)
        pairs = pairs[self._fits(self.lengths[pairs])]
        return np.random.default_rng([self.seed, position.epoch, position.window]).permutation(pairs)

    def _fits(self, lengths: np.ndarray) -> np.ndarray:
        return (lengths[:, 0] <= self.budgets.max_source_tokens) & (lengths[:, 1] <= self.budgets.max_target_tokens)

    def _count_unfit(self) -> int:
        chunk = 2**20
        starts = range(0, len(self.lengths), chunk)
        return sum(int((~self._fits(self.lengths[start : start + chunk])).sum()) for start in starts)


class _Packer:
    """Iterates over the packs of one window; afterwards `left_over` is what waits for the next window."""

    def __init__(self, order: np.ndarray, lengths: np.ndarray, budgets: Budgets, *, is_last: bool) -> None:
        self.queue = order
        self.sizes = np.asarray(lengths[order], dtype=np.int64).reshape(-1, 2)
        self.limits = np.array([budgets.max_source_tokens, budgets.max_target_tokens])
        self.max_sentences = budgets.max_sentences
        self.is_last = is_last
        self.head = 0

    def __iter__(self) -> Iterator[Pack]:
        while self.head < len(self.queue):
            rows, next_head = self._choose()
            if next_head + LOOK_AHEAD > len(self.queue) and not self.is_last:
                # Too few pairs are left to choose from: the next window completes this pack.
                return
            yield self._take(rows, next_head)

    def left_over(self) -> tuple[int, ...]:
        return tuple(int(pair) for pair in self.queue[self.head :])

    def _choose(self) -> tuple[np.ndarray, int]:
        """Rows of the queue that make the next pack, and the first row beyond the look-ahead that completed it."""
        sizes = self.sizes[self.head : self.head + self.max_sentences]
        sums = np.cumsum(sizes, axis=0)
        # The first pair always goes in: a pair as long as the budget is a pack of its own, and none waits forever.
        bulk = max(1, int((sums <= self.limits * _BULK_SHARE).all(axis=1).sum()))
        room = self.limits - sums[bulk - 1]
        rows = list(range(self.head, self.head + bulk))
        end = self.head + bulk
        pool = list(range(end, min(end + LOOK_AHEAD, len(self.queue))))
        end += len(pool)
        while pool and len(rows) < self.max_sentences:
            best = self._best(np.array(pool), room)
            if best is None:
                break
            row = pool.pop(best)
            room = room - self.sizes[row]
            rows.append(row)
            if end < len(self.queue):
                pool.append(end)
                end += 1
        return np.array(rows), end

    def _best(self, pool: np.ndarray, room: np.ndarray) -> int | None:
        """The pair that leaves both budgets equally full: index into `pool`, or None when none fits."""
        left = room - self.sizes[pool]
        fits = (left >= 0).all(axis=1)
        if not fits.any():
            return None
        share = left / self.limits
        imbalance = np.where(fits, np.abs(share[:, 0] - share[:, 1]), np.inf)
        return int(imbalance.argmin())

    def _take(self, rows: np.ndarray, end: int) -> Pack:
        """Remove `rows` from the queue; passed-over rows move up to its new head, in order."""
        pack = Pack(
            pair_ids=self.queue[rows],
            source_tokens=int(self.sizes[rows, 0].sum()),
            target_tokens=int(self.sizes[rows, 1].sum()),
        )
        passed_over = np.setdiff1d(np.arange(self.head, end), rows, assume_unique=True)
        new_head = end - len(passed_over)
        self.queue[new_head:end] = self.queue[passed_over]
        self.sizes[new_head:end] = self.sizes[passed_over]
        self.head = new_head
        return pack
