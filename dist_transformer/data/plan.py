"""The plan: which sentence pairs make which pack, as a pure function of (lengths, seed, epoch, budgets).

An epoch takes the shards in random order, a window of them at a time; the pairs of a window are shuffled and packed.
Only lengths are read, only one window is in memory, and a position inside an epoch is plain JSON from which planning
goes on without repeating the windows that are past.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dist_transformer.config import BatchConfig
from dist_transformer.data.packing import Budgets, pack_queue
from dist_transformer.errors import UserError

# Goes up when the same lengths, seed and budgets give other packs: a position means nothing to another rule.
RULE = 2


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
    left_out: tuple[int, ...] = ()
    """Shards of this window that could not be read when it was planned."""

    def to_json(self) -> dict[str, Any]:
        lists = {"carry_over": list(self.carry_over), "left_out": list(self.left_out)}
        return {"rule": RULE, **dataclasses.asdict(self), **lists}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Position":
        """
        Raises:
            UserError: the position was written by a version whose plan differs.
        """
        values = dict(values)
        if values.pop("rule", 1) != RULE:
            raise UserError(
                "the checkpoint's place in the data was written by a version that packs sentences in another order: "
                "finish the run with that version, or start a new one"
            )
        return cls(**{**values, **{name: tuple(values[name]) for name in ("carry_over", "left_out")}})


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """What one optimizer step trains on."""

    epoch: int
    packs: tuple[Pack | None, ...]
    """`packs_per_step` of them; None is a pack of weight zero, at the tail of an epoch."""
    position: Any
    """Where the plan stands after the step: a `Position`, or that of a mixture."""

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
        admit: called before a window is planned with its shards and those of the next one; gives those of its shards
            that must be left out.
        first_id: added to the ids of all pairs: their place among several corpora.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        shard_starts: np.ndarray,
        *,
        budgets: Budgets,
        window_shards: int,
        seed: int,
        admit: Callable[[Sequence[int], Sequence[int]], Collection[int]] = lambda *_: (),
        first_id: int = 0,
    ) -> None:
        self.lengths, self.shard_starts = lengths, np.asarray(shard_starts)
        self.budgets, self.window_shards, self.seed = budgets, window_shards, seed
        self.admit, self.first_id = admit, first_id
        self.shards = len(self.shard_starts) - 1
        self.windows = max(1, -(-self.shards // window_shards))
        self.skipped = self._count_unfit()
        if self.skipped == len(lengths):
            raise UserError(
                f"none of the {len(lengths)} pairs fits a pack of {budgets.max_source_tokens} source and "
                f"{budgets.max_target_tokens} target tokens: raise --batch.max-target-tokens, or prepare more data"
            )

    def start(self) -> Position:
        return Position()

    def steps(self, position: Position, packs_per_step: int) -> Iterator[Step]:
        """Endless steps from `position`, which must lie between steps."""
        start = position
        while True:
            packs: list[Pack] = []
            for pack, after in self.epoch(start):
                packs.append(pack)
                if len(packs) == packs_per_step:
                    yield Step(epoch=start.epoch, packs=tuple(packs), position=after)
                    packs = []
            next_epoch = Position(epoch=start.epoch + 1)
            if packs:
                tail = (None,) * (packs_per_step - len(packs))
                yield Step(epoch=start.epoch, packs=(*packs, *tail), position=next_epoch)
            start = next_epoch

    def epoch(self, position: Position) -> Iterator[tuple[Pack, Position]]:
        """The packs of an epoch from `position` on, each with the position after it."""
        while position.window < self.windows:
            chosen = self._window(position.epoch, position.window)
            is_last = position.window == self.windows - 1
            following = self._window(position.epoch + is_last, 0 if is_last else position.window + 1)
            left_out = {*position.left_out, *self.admit(chosen, following)}
            if position.packs_consumed and left_out != set(position.left_out):
                raise UserError(
                    "a shard of which the run has used a part can no longer be read: mend it, for what follows in its "
                    "window depends on it"
                )
            order = self._shuffled([shard for shard in chosen if shard not in left_out], position)
            order = np.concatenate([np.array(position.carry_over, dtype=np.int64), order])
            sizes = np.asarray(self.lengths[order], dtype=np.int64)
            packs, left = pack_queue(sizes, self.budgets, is_last=is_last)
            position = replace(position, left_out=tuple(sorted(left_out)))
            for number in range(position.packs_consumed, len(packs)):
                rows = packs[number]
                source, target = sizes[rows].sum(axis=0).tolist()
                pack = Pack(pair_ids=self.first_id + order[rows], source_tokens=source, target_tokens=target)
                yield pack, replace(position, packs_consumed=number + 1)
            carry_over = tuple(order[left].tolist())
            position = Position(epoch=position.epoch, window=position.window + 1, carry_over=carry_over)

    def _window(self, epoch: int, window: int) -> list[int]:
        """Its shards, in order."""
        shard_order = np.random.default_rng([self.seed, epoch]).permutation(self.shards)
        return np.sort(shard_order[window * self.window_shards :][: self.window_shards]).tolist()

    def _shuffled(self, shards: Sequence[int], position: Position) -> np.ndarray:
        """The pairs of the given shards in random order, without those that fit no pack."""
        ranges = [np.arange(self.shard_starts[shard], self.shard_starts[shard + 1]) for shard in shards]
        pairs = np.concatenate(ranges) if ranges else np.empty(0, dtype=np.int64)
        pairs = pairs[self._fits(self.lengths[pairs])]
        return np.random.default_rng([self.seed, position.epoch, position.window]).permutation(pairs)

    def _fits(self, lengths: np.ndarray) -> np.ndarray:
        return (lengths[:, 0] <= self.budgets.max_source_tokens) & (lengths[:, 1] <= self.budgets.max_target_tokens)

    def _count_unfit(self) -> int:
        chunk = 2**20
        starts = range(0, len(self.lengths), chunk)
        return sum(int((~self._fits(self.lengths[start : start + chunk])).sum()) for start in starts)
