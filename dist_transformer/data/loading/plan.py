"""The plan: which sentence pairs make which pack, as a pure function of (lengths, seed, epoch, budgets).

An epoch takes the shards in random order, a window of them at a time; the pairs of a window are shuffled and packed.
Only lengths are read, only one window is in memory, and a position inside an epoch is plain JSON from which planning
goes on without repeating the windows that are past.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from dist_transformer.config.settings import BatchConfig
from dist_transformer.data.loading.events import EpochSummary, Events, LeftOut, Totals
from dist_transformer.data.loading.packing import Budgets, pack_queue
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
    left_out: tuple[tuple[int, int], ...] = ()
    """Shards that this window goes on without, each with the packs of the window that came before that."""
    totals: Totals | None = field(default=Totals(), compare=False)
    """Of this epoch; None when the version that began it did not count."""

    def to_json(self) -> dict[str, Any]:
        lists = {"carry_over": list(self.carry_over), "left_out": [list(entry) for entry in self.left_out]}
        return {"rule": RULE, **dataclasses.asdict(self), **lists}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Position":
        """
        Raises:
            UserError: the position was written by a version whose plan differs.
        """
        values = {"totals": None, **values}
        if values.pop("rule", 1) != RULE:
            raise UserError(
                "the checkpoint's place in the data was written by a version that packs sentences in another order: "
                "finish the run with that version, or start a new one"
            )
        left_out = tuple((shard, packs) for shard, packs in values.pop("left_out"))
        totals = values.pop("totals")
        return cls(
            **{**values, "carry_over": tuple(values["carry_over"])},
            left_out=left_out,
            totals=totals and Totals(**totals),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """What is planned at once."""

    corpus: int
    """Its place among those of the run."""
    epoch: int
    number: int
    packs_consumed: int
    """Above 0 when the plan goes on inside the window."""
    shards: tuple[int, ...]
    """That hold its pairs, those carried over from earlier windows among them."""
    following: tuple[int, ...]
    """Of the next window."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """What one optimizer step trains on."""

    epoch: int
    packs: tuple[Pack | None, ...]
    """`packs_per_step` of them; None is a pack of weight zero, at the tail of an epoch."""
    position: Any
    """Where the plan stands after the step: a `Position`, or that of a mixture."""
    left_out: tuple[LeftOut, ...] = ()
    """Shards that the plan misses from this step on, in the window that is said."""
    ended: tuple[EpochSummary, ...] = ()
    """Epochs whose last pack is in this step."""

    @property
    def source_tokens(self) -> int:
        return sum(pack.source_tokens for pack in self.packs if pack)

    @property
    def target_tokens(self) -> int:
        """What the step's summed gradient is divided by."""
        return sum(pack.target_tokens for pack in self.packs if pack)


Admit = Callable[[Window], Mapping[int, int]]
"""Gives the shards of a window that must be left out, each with the packs of the window that come before that."""


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
        admit: called before a window is planned, or planned on.
        corpus: place of this corpus among those of the run.
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
        admit: Admit = lambda _: {},
        corpus: int = 0,
        first_id: int = 0,
    ) -> None:
        self.lengths, self.shard_starts = lengths, np.asarray(shard_starts)
        self.budgets, self.window_shards, self.seed = budgets, window_shards, seed
        self.admit, self.corpus, self.first_id = admit, corpus, first_id
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
        start, events = position, Events()
        while True:
            packs: list[Pack] = []
            for pack, after in self.epoch(start, events):
                packs.append(pack)
                if len(packs) == packs_per_step:
                    yield Step(epoch=start.epoch, packs=tuple(packs), position=after, **events.take())
                    packs = []
            next_epoch = Position(epoch=start.epoch + 1)
            if packs:
                tail = (None,) * (packs_per_step - len(packs))
                yield Step(epoch=start.epoch, packs=(*packs, *tail), position=next_epoch, **events.take())
            start = next_epoch

    def epoch(self, position: Position, events: Events) -> Iterator[tuple[Pack, Position]]:
        """The packs of an epoch from `position` on, each with the position after it.

        Raises:
            UserError: no shard of the corpus can be read.
        """
        while position.window < self.windows:
            window = self._window(position)
            known = dict(position.left_out)
            left_out = {**self.admit(window), **known}
            unsaid = {shard: packs for shard, packs in left_out.items() if shard not in known}
            order = self._order(position, left_out)
            sizes = np.asarray(self.lengths[order], dtype=np.int64)
            is_last = position.window == self.windows - 1
            packs, left = self._packs(order, sizes, left_out, is_last=is_last)
            for number in range(position.packs_consumed, len(packs)):
                events.left_out += self._say(unsaid, window, packs=number)
                rows = packs[number]
                source, target = sizes[rows].sum(axis=0).tolist()
                pack = Pack(pair_ids=self.first_id + order[rows], source_tokens=source, target_tokens=target)
                position = replace(
                    position,
                    packs_consumed=number + 1,
                    left_out=tuple(sorted(entry for entry in left_out.items() if entry[1] <= number)),
                    totals=position.totals
                    and position.totals.plus_pack(pairs=len(rows), source_tokens=source, target_tokens=target),
                )
                # Where a shard then went bad that had more packs, the run did not know yet that the epoch ends here.
                if is_last and number + 1 == len(packs) and number + 1 not in left_out.values():
                    events.ended += self._summary(position)
                    position = Position(epoch=position.epoch + 1)
                yield pack, position
            if position.epoch > window.epoch:
                return
            events.left_out += self._say(unsaid, window, packs=len(packs))
            if is_last:
                # Its shards and those of the pairs that were left for it could not be read.
                events.ended += self._summary(position)
            carry_over = tuple(order[left].tolist())
            position = Position(
                epoch=position.epoch, window=position.window + 1, carry_over=carry_over, totals=position.totals
            )

    def _window(self, position: Position) -> Window:
        chosen = self._shards(position.epoch, position.window)
        is_last = position.window == self.windows - 1
        following = self._shards(position.epoch + is_last, 0 if is_last else position.window + 1)
        carried = self._shards_of(np.array(position.carry_over, dtype=np.int64))
        return Window(
            corpus=self.corpus,
            epoch=position.epoch,
            number=position.window,
            packs_consumed=position.packs_consumed,
            shards=tuple(sorted({*chosen, *carried.tolist()})),
            following=tuple(following),
        )

    def _shards(self, epoch: int, window: int) -> list[int]:
        """Those whose turn it is, in order."""
        shard_order = np.random.default_rng([self.seed, epoch]).permutation(self.shards)
        return np.sort(shard_order[window * self.window_shards :][: self.window_shards]).tolist()

    def _shards_of(self, pairs: np.ndarray) -> np.ndarray:
        return np.searchsorted(self.shard_starts, pairs, side="right") - 1

    def _order(self, position: Position, left_out: Mapping[int, int]) -> np.ndarray:
        """The queue of a window: pairs that were carried over, then those of its shards in random order."""
        chosen = self._shards(position.epoch, position.window)
        ranges = [np.arange(*self.shard_starts[shard : shard + 2]) for shard in chosen if left_out.get(shard) != 0]
        pairs = np.concatenate(ranges) if ranges else np.empty(0, dtype=np.int64)
        pairs = pairs[self._fits(self.lengths[pairs])]
        pairs = np.random.default_rng([self.seed, position.epoch, position.window]).permutation(pairs)
        return np.concatenate([np.array(position.carry_over, dtype=np.int64), pairs])

    def _packs(
        self, order: np.ndarray, sizes: np.ndarray, left_out: Mapping[int, int], *, is_last: bool
    ) -> tuple[list[np.ndarray], np.ndarray]:
        """Rows of the queue: its packs, and what is left. Where a shard drops out, the rest is packed anew."""
        packs: list[np.ndarray] = []
        left, shards = np.arange(0), self._shards_of(order) if left_out else None
        for past in sorted({0, *left_out.values()}):
            packs = packs[:past]
            waiting = np.ones(len(order), dtype=bool)
            if packs:
                waiting[np.concatenate(packs)] = False
            if shards is not None:
                waiting &= ~np.isin(shards, [shard for shard, after in left_out.items() if after <= past])
            rows = np.flatnonzero(waiting)
            found, left = pack_queue(sizes[rows], self.budgets, is_last=is_last)
            packs, left = [*packs, *(rows[pack] for pack in found)], rows[left]
        return packs, left

    @staticmethod
    def _say(unsaid: dict[int, int], window: Window, *, packs: int) -> list[LeftOut]:
        """The shards that are missing after so many packs, each said once."""
        due = sorted(shard for shard, after in unsaid.items() if after <= packs)
        place = {"corpus": window.corpus, "epoch": window.epoch, "window": window.number}
        return [LeftOut(shard=shard, packs=unsaid.pop(shard), **place) for shard in due]

    def _summary(self, position: Position) -> list[EpochSummary]:
        """Of the epoch that ends here, when all of it was counted."""
        totals = position.totals
        if totals is None:
            return []
        if totals.packs == 0:
            raise UserError(
                f"epoch {position.epoch + 1} has no sentence pair, for every shard of data folder {self.corpus + 1} "
                "was left out: mend the folder, and start the same command again"
            )
        fitting = len(self.lengths) - self.skipped
        return [
            EpochSummary(
                corpus=self.corpus,
                epoch=position.epoch,
                budgets=self.budgets,
                totals=totals,
                unfit_pairs=self.skipped,
                left_out_pairs=fitting - totals.pairs,
            )
        ]

    def _fits(self, lengths: np.ndarray) -> np.ndarray:
        return (lengths[:, 0] <= self.budgets.max_source_tokens) & (lengths[:, 1] <= self.budgets.max_target_tokens)

    def _count_unfit(self) -> int:
        chunk = 2**20
        starts = range(0, len(self.lengths), chunk)
        return sum(int((~self._fits(self.lengths[start : start + chunk])).sum()) for start in starts)
