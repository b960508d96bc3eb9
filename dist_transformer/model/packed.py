"""Packed tokens: sentences end to end in a buffer of fixed size. The data package makes them, the model reads them.

The buffer's unused tail is split into dummy sentences no longer than the length cap, so that every row belongs to a
sentence and stays finite. A dummy target token has the label `IGNORED`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

IGNORED = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedTokens:
    """One side of a micro-batch."""

    tokens_T: torch.Tensor
    """Token ids, int64, shape (T,)."""
    positions_T: torch.Tensor
    """Position of each token in its sentence, int64, shape (T,)."""
    offsets_N: torch.Tensor
    """Start of each sentence, int32; the last entry, repeated to a fixed count, is T."""
    lengths: np.ndarray
    """Lengths of the real sentences only, on the host."""
    max_length: int
    """Upper limit of the length of real and dummy sentences."""

    def copied(self, copy: Callable[[torch.Tensor], torch.Tensor]) -> "PackedTokens":
        """Copy every tensor by a function."""
        tokens_T, positions_T, offsets_N = map(copy, (self.tokens_T, self.positions_T, self.offsets_N))
        return replace(self, tokens_T=tokens_T, positions_T=positions_T, offsets_N=offsets_N)

    def to(self, device: torch.device) -> "PackedTokens":
        return self.copied(lambda x: x.to(device, non_blocking=True))

    def twice(self) -> "PackedTokens":
        """Return a buffer of 2T tokens that holds every sentence twice: all, all again, and the dummies of both."""
        count, used, size = len(self.lengths), self._used, len(self.tokens_T)
        tokens_T, positions_T = map(self.rows_twice, (self.tokens_T, self.positions_T))
        offsets_N = self.offsets_N
        offsets_N = torch.cat([offsets_N[:count], offsets_N + used, offsets_N[count + 1 :] + size])
        lengths = np.tile(self.lengths, 2)
        return replace(self, tokens_T=tokens_T, positions_T=positions_T, offsets_N=offsets_N, lengths=lengths)

    def rows_twice(self, rows_T: torch.Tensor) -> torch.Tensor:
        """Return numbers of this buffer's tokens for those of the buffer of `twice`."""
        return torch.cat([rows_T[: self._used], rows_T, rows_T[self._used :]])

    @property
    def _used(self) -> int:
        return int(self.lengths.sum())

    def split_twice(self, rows_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Split rows of the buffer of `twice` into those of each copy, both (T, D), dummies last as in this buffer."""
        used, size = self._used, len(self.tokens_T)
        first, second, dummies = rows_TD.split([used, size, size - used])
        return torch.cat([first, dummies]), second


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedBatch:
    """A micro-batch: sentence i of `source` pairs with sentence i of `target`. Both have the same number of offsets."""

    source: PackedTokens
    target: PackedTokens
    """Decoder input: `<s> ids`."""
    labels_T: torch.Tensor
    """Labels: `ids </s>`, and `IGNORED` on dummy tokens; int64, shape (T,)."""
    links_T: torch.Tensor | None = None
    """Place in its sentence of the source token that each token of `target` is linked to, or `IGNORED`; int64, shape
    (T,). None: the data has no alignments, or training does not use them."""

    def to(self, device: torch.device) -> "PackedBatch":
        return self.copied(lambda x: x.to(device, non_blocking=True))

    def pin_memory(self) -> "PackedBatch":
        """Copy to page-locked memory, which a GPU can read while it computes."""
        return self.copied(torch.Tensor.pin_memory)

    def copied(self, copy: Callable[[torch.Tensor], torch.Tensor]) -> "PackedBatch":
        """Copy every tensor by a function."""
        source, target = self.source.copied(copy), self.target.copied(copy)
        links_T = None if self.links_T is None else copy(self.links_T)
        return PackedBatch(source=source, target=target, labels_T=copy(self.labels_T), links_T=links_T)


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Positions of sentences in buffers of equal size, which are laid end to end."""

    starts: np.ndarray
    """Index of each sentence's first token."""
    used: np.ndarray
    """Shape: (buffers,). Tokens of the real sentences of each buffer."""
    positions: np.ndarray
    """Shape: (buffers, size). Each buffer's `positions_T`."""
    offsets: np.ndarray
    """Shape: (buffers, offset_count). Each buffer's `offsets_N`."""


def lay_out(lengths: np.ndarray, counts: np.ndarray, *, size: int, offset_count: int, max_length: int) -> Layout:
    """Lay sentences end to end from the start of each buffer, then dummies.

    Args:
        lengths: lengths of all sentences, int64; those of one buffer sum to at most `size`.
        counts: shape (buffers,), the number of consecutive sentences in each buffer.
        size: tokens per buffer.
        offset_count: one more than the largest number of real and dummy sentences in a buffer.
        max_length: cap on a sentence's length.

    Raises:
        ValueError: a buffer's sentences have more than `size` tokens.
    """
    # All buffers at once, because each numpy call has a cost.
    tokens_before = np.concatenate([[0], np.cumsum(lengths)])
    stops = np.cumsum(counts)
    firsts = stops - counts
    used = tokens_before[stops] - tokens_before[firsts]
    if (used > size).any():
        raise ValueError(f"sentences of {used.max()} tokens in a buffer of {size}")
    bases = np.arange(0, size * len(counts), size)
    starts = tokens_before[:-1] + np.repeat(bases - tokens_before[firsts], counts)
    # Dummies continue in steps of the cap from the end of the sentences. The values of these steps before that end are
    # overwritten by the real starts.
    width = 1 + int((counts - (used - size) // max_length).max())
    begins = np.minimum(used[:, None] + (np.arange(width) - counts[:, None]) * max_length, size) + bases[:, None]
    begins.reshape(-1)[np.arange(len(lengths)) + np.repeat(np.arange(0, begins.size, width) - firsts, counts)] = starts
    positions = np.arange(size * len(counts))
    positions -= np.repeat(begins[:, :-1].reshape(-1), np.diff(begins).reshape(-1))
    offsets = np.full((len(counts), offset_count), size, dtype=np.int32)
    offsets[:, :width] = begins - bases[:, None]
    return Layout(starts=starts, used=used, positions=positions.reshape(-1, size), offsets=offsets)


def packed_sides(
    tokens: np.ndarray,
    positions: np.ndarray,
    offsets: np.ndarray,
    lengths: np.ndarray,
    counts: np.ndarray,
    *,
    max_length: int,
) -> list[PackedTokens]:
    """Return buffers as sides of micro-batches, without a copy.

    Args:
        tokens: (buffers, size); `positions` has the same shape.
        offsets: (buffers, offset_count).
        lengths: lengths of all sentences.
        counts: (buffers,), the number of consecutive sentences in each buffer.
    """
    stops = np.cumsum(counts)
    arrays = (torch.from_numpy(array).unbind() for array in (tokens, positions, offsets))
    return [
        PackedTokens(
            tokens_T=tokens_T,
            positions_T=positions_T,
            offsets_N=offsets_N,
            lengths=lengths[first:stop],
            max_length=max_length,
        )
        for tokens_T, positions_T, offsets_N, first, stop in zip(
            *arrays, (stops - counts).tolist(), stops.tolist(), strict=True
        )
    ]


def pack_side(
    sentences: np.ndarray, lengths: np.ndarray, *, size: int, offset_count: int, max_length: int
) -> PackedTokens:
    """Lay sentences end to end in a buffer of `size` tokens.

    Args:
        sentences: ids of all sentences, concatenated, int64.
        lengths: lengths of the sentences; the sum is at most `size`.
        size: tokens per buffer.
        offset_count: length of `offsets_N`: one more than the largest number of real and dummy sentences.
        max_length: cap on a sentence's length.
    """
    tokens = np.zeros((1, size), dtype=np.int64)
    tokens[0, : len(sentences)] = sentences
    lengths, counts = lengths.astype(np.int64), np.array([len(lengths)])
    layout = lay_out(lengths, counts, size=size, offset_count=offset_count, max_length=max_length)
    (side,) = packed_sides(tokens, layout.positions, layout.offsets, lengths, counts, max_length=max_length)
    return side
