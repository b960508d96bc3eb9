"""Packed tokens: sentences laid end to end in a buffer of fixed size. Data makes them, the model reads them.

The buffer's unused tail is cut into dummy sentences no longer than the length cap, so that every row belongs to a
sentence and stays finite; a dummy target token has the label `IGNORED`.
"""

from dataclasses import dataclass

import numpy as np
import torch

IGNORED = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedTokens:
    """One side of a micro-batch."""

    tokens_T: torch.Tensor
    """Token ids, int64, shape (T,)."""
    positions_T: torch.Tensor
    """Place of each token in its sentence, int64, shape (T,)."""
    offsets_N: torch.Tensor
    """Where each sentence starts, int32; the last entry, repeated to a fixed count, is T."""
    lengths: np.ndarray
    """Lengths of the real sentences only, on the host."""
    max_length: int
    """No sentence, real or dummy, is longer."""

    def to(self, device: torch.device) -> "PackedTokens":
        return PackedTokens(
            tokens_T=self.tokens_T.to(device, non_blocking=True),
            positions_T=self.positions_T.to(device, non_blocking=True),
            offsets_N=self.offsets_N.to(device, non_blocking=True),
            lengths=self.lengths,
            max_length=self.max_length,
        )

    def pin_memory(self) -> "PackedTokens":
        """In page-locked memory, which a GPU reads while it computes."""
        return PackedTokens(
            tokens_T=self.tokens_T.pin_memory(),
            positions_T=self.positions_T.pin_memory(),
            offsets_N=self.offsets_N.pin_memory(),
            lengths=self.lengths,
            max_length=self.max_length,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedBatch:
    """A micro-batch: sentence i of `source` pairs with sentence i of `target`."""

    source: PackedTokens
    target: PackedTokens
    """Target in: `<s> ids`."""
    labels_T: torch.Tensor
    """Target out: `ids </s>`, and `IGNORED` on dummy tokens; int64, shape (T,)."""

    def to(self, device: torch.device) -> "PackedBatch":
        return PackedBatch(
            source=self.source.to(device), target=self.target.to(device),
            labels_T=self.labels_T.to(device, non_blocking=True),
        )  # fmt: skip

    def pin_memory(self) -> "PackedBatch":
        source, target = self.source.pin_memory(), self.target.pin_memory()
        return PackedBatch(source=source, target=target, labels_T=self.labels_T.pin_memory())


def pack_side(
    sentences: np.ndarray, lengths: np.ndarray, *, size: int, offset_count: int, max_length: int
) -> PackedTokens:
    """Lay sentences end to end in a buffer of `size` tokens.

    Args:
        sentences: ids of all sentences, concatenated, int64.
        lengths: their lengths; the sum is at most `size`.
        size: tokens in the buffer.
        offset_count: length of `offsets_N`: one more than the real and dummy sentences that may come together.
        max_length: cap on a sentence's length.
    """
    tokens = np.zeros(size, dtype=np.int64)
    tokens[: len(sentences)] = sentences
    return describe_side(tokens, lengths.astype(np.int64), offset_count=offset_count, max_length=max_length)


def describe_side(tokens: np.ndarray, lengths: np.ndarray, *, offset_count: int, max_length: int) -> PackedTokens:
    """A buffer in which the sentences lie already, zeros after them; otherwise as `pack_side`."""
    size = len(tokens)
    tail = size - int(lengths.sum())
    dummies = np.full(-(-tail // max_length), max_length)
    if tail:
        dummies[-1] = tail - max_length * (len(dummies) - 1)
    all_lengths = np.concatenate([lengths, dummies])
    ends = np.cumsum(all_lengths)
    offsets = np.full(offset_count, size, dtype=np.int32)
    offsets[0] = 0
    offsets[1 : len(ends) + 1] = ends
    positions = np.arange(size)
    positions -= np.repeat(ends - all_lengths, all_lengths)
    return PackedTokens(
        tokens_T=torch.from_numpy(tokens),
        positions_T=torch.from_numpy(positions),
        offsets_N=torch.from_numpy(offsets),
        lengths=lengths,
        max_length=max_length,
    )
