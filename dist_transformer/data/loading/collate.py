"""Build the tensors that a rank computes from packs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from dist_transformer.data.loading.packing import Budgets
from dist_transformer.data.loading.packs import Packs
from dist_transformer.data.loading.plan import Plan, Position, Step
from dist_transformer.data.tokenizer import BOS_ID, EOS_ID
from dist_transformer.packed import IGNORED, PackedBatch, lay_out


class Pairs(Protocol):
    """Sentence pairs by id: a split, or several corpora."""

    @property
    def longest(self) -> tuple[int, int]:
        """Tokens of the longest source and target, each with one special token."""

    def sizes(self, pair_ids: np.ndarray) -> np.ndarray:
        """Return source and target tokens of the given pairs, each with one special token; shape (2, pairs), int64."""

    def copy_tokens(self, pair_ids: np.ndarray, source: np.ndarray, target: np.ndarray, places: np.ndarray) -> None:
        """Write the ids of the given pairs, without special tokens, to two buffers.

        Args:
            places: (2, pairs), where each pair starts in `source` and in `target`.
        """

    def forget_past(self) -> None:
        """Release the shards that only windows before the last admitted one need."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """The packs that a rank computes at once."""

    first_pack: int
    """Index in the step of the first pack. With seed, epoch and step it determines every random choice."""
    batch: PackedBatch


class Collator:
    """Build micro-batches. The rank's slice is taken last, so nothing before it depends on the world size."""

    def __init__(self, pairs: Pairs, budgets: Budgets, *, packs_per_micro_batch: int) -> None:
        self.pairs = pairs
        self.packs_per_micro_batch = packs_per_micro_batch
        # A multiple of 8 gives matrix shapes that are fast.
        self.sizes = -(-budgets.tokens * packs_per_micro_batch // 8) * 8
        self.caps = np.maximum(1, np.minimum(budgets.tokens, pairs.longest))
        """Tokens of the longest sentence on each side, dummies included."""
        dummies = int((-(-self.sizes // self.caps)).max())
        self.offset_count = 1 + budgets.max_sentences * packs_per_micro_batch + dummies

    def micro_batches(self, step: Step, *, rank: int, world_size: int) -> list[MicroBatch]:
        """Return this rank's share of a step. All ranks get equally many; the last may have weight zero."""
        return self.micro_batches_of([step], rank=rank, world_size=world_size)[0]

    def micro_batches_of(self, steps: Sequence[Step], *, rank: int, world_size: int) -> list[list[MicroBatch]]:
        """Return the shares of several steps at once, which is faster because they share numpy's cost per call."""
        size = self.packs_per_micro_batch
        firsts = [
            [(turn * world_size + rank) * size for turn in range(-(-len(step.packs) // (size * world_size)))]
            for step in steps
        ]
        shares = [step.packs[i : i + size] for step, turns in zip(steps, firsts, strict=True) for i in turns]
        batches = iter(self.build_all(shares))
        return [[MicroBatch(first_pack=first, batch=next(batches)) for first in turns] for turns in firsts]

    def build(self, packs: Packs) -> PackedBatch:
        """Lay the pairs of the packs end to end."""
        return self.build_all([packs])[0]

    def build_all(self, shares: Sequence[Packs]) -> list[PackedBatch]:
        """Lay out the pairs of several micro-batches at once."""
        pairs = np.concatenate([packs.pair_ids for packs in shares])
        counts = np.array([len(packs.pair_ids) for packs in shares])
        lengths = self.pairs.sizes(pairs)
        layouts = [
            lay_out(lengths[side], counts, size=size, offset_count=self.offset_count, max_length=cap)
            for side, (size, cap) in enumerate(zip(self.sizes.tolist(), self.caps.tolist(), strict=True))
        ]
        source, target = (np.zeros_like(layout.positions) for layout in layouts)
        source_starts, target_starts = (layout.starts for layout in layouts)
        places = np.stack([source_starts, target_starts + 1])
        self.pairs.copy_tokens(pairs, source.reshape(-1), target.reshape(-1), places)
        source.reshape(-1)[source_starts + lengths[0] - 1] = EOS_ID
        target.reshape(-1)[target_starts] = BOS_ID
        # The labels are the target tokens, shifted by one.
        labels = np.empty_like(target)
        labels[:, :-1] = target[:, 1:]
        labels.reshape(-1)[target_starts + lengths[1] - 1] = EOS_ID
        for row, used in zip(labels, layouts[1].used, strict=True):
            row[used:] = IGNORED
        sides = (layout.sides(tokens) for layout, tokens in zip(layouts, (source, target), strict=True))
        return [
            PackedBatch(source=source_side, target=target_side, labels_T=labels_T)
            for source_side, target_side, labels_T in zip(*sides, torch.from_numpy(labels).unbind(), strict=True)
        ]


def epoch_steps(plan: Plan, *, packs_per_step: int) -> Iterator[Step]:
    """Yield one pass over a split, always the same, for validation."""
    for step in plan.steps(Position(), packs_per_step):
        if step.epoch > 0:
            return
        yield step
