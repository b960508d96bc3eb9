"""Build the tensors that a rank computes from packs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dist_transformer.data.loading import compiled
from dist_transformer.data.loading.buffers import Buffers, Pairs, Sizes, build_in_numpy
from dist_transformer.data.loading.packing import Budgets
from dist_transformer.data.loading.packs import Packs
from dist_transformer.data.loading.plan import Plan, Position, Step
from dist_transformer.model.packed import PackedBatch, packed_sides

# Building this many pairs with numpy takes about as long as compiling the code once.
_WORTH_COMPILING = 500_000


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """The packs that a rank computes at once."""

    first_pack: int
    """Index in the step of the first pack. With seed, epoch and step it determines every random choice."""
    batch: PackedBatch


class Collator:
    """Build micro-batches. The rank's slice is taken last, so nothing before it depends on the world size.

    Args:
        longest: tokens of the longest source and target, if only some of the pairs are built.
    """

    def __init__(
        self, pairs: Pairs, budgets: Budgets, *, packs_per_micro_batch: int, longest: tuple[int, int] | None = None
    ) -> None:
        self.pairs = pairs
        self.packs_per_micro_batch = packs_per_micro_batch
        # A multiple of 8 gives matrix shapes that are fast.
        tokens = -(-budgets.tokens * packs_per_micro_batch // 8) * 8
        caps = np.maximum(1, np.minimum(budgets.tokens, longest or pairs.longest))
        dummies = int((-(-tokens // caps)).max())
        self.sizes = Sizes(
            tokens=tuple(tokens.tolist()),
            max_lengths=tuple(caps.tolist()),
            offset_count=1 + budgets.max_sentences * packs_per_micro_batch + dummies,
        )
        self._built = 0

    def micro_batches(self, step: Step, *, rank: int, world_size: int) -> list[MicroBatch]:
        """Return this rank's share of a step. All ranks get equally many; the last may have weight zero."""
        return self.micro_batches_of([step], rank=rank, world_size=world_size)[0]

    def micro_batches_of(self, steps: Sequence[Step], *, rank: int, world_size: int) -> list[list[MicroBatch]]:
        """Return the shares of several steps at once, which is faster because they share the cost of each call."""
        size = self.packs_per_micro_batch
        turns = [-(-len(step.packs) // (size * world_size)) for step in steps]
        firsts = [(np.arange(count) * world_size + rank) * size for count in turns]
        shares = [step.packs.pairs_between(first, first + size) for step, first in zip(steps, firsts, strict=True)]
        batches = iter(self._build(*(np.concatenate(parts) for parts in zip(*shares, strict=True))))
        return [[MicroBatch(first_pack=number, batch=next(batches)) for number in first.tolist()] for first in firsts]

    def build(self, packs: Packs) -> PackedBatch:
        """Lay the pairs of the packs end to end."""
        return self._build(packs.pair_ids, np.array([len(packs.pair_ids)]))[0]

    def _build(self, pair_ids: np.ndarray, counts: np.ndarray) -> list[PackedBatch]:
        """Build micro-batches of `counts` consecutive pairs each."""
        buffers = self._buffers(pair_ids, counts)
        sides = (
            packed_sides(tokens, positions, offsets, lengths, counts, max_length=longest)
            for tokens, positions, offsets, lengths, longest in zip(
                buffers.tokens,
                buffers.positions,
                buffers.offsets,
                buffers.lengths,
                self.sizes.max_lengths,
                strict=True,
            )
        )
        return [
            PackedBatch(source=source, target=target, labels_T=labels_T)
            for source, target, labels_T in zip(*sides, torch.from_numpy(buffers.labels).unbind(), strict=True)
        ]

    def _buffers(self, pair_ids: np.ndarray, counts: np.ndarray) -> Buffers:
        self._built += len(pair_ids)
        function = compiled.build_buffers() if self._built >= _WORTH_COMPILING else None
        if function is None:
            return build_in_numpy(self.pairs, pair_ids, counts, self.sizes)
        return function(self.pairs.memory(pair_ids), pair_ids, counts, self.sizes)


def epoch_steps(plan: Plan, *, packs_per_step: int) -> Iterator[Step]:
    """Yield one pass over a split, always the same, for validation."""
    for step in plan.steps(Position(), packs_per_step):
        if step.epoch > 0:
            return
        yield step
