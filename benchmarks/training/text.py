"""Sentence pairs of a data folder as lists of ids, for peers that batch in their own way."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch

from dist_transformer.data.folder.split import Split
from dist_transformer.data.vocabulary.tokenizer import BOS_ID, EOS_ID, PAD_ID

# Label that Hugging Face's losses ignore.
IGNORED_LABEL = -100


@dataclass(frozen=True, kw_only=True, slots=True)
class PaddedBatch:
    """B pairs padded to the longest, as every toolkit without packing computes them."""

    source_BS: torch.Tensor
    source_mask_BS: torch.Tensor
    """1 on real tokens, int64."""
    target_BT: torch.Tensor
    """Decoder input."""
    labels_BT: torch.Tensor
    """Expected decoder output; `IGNORED_LABEL` on padding."""

    def to(self, device: torch.device) -> "PaddedBatch":
        return PaddedBatch(**{field.name: getattr(self, field.name).to(device) for field in fields(self)})


class TextSample:
    """Pairs drawn from a split, in memory."""

    def __init__(self, split: Split, *, pairs: int, longest: int, seed: int) -> None:
        """Take `pairs` random pairs whose sides, `</s>` included, have at most `longest` tokens."""
        rng = np.random.default_rng(seed)
        order = rng.permutation(int(split.shard_starts[-1]))
        fitting = order[(split.sizes(order) <= longest).all(axis=0)][:pairs]
        source, source_lengths, target, target_lengths = split.tokens(fitting)
        self.sources = np.split(source, np.cumsum(source_lengths)[:-1])
        self.targets = np.split(target, np.cumsum(target_lengths)[:-1])
        self.sizes = np.stack([source_lengths, target_lengths], axis=1) + 1
        """Shape: (pairs, 2); tokens of source and target with one special token each."""

    def __len__(self) -> int:
        return len(self.sizes)

    def batch(self, rows: Sequence[int] | np.ndarray) -> PaddedBatch:
        """Make a batch of these pairs, padded to the longest of them."""
        sources = [np.append(self.sources[row], EOS_ID) for row in rows]
        inputs = [np.insert(self.targets[row], 0, BOS_ID) for row in rows]
        labels = [np.append(self.targets[row], EOS_ID) for row in rows]
        return PaddedBatch(
            source_BS=padded(sources, PAD_ID),
            source_mask_BS=padded([np.ones_like(ids) for ids in sources], 0),
            target_BT=padded(inputs, PAD_ID),
            labels_BT=padded(labels, IGNORED_LABEL),
        )

    def bucketed(self, *, max_tokens: int, seed: int) -> list[np.ndarray]:
        """Make batches of pairs of similar length, with at most `max_tokens` per side including padding."""
        rng = np.random.default_rng(seed)
        batches: list[np.ndarray] = []
        order = np.lexsort((rng.permutation(len(self)), self.sizes[:, 0], self.sizes[:, 1]))
        start, widest = 0, np.zeros(2, dtype=np.int64)
        for place, row in enumerate(order):
            wider = np.maximum(widest, self.sizes[row])
            if place > start and wider.max() * (place - start + 1) > max_tokens:
                batches.append(order[start:place])
                start, wider = place, self.sizes[row]
            widest = wider
        batches.append(order[start:])
        return [batches[i] for i in even_order(np.array([self.sizes[rows, 1].sum() for rows in batches]), rng)]

    def epochs(self, target_tokens: float, *, seed: int) -> Iterator[np.ndarray]:
        """Make batches without end, `bucketed` again for each epoch, with a mean of about that many target tokens."""
        low, high = 1, int(4 * target_tokens) + 1
        while high - low > 1:
            middle = (low + high) // 2
            if self.sizes[:, 1].sum() / len(self.bucketed(max_tokens=middle, seed=seed)) < target_tokens:
                low = middle
            else:
                high = middle
        for epoch in itertools.count(seed):
            yield from self.bucketed(max_tokens=high, seed=epoch)


def even_order(tokens: np.ndarray, rng: np.random.Generator) -> list[int]:
    """Shuffle batches of these numbers of tokens so that the mean of a few steps is near that of all.

    Batches of similar lengths differ much in real tokens. Each four in a row have a batch of every quarter by size:
    three at random, and of the largest quarter the one with which the mean of all so far is nearest to that of all.
    Sizes that do not balance are left for the end.
    """
    quarters = np.array_split(np.argsort(tokens, kind="stable"), 4)
    *smaller, largest = (rng.permutation(quarter).tolist() for quarter in quarters)
    order: list[int] = []
    missing = 0.0
    while largest:
        members = [quarter.pop() for quarter in smaller]
        missing += 4 * float(np.mean(tokens)) - float(tokens[members].sum())
        members.append(min(largest, key=lambda batch: abs(float(tokens[batch]) - missing)))
        largest.remove(members[-1])
        missing -= float(tokens[members[-1]])
        order += rng.permutation(members).tolist()
    return order + [batch for quarter in smaller for batch in quarter]


def padded(rows: Sequence[Sequence[int] | np.ndarray], value: int) -> torch.Tensor:
    """Join rows of ids as one int64 tensor, each filled up to the longest."""
    out = np.full((len(rows), max(map(len, rows))), value, dtype=np.int64)
    for row, ids in zip(out, rows, strict=True):
        row[: len(ids)] = ids
    return torch.from_numpy(out)
