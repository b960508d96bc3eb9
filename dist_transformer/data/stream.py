"""From packs to the tensors that a rank computes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dist_transformer.data.packing import Budgets
from dist_transformer.data.plan import Pack, Plan, Position, Step
from dist_transformer.data.shards import Split
from dist_transformer.data.tokenizer import BOS_ID, EOS_ID
from dist_transformer.packed import IGNORED, PackedBatch, pack_side


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """What a rank computes at once."""

    first_pack: int
    """Place in the step of the first pack: with seed, epoch and step it names every random choice."""
    batch: PackedBatch


class Stream:
    """Builds the micro-batches of a split. The rank's slice is taken last, so nothing before it knows the world."""

    def __init__(self, split: Split, budgets: Budgets, *, packs_per_micro_batch: int) -> None:
        self.split = split
        self.packs_per_micro_batch = packs_per_micro_batch
        self.source_size = budgets.max_source_tokens * packs_per_micro_batch
        self.target_size = budgets.max_target_tokens * packs_per_micro_batch
        self.source_cap = max(1, min(budgets.max_source_tokens, split.info.max_source_tokens))
        self.target_cap = max(1, min(budgets.max_target_tokens, split.info.max_target_tokens))
        dummies = max(-(-self.source_size // self.source_cap), -(-self.target_size // self.target_cap))
        self.offset_count = 1 + budgets.max_sentences * packs_per_micro_batch + dummies

    def micro_batches(self, step: Step, *, rank: int, world_size: int) -> Iterator[MicroBatch]:
        """This rank's share of a step: equally many on every rank, the last ones of weight zero where packs run out."""
        size = self.packs_per_micro_batch
        rounds = -(-len(step.packs) // (size * world_size))
        for turn in range(rounds):
            first = (turn * world_size + rank) * size
            yield MicroBatch(first_pack=first, batch=self.build(step.packs[first : first + size]))

    def build(self, packs: Sequence[Pack | None]) -> PackedBatch:
        """Lay the pairs of the packs end to end."""
        ids = [pack.pair_ids for pack in packs if pack is not None]
        pairs = np.concatenate(ids) if ids else np.empty(0, dtype=np.int64)
        source, source_lengths, target, target_lengths = self.split.tokens(pairs)
        source_ends, target_ends = np.cumsum(source_lengths), np.cumsum(target_lengths)
        labels = np.full(self.target_size, IGNORED, dtype=np.int64)
        with_end = np.insert(target, target_ends, EOS_ID)
        labels[: len(with_end)] = with_end
        return PackedBatch(
            source=pack_side(
                np.insert(source, source_ends, EOS_ID), source_lengths + 1,
                size=self.source_size, offset_count=self.offset_count, max_length=self.source_cap,
            ),
            target=pack_side(
                np.insert(target, target_ends - target_lengths, BOS_ID), target_lengths + 1,
                size=self.target_size, offset_count=self.offset_count, max_length=self.target_cap,
            ),
            labels_T=torch.from_numpy(labels),
        )  # fmt: skip


def epoch_steps(plan: Plan, *, packs_per_step: int) -> Iterator[Step]:
    """One pass over a split, always the same, for validation."""
    for step in plan.steps(Position(), packs_per_step):
        if step.epoch > 0:
            return
        yield step
