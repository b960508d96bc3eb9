"""The arrays of several micro-batches, built at once. compiled.cpp builds the same arrays ten times as fast."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from dist_transformer.data.folder.split import Memory
from dist_transformer.data.vocabulary.tokenizer import BOS_ID, EOS_ID
from dist_transformer.model.packed import IGNORED, lay_out


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

    def memory(self, pair_ids: np.ndarray) -> Memory:
        """Return where the ids of the given pairs are in memory."""

    def forget_past(self) -> None:
        """Release the shards that only windows before the last admitted one need."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Sizes of the buffers of every micro-batch. Those of two sides are for source and target."""

    tokens: tuple[int, int]
    max_lengths: tuple[int, int]
    """Tokens of the longest sentence, dummies included."""
    offset_count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Buffers:
    """Arrays of several micro-batches; the first dimension is the micro-batch. Pairs of arrays: source and target."""

    tokens: tuple[np.ndarray, np.ndarray]
    positions: tuple[np.ndarray, np.ndarray]
    offsets: tuple[np.ndarray, np.ndarray]
    labels: np.ndarray
    lengths: np.ndarray
    """Shape: (2, pairs). Source and target tokens of each pair."""


def build_in_numpy(pairs: Pairs, pair_ids: np.ndarray, counts: np.ndarray, sizes: Sizes) -> Buffers:
    """Lay pairs end to end in the buffers of micro-batches.

    Args:
        pair_ids: pairs of all micro-batches.
        counts: number of consecutive pairs in each micro-batch.

    Raises:
        ValueError: the pairs of a micro-batch have more tokens than its buffers.
    """
    lengths = pairs.sizes(pair_ids)
    layouts = [
        lay_out(lengths[side], counts, size=size, offset_count=sizes.offset_count, max_length=cap)
        for side, (size, cap) in enumerate(zip(sizes.tokens, sizes.max_lengths, strict=True))
    ]
    source, target = (np.zeros_like(layout.positions) for layout in layouts)
    source_starts, target_starts = (layout.starts for layout in layouts)
    places = np.stack([source_starts, target_starts + 1])
    pairs.copy_tokens(pair_ids, source.reshape(-1), target.reshape(-1), places)
    source.reshape(-1)[source_starts + lengths[0] - 1] = EOS_ID
    target.reshape(-1)[target_starts] = BOS_ID
    # The labels are the target tokens, shifted by one.
    labels = np.empty_like(target)
    labels[:, :-1] = target[:, 1:]
    labels.reshape(-1)[target_starts + lengths[1] - 1] = EOS_ID
    for row, used in zip(labels, layouts[1].used, strict=True):
        row[used:] = IGNORED
    return Buffers(
        tokens=(source, target),
        positions=(layouts[0].positions, layouts[1].positions),
        offsets=(layouts[0].offsets, layouts[1].offsets),
        labels=labels,
        lengths=lengths,
    )
