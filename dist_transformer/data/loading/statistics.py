"""Statistics of a data folder: sentence lengths, how full packs get, and example sentences.

Lengths are counted a million pairs at a time, so memory does not grow with the corpus.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from dist_transformer.base.errors import one_line
from dist_transformer.data.folder.split import Split
from dist_transformer.data.loading.collate import epoch_steps
from dist_transformer.data.loading.packing import Budgets, EpochSummary
from dist_transformer.data.loading.plan import Plan
from dist_transformer.data.vocabulary.tokenizer import Vocabulary

_CHUNK_PAIRS = 2**20
# Sentences longer than all but this share go into the last row of a histogram.
_SHOWN_SHARE = 0.995
_BAR = 21
# Widths of a histogram's rows in tokens: round numbers.
_ROW_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
_MOST_ROWS = 15


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """Number of sentences of one side by length, which includes the one special token."""

    counts: np.ndarray
    """`counts[n]` sentences have n tokens."""

    @property
    def sentences(self) -> int:
        return int(self.counts.sum())

    @property
    def tokens(self) -> int:
        return int(self.counts @ np.arange(len(self.counts)))

    @property
    def mean(self) -> float:
        return self.tokens / self.sentences

    @property
    def longest(self) -> int:
        return int(np.flatnonzero(self.counts)[-1])

    def quantile(self, share: float) -> int:
        """Return the smallest length that at least this share of the sentences does not exceed."""
        return int(np.searchsorted(np.cumsum(self.counts), share * self.sentences))


def count_lengths(split: Split) -> tuple[Lengths, Lengths]:
    """Count the lengths of the source and the target side of a split, in all segmentations."""
    sizes = (split.info.max_source_tokens + 1, split.info.max_target_tokens + 1)
    counts = [np.zeros(size, dtype=np.int64) for size in sizes]
    for start in range(0, len(split.lengths), _CHUNK_PAIRS):
        for side, size in enumerate(sizes):
            counts[side] += np.bincount(split.lengths[start : start + _CHUNK_PAIRS, side], minlength=size)
    return Lengths(counts=counts[0]), Lengths(counts=counts[1])


def first_epoch(split: Split, budgets: Budgets, *, window_shards: int, seed: int) -> EpochSummary:
    """Plan the first epoch and return its figures."""
    plan = Plan(
        split.lengths,
        split.shard_starts,
        budgets=budgets,
        window_shards=window_shards,
        seed=seed,
        segmentations=split.info.segmentations,
    )
    return next(step.ended[0] for step in epoch_steps(plan, packs_per_step=1) if step.ended)


def histogram_edges(sides: Sequence[Lengths]) -> list[int]:
    """Return the first length of each row that all sides share; the last row has no end."""
    shown = max(side.quantile(_SHOWN_SHARE) for side in sides)
    row = next((tokens for tokens in _ROW_TOKENS if -(-shown // tokens) <= _MOST_ROWS), -(-shown // _MOST_ROWS))
    return list(range(1, shown + row + 1, row))


def length_histograms(sides: Sequence[Lengths], names: Sequence[str]) -> str:
    """Format both sides in columns of at most 80 characters per line: share of the sentences, and a bar."""
    edges = histogram_edges(sides)
    ranges = [f"{first}-{after - 1}" if after - first > 1 else f"{first}" for first, after in pairwise(edges)]
    ranges.append(f"{edges[-1]} up")
    shares = np.array([[side.counts[a:b].sum() / side.sentences for a, b in _slices(edges)] for side in sides])
    width = max(map(len, ["tokens", *ranges]))
    column = _BAR + 8
    lines = [f"{'tokens':>{width}}" + "".join(f"  {name[:column]:{column}}" for name in names)]
    for row, label in enumerate(ranges):
        bars = ("#" * round(_BAR * share / shares.max()) for share in shares[:, row])
        cells = (f"  {share:6.1%}  {bar:{_BAR}}" for share, bar in zip(shares[:, row], bars, strict=True))
        lines.append(f"{label:>{width}}" + "".join(cells))
    return "\n".join(line.rstrip() for line in lines)


def random_examples(split: Split, tokenizer: Vocabulary, count: int, *, seed: int) -> list[tuple[str, str]]:
    """Return source and target text of `count` random pairs, or of all if there are fewer; no pair occurs twice."""
    pairs = np.random.default_rng([seed]).choice(split.info.pairs, min(count, split.info.pairs), replace=False)
    source, source_lengths, target, target_lengths = split.tokens(pairs)
    sides = [
        [one_line(side.decode(ids.tolist())) for ids in np.split(values, np.cumsum(lengths)[:-1])]
        for side, values, lengths in (
            (tokenizer.source, source, source_lengths),
            (tokenizer.target, target, target_lengths),
        )
    ]
    return list(zip(*sides, strict=True))


def _slices(edges: Sequence[int]) -> list[tuple[int, int | None]]:
    return [*pairwise(edges), (edges[-1], None)]
