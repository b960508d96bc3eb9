"""From packs to the tensors that a rank computes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from dist_transformer.data.packing import Budgets
from dist_transformer.data.plan import Pack, Plan, Position, Step
from dist_transformer.data.tokenizer import BOS_ID, EOS_ID
from dist_transformer.packed import IGNORED, PackedBatch, describe_side


class Pairs(Protocol):
    """Sentence pairs by id: a split, or several corpora."""

    @property
    def longest(self) -> tuple[int, int]:
        """Tokens of the longest source and target, one special token each."""

    def sizes(self, pair_ids: np.ndarray) -> np.ndarray: ...

    def copy_tokens(self, pair_ids: np.ndarray, source: np.ndarray, target: np.ndarray, places: np.ndarray) -> None: ...

    def forget_past(self) -> None:
        """Let go of the shards that only windows before the one admitted last need."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """What a rank computes at once."""

    first_pack: int
    """Place in the step of the first pack: with seed, epoch and step it names every random choice."""
    batch: PackedBatch


class Stream:
    """Builds micro-batches. The rank's slice is taken last, so nothing before it knows the world."""

    def __init__(self, pairs: Pairs, budgets: Budgets, *, packs_per_micro_batch: int) -> None:
        self.pairs = pairs
        self.packs_per_micro_batch = packs_per_micro_batch
        self.sizes = budgets.tokens * packs_per_micro_batch
        self.caps = np.maximum(1, np.minimum(budgets.tokens, pairs.longest))
        """Tokens of the longest sentence on each side, dummies included."""
        dummies = int((-(-self.sizes // self.caps)).max())
        self.offset_count = 1 + budgets.max_sentences * packs_per_micro_batch + dummies

    def micro_batches(self, step: Step, *, rank: int, world_size: int) -> list[MicroBatch]:
        """This rank's share of a step: equally many on every rank, the last ones of weight zero where packs run out."""
        return self.micro_batches_of([step], rank=rank, world_size=world_size)[0]

    def micro_batches_of(self, steps: Sequence[Step], *, rank: int, world_size: int) -> list[list[MicroBatch]]:
        """The same for several steps, for less: what numpy costs a call is shared by all."""
        size = self.packs_per_micro_batch
        firsts = [
            [(turn * world_size + rank) * size for turn in range(-(-len(step.packs) // (size * world_size)))]
            for step in steps
        ]
        shares = [step.packs[i : i + size] for step, turns in zip(steps, firsts, strict=True) for i in turns]
        batches = iter(self.build_all(shares))
        return [[MicroBatch(first_pack=first, batch=next(batches)) for first in turns] for turns in firsts]

    def build(self, packs: Sequence[Pack | None]) -> PackedBatch:
        """Lay the pairs of the packs end to end."""
        return self.build_all([packs])[0]

    def build_all(self, shares: Sequence[Sequence[Pack | None]]) -> list[PackedBatch]:
        """The same for several micro-batches."""
        ids = [[pack.pair_ids for pack in packs if pack is not None] for packs in shares]
        pairs = np.concatenate([np.empty(0, dtype=np.int64), *(chosen for packs in ids for chosen in packs)])
        counts = np.array([sum(map(len, packs)) for packs in ids])
        stops = np.cumsum(counts)
        lengths = self.pairs.sizes(pairs)
        # Micro-batch i is row i of the buffers, and a place is one in the flat buffer.
        row = np.repeat(np.arange(len(shares)), counts)
        before = np.concatenate([np.zeros((1, 2), dtype=np.int64), np.cumsum(lengths, axis=0)])
        places = before[:-1] - before[stops - counts][row] + row[:, None] * self.sizes
        source = np.zeros((len(shares), self.sizes[0]), dtype=np.int64)
        labels = np.full((len(shares), self.sizes[1]), IGNORED, dtype=np.int64)
        self.pairs.copy_tokens(pairs, source.reshape(-1), labels.reshape(-1), places)
        ends = places + lengths - 1
        source.reshape(-1)[ends[:, 0]] = EOS_ID
        # Target in is target out one place later; what is no token is 0.
        target = np.zeros_like(labels)
        target[:, 1:] = np.maximum(labels[:, :-1], 0)
        target.reshape(-1)[places[:, 1]] = BOS_ID
        labels.reshape(-1)[ends[:, 1]] = EOS_ID
        return [
            self._batch(source[i], target[i], labels[i], lengths[stop - count : stop])
            for i, (stop, count) in enumerate(zip(stops, counts, strict=True))
        ]

    def _batch(self, source: np.ndarray, target: np.ndarray, labels: np.ndarray, lengths: np.ndarray) -> PackedBatch:
        source_side, target_side = (
            describe_side(tokens, lengths[:, side], offset_count=self.offset_count, max_length=int(self.caps[side]))
            for side, tokens in enumerate((source, target))
        )
        return PackedBatch(source=source_side, target=target_side, labels_T=torch.from_numpy(labels))


def epoch_steps(plan: Plan, *, packs_per_step: int) -> Iterator[Step]:
    """One pass over a split, always the same, for validation."""
    for step in plan.steps(Position(), packs_per_step):
        if step.epoch > 0:
            return
        yield step
