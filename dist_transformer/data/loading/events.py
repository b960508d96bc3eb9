"""Events during planning, besides packs: shards that are left out, and epochs that end."""

from dataclasses import dataclass, field
from typing import Any

from dist_transformer.data.loading.packing import Budgets
from dist_transformer.data.loading.packs import Packs


@dataclass(frozen=True, kw_only=True, slots=True)
class Totals:
    """Totals of an epoch so far."""

    packs: int = 0
    pairs: int = 0
    source_tokens: int = 0
    target_tokens: int = 0

    def plus(self, packs: Packs) -> "Totals":
        return Totals(
            packs=self.packs + len(packs),
            pairs=self.pairs + len(packs.pair_ids),
            source_tokens=self.source_tokens + int(packs.source_tokens.sum()),
            target_tokens=self.target_tokens + int(packs.target_tokens.sum()),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftOut:
    """A shard that could not be read, whose pairs a window of an epoch misses."""

    corpus: int
    shard: int
    epoch: int
    window: int
    packs: int
    """Packs of the window before the shard went missing; 0 if the window lacks it from its start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochSummary:
    """Figures of an epoch of a corpus that has ended."""

    corpus: int
    epoch: int
    budgets: Budgets
    totals: Totals
    unfit_pairs: int
    """Pairs that are too long for any pack and are never trained on."""
    left_out_pairs: int
    """Pairs of shards that could not be read."""

    @property
    def source_fill(self) -> float:
        """Share of the source budgets that text fills."""
        return self.totals.source_tokens / (self.totals.packs * self.budgets.max_source_tokens)

    @property
    def target_fill(self) -> float:
        return self.totals.target_tokens / (self.totals.packs * self.budgets.max_target_tokens)

    @property
    def fill(self) -> float:
        """Share of both budgets together that text fills."""
        room = self.budgets.max_source_tokens + self.budgets.max_target_tokens
        return (self.totals.source_tokens + self.totals.target_tokens) / (self.totals.packs * room)


@dataclass(slots=True)
class Events:
    """Events while packs were drawn, until a step reports them."""

    left_out: list[LeftOut] = field(default_factory=list)
    ended: list[EpochSummary] = field(default_factory=list)

    def take(self) -> dict[str, Any]:
        """Return the events as fields of the current step, and clear them."""
        taken = {"left_out": tuple(self.left_out), "ended": tuple(self.ended)}
        self.left_out.clear()
        self.ended.clear()
        return taken
