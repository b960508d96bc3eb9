"""The plan: which sentence pairs form which pack, as a pure function of (lengths, seed, epoch, budgets).

An epoch takes the shards in random order, a window of them at a time. The pairs of a window are shuffled and packed.
Planning reads only lengths and keeps one window in memory. A position inside an epoch is plain JSON, from which
planning continues without repeating earlier windows.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from dist_transformer.base.errors import UserError
from dist_transformer.config.settings import BatchConfig
from dist_transformer.data.loading.packing import Budgets, EpochSummary, Events, LeftOut, Packs, Totals, pack_queue

# Incremented when the same lengths, seed and budgets give other packs: positions of another rule are not valid.
RULE = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """Progress in the plan; plain JSON through `to_json` and `from_json`."""

    epoch: int = 0
    window: int = 0
    packs_consumed: int = 0
    """Packs of this window that were consumed."""
    carry_over: tuple[int, ...] = ()
    """Pairs that earlier windows left for this one, in order."""
    left_out: tuple[tuple[int, int], ...] = ()
    """Shards that the rest of this window lacks, each with the number of the window's packs before it went missing."""
    totals: Totals | None = field(default=Totals(), compare=False)
    """Totals of this epoch; None if it was started by a version that did not count."""

    def to_json(self) -> dict[str, Any]:
        return {"rule": RULE, **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Position":
        """Read a position.

        Raises:
            UserError: the position was written by a version whose plan differs.
        """
        values = {"totals": None, **values}
        if values.pop("rule", 1) != RULE:
            raise UserError(
                "the checkpoint's position in the data is from a version that packs sentences in another order: "
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
    """A group of shards that are planned at once."""

    corpus: int
    """Index of the corpus in the run."""
    epoch: int
    number: int
    packs_consumed: int
    """Packs that were consumed already; above 0 if planning continues inside the window."""
    shards: tuple[int, ...]
    """Shards that hold the window's pairs, including pairs carried over from earlier windows."""
    following: tuple[int, ...]
    """Shards of the next window."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """The data of one optimizer step."""

    epoch: int
    packs: Packs
    """`packs_per_step` packs; at the end of an epoch, some may have weight zero."""
    position: Any
    """Position in the plan after the step: a `Position`, or that of a mixture."""
    left_out: tuple[LeftOut, ...] = ()
    """Shards that the plan lacks from this step on, in the window that each entry names."""
    ended: tuple[EpochSummary, ...] = ()
    """Epochs whose last pack is in this step."""

    @property
    def source_tokens(self) -> int:
        return int(self.packs.source_tokens.sum())

    @property
    def target_tokens(self) -> int:
        """Divisor of the step's summed gradient."""
        return int(self.packs.target_tokens.sum())


Admit = Callable[[Window], Mapping[int, int]]
"""Returns the shards of a window that must be left out, each with the number of the window's packs before that."""


def resolve_budgets(batch: BatchConfig, *, source_tokens: int, target_tokens: int) -> Budgets:
    """Return the budgets of a run; the corpus' totals decide what the config leaves open."""
    max_source = batch.max_source_tokens
    if max_source is None:
        max_source = -(-batch.max_target_tokens * source_tokens // target_tokens)
    return Budgets(
        max_source_tokens=max_source,
        max_target_tokens=batch.max_target_tokens,
        max_sentences=batch.max_sentences or max(1, batch.max_target_tokens // 8),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedWindow:
    """A window's packs, and what is carried over to the next one."""

    packs: Packs
    left: tuple[int, ...]
    left_out: Mapping[int, int]
    """Missing shards, each with the number of the window's packs before it went missing."""
    unsaid: tuple[LeftOut, ...]
    """Missing shards that no step has reported yet."""
    is_last: bool
    """Whether the epoch ends with this window."""


class Plan:
    """Packs and steps of a corpus.

    Args:
        lengths: (pairs, 2), source and target tokens of each pair; may be memory-mapped.
        shard_starts: first pair of each shard, followed by the number of pairs.
        admit: called before a window is planned or planning continues in it.
        corpus: index of this corpus in the run.
        first_id: offset of all pair ids, for a corpus that is one of several.
        skipped: number of pairs that fit no pack in one of their segmentations, if they were counted already.
        segmentations: segmentations of each pair, one after the other in `lengths`. Epoch e takes number e modulo this.
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
        skipped: int | None = None,
        segmentations: int = 1,
    ) -> None:
        self.lengths, self.shard_starts = lengths, np.asarray(shard_starts)
        self.budgets, self.window_shards, self.seed = budgets, window_shards, seed
        self.admit, self.corpus, self.first_id = admit, corpus, first_id
        self.segmentations = segmentations
        self.pairs, self.shards = (count // segmentations for count in (len(lengths), len(self.shard_starts) - 1))
        self.windows = max(1, -(-self.shards // window_shards))
        self.skipped = self._count_unfit() if skipped is None else skipped
        if self.skipped == self.pairs:
            raise UserError(
                f"none of the {self.pairs} pairs fits a pack of {budgets.max_source_tokens} source and "
                f"{budgets.max_target_tokens} target tokens: raise --batch.max-target-tokens, or prepare more data"
            )

    def start(self) -> Position:
        return Position()

    def steps(self, position: Position, packs_per_step: int) -> Iterator[Step]:
        """Yield steps without end from `position`, which must be between steps."""
        events = Events()
        course = Course(self, position, events)
        while True:
            epoch = course.position.epoch
            packs = course.take(packs_per_step)
            if len(packs):
                packs = Packs.join([packs], empty=packs_per_step - len(packs))
                yield Step(epoch=epoch, packs=packs, position=course.position, **events.take())

    def window(self, position: Position) -> "PlannedWindow":
        """Plan the window that contains `position`."""
        window = self._window(position)
        known = dict(position.left_out)
        left_out = {**self.admit(window), **known}
        order, sizes = self._order(position, left_out)
        is_last = position.window == self.windows - 1
        packs, left = self._packs(order, sizes, left_out, is_last=is_last)
        return PlannedWindow(
            packs=replace(packs, pair_ids=order.take(packs.pair_ids) + self.first_id),
            left=tuple(order[left].tolist()),
            left_out=left_out,
            unsaid=tuple(
                LeftOut(shard=shard, packs=packs, corpus=self.corpus, epoch=position.epoch, window=position.window)
                for shard, packs in sorted(left_out.items())
                if shard not in known
            ),
            is_last=is_last,
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
        """Return the shards of a window, sorted."""
        shard_order = np.random.default_rng([self.seed, epoch]).permutation(self.shards)
        chosen = np.sort(shard_order[window * self.window_shards :][: self.window_shards])
        return (chosen + epoch % self.segmentations * self.shards).tolist()

    def _shards_of(self, pairs: np.ndarray) -> np.ndarray:
        return np.searchsorted(self.shard_starts, pairs, side="right") - 1

    def _order(self, position: Position, left_out: Mapping[int, int]) -> tuple[np.ndarray, np.ndarray]:
        """Return the queue of a window and its sizes: carried-over pairs, then those of its shards in random order."""
        chosen = [shard for shard in self._shards(position.epoch, position.window) if left_out.get(shard) != 0]
        spans = [slice(*self.shard_starts[shard : shard + 2]) for shard in chosen]
        carried = np.array(position.carry_over, dtype=np.int64)
        pairs = np.concatenate([carried[:0], *(np.arange(span.start, span.stop) for span in spans)])
        if self.skipped:
            pairs = pairs[self._fit(pairs)]
        np.random.default_rng([self.seed, position.epoch, position.window]).shuffle(pairs)
        order = np.concatenate([carried, pairs])
        return order, self.lengths.take(order, axis=0)

    def _packs(
        self, order: np.ndarray, sizes: np.ndarray, left_out: Mapping[int, int], *, is_last: bool
    ) -> tuple[Packs, np.ndarray]:
        """Pack the queue as `pack_queue` does; when a shard drops out, pack the rest again."""
        packs, left = pack_queue(sizes, self.budgets, is_last=is_last)
        if not left_out:
            return packs, left
        packs, shards = packs[:0], self._shards_of(order)
        for past in sorted({0, *left_out.values()}):
            packs = packs[:past]
            waiting = ~np.isin(shards, [shard for shard, after in left_out.items() if after <= past])
            waiting[packs.pair_ids] = False
            queue = np.flatnonzero(waiting)
            more, left = pack_queue(sizes[queue], self.budgets, is_last=is_last)
            packs, left = Packs.join([packs, replace(more, pair_ids=queue[more.pair_ids])]), queue[left]
        return packs, left

    def summary(self, position: Position) -> list[EpochSummary]:
        """Summarize the epoch that ends at `position`, if all of it was counted."""
        totals = position.totals
        if totals is None:
            return []
        if totals.packs == 0:
            raise UserError(
                f"epoch {position.epoch + 1} has no sentence pair, because every shard of data folder "
                f"{self.corpus + 1} was left out: fix the folder, and start the same command again"
            )
        fitting = self.pairs - self.skipped
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

    def _fit(self, pairs: np.ndarray) -> np.ndarray:
        """Return whether pairs fit a pack in all their segmentations, so that every epoch has the same pairs."""
        fit = np.ones(len(pairs), dtype=bool)
        for segmentation in range(self.segmentations):
            lengths = self.lengths.take(pairs % self.pairs + segmentation * self.pairs, axis=0)
            fit &= (lengths <= self.budgets.tokens).all(axis=1)
        return fit

    def _count_unfit(self) -> int:
        chunk = 2**20
        starts = range(0, self.pairs, chunk)
        return sum(int((~self._fit(np.arange(start, min(start + chunk, self.pairs)))).sum()) for start in starts)


class Course:
    """The packs of a corpus from a position on, over windows and epochs, and the position after the packs taken."""

    def __init__(self, plan: Plan, position: Position, events: Events) -> None:
        self.plan, self.position, self.events = plan, position, events
        self._window: PlannedWindow | None = None
        self._unsaid: list[LeftOut] = []

    def take(self, count: int) -> Packs:
        """Take the next `count` packs of this epoch; fewer at its end, where the position moves to the next epoch.

        Raises:
            UserError: no shard of the corpus can be read.
        """
        epoch, parts = self.position.epoch, []
        while count and self.position.epoch == epoch:
            upcoming = self._upcoming(count)
            if len(upcoming):
                self._pass(upcoming)
                parts.append(upcoming)
                count -= len(upcoming)
            else:
                self._next_window()
        return Packs.join(parts)

    def target_tokens(self, most: int) -> list[int]:
        """Look ahead: return target tokens of the next packs of one window, at least one and at most `most`."""
        while not len(upcoming := self._upcoming(most)):
            self._next_window()
        found: list[int] = upcoming.target_tokens.tolist()
        return found

    def _upcoming(self, most: int) -> Packs:
        """Return the next packs of this window."""
        if self._window is None:
            self._window = self.plan.window(self.position)
            self._unsaid = list(self._window.unsaid)
        first = self.position.packs_consumed
        return self._window.packs[first : first + most]

    def _pass(self, packs: Packs) -> None:
        window, position = self._window, self.position
        assert window is not None
        after = position.packs_consumed + len(packs)
        self._say(after - 1)
        self.position = replace(
            position,
            packs_consumed=after,
            left_out=tuple(sorted(entry for entry in window.left_out.items() if entry[1] < after)),
            totals=position.totals and position.totals.plus(packs),
        )
        # If a shard with more packs went bad at this point, the run did not know yet that the epoch ends here.
        if window.is_last and after == len(window.packs) and after not in window.left_out.values():
            self._end_epoch()

    def _next_window(self) -> None:
        window, position = self._window, self.position
        assert window is not None
        self._say(len(window.packs))
        if window.is_last:
            # Neither its shards nor those of the carried-over pairs could be read.
            self._end_epoch()
            return
        self._window = None
        self.position = Position(
            epoch=position.epoch, window=position.window + 1, carry_over=window.left, totals=position.totals
        )

    def _end_epoch(self) -> None:
        self.events.ended += self.plan.summary(self.position)
        self._window = None
        self.position = Position(epoch=self.position.epoch + 1)

    def _say(self, packs: int) -> None:
        """Report the shards that are missing after this many packs of the window, each once."""
        due = [shard for shard in self._unsaid if shard.packs <= packs]
        self.events.left_out += sorted(due, key=lambda shard: max(shard.packs, self.position.packs_consumed))
        self._unsaid = [shard for shard in self._unsaid if shard.packs > packs]
