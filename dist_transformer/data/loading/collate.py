"""Build the tensors that a rank computes from packs."""

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dist_transformer.data.folder.split import Memory, Split
from dist_transformer.data.loading.mixture import Corpora
from dist_transformer.data.loading.packing import Budgets, Packs, compiled_loops
from dist_transformer.data.loading.plan import Plan, Position, Step
from dist_transformer.data.vocabulary.tokenizer import BOS_ID, EOS_ID
from dist_transformer.model.packed import IGNORED, PackedBatch, lay_out, packed_sides

# Building this many pairs with numpy takes about as long as compiling the code once.
_WORTH_COMPILING = 500_000


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """The packs that a rank computes at once."""

    first_pack: int
    """Index in the step of the first pack. With seed, epoch and step it determines every random choice."""
    batch: PackedBatch


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


class Collator:
    """Build micro-batches. The rank's slice is taken last, so nothing before it depends on the world size.

    Args:
        longest: tokens of the longest source and target, if only some of the pairs are built.
        links: whether micro-batches have the pairs' alignments.
    """

    def __init__(
        self,
        pairs: Split | Corpora,
        budgets: Budgets,
        *,
        packs_per_micro_batch: int,
        longest: tuple[int, int] | None = None,
        links: bool = False,
    ) -> None:
        self.pairs, self.links = pairs, links
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
        self._built += len(pair_ids)
        library = compiled_loops() if self._built >= _WORTH_COMPILING else None
        if library is None:
            buffers = build_in_numpy(self.pairs, pair_ids, counts, self.sizes)
        else:
            buffers = build_compiled(library, self.pairs.memory(pair_ids), pair_ids, counts, self.sizes)
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
        labels = torch.from_numpy(buffers.labels).unbind()
        links = self._links(pair_ids, counts, buffers) if self.links else [None] * len(labels)
        return [
            PackedBatch(source=source, target=target, labels_T=labels_T, links_T=links_T)
            for source, target, labels_T, links_T in zip(*sides, labels, links, strict=True)
        ]

    def _links(self, pair_ids: np.ndarray, counts: np.ndarray, buffers: Buffers) -> Sequence[torch.Tensor]:
        """Return the links of each micro-batch: those of a shard begin at 1, behind `<s>`."""
        links, offsets = np.zeros_like(buffers.labels), buffers.offsets[1]
        starts = offsets + np.arange(0, links.size, links.shape[1])[:, None]
        is_pair = np.arange(offsets.shape[1]) < counts[:, None]
        self.pairs.copy_links(pair_ids, links.reshape(-1), starts[is_pair] + 1)
        return torch.from_numpy(links + IGNORED).unbind()


def epoch_steps(plan: Plan, *, packs_per_step: int) -> Iterator[Step]:
    """Yield one pass over a split, always the same, for validation."""
    for step in plan.steps(Position(), packs_per_step):
        if step.epoch > 0:
            return
        yield step


def build_in_numpy(pairs: Split | Corpora, pair_ids: np.ndarray, counts: np.ndarray, sizes: Sizes) -> Buffers:
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


class _Side(ctypes.Structure):
    """The struct `Side` of the C++ source."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("size", "max_length")),
        *((name, ctypes.c_void_p) for name in ("tokens", "positions", "lengths", "offsets")),
    )


def build_compiled(
    library: ctypes.CDLL, memory: Memory, pair_ids: np.ndarray, counts: np.ndarray, sizes: Sizes
) -> Buffers:
    """Do the same as `build_in_numpy`, ten times as fast; the pairs are read from memory."""
    buffers = len(counts)
    pair_ids, counts = (np.ascontiguousarray(array, dtype=np.int64) for array in (pair_ids, counts))
    # Source and target each.
    tokens, positions = (_empty(buffers, sizes.tokens, np.int64) for _ in range(2))
    offsets = _empty(buffers, (sizes.offset_count,) * 2, np.int32)
    labels = np.empty_like(tokens[1])
    lengths = np.empty((2, len(pair_ids)), dtype=np.int64)
    sides = (_Side * 2)(
        *(
            _Side(size, longest, *(array.ctypes.data for array in arrays))
            for size, longest, *arrays in zip(
                sizes.tokens, sizes.max_lengths, tokens, positions, lengths, offsets, strict=True
            )
        )
    )
    table = memory.table
    places = [table.ctypes.data, len(table), pair_ids.ctypes.data, counts.ctypes.data, buffers, sizes.offset_count]
    status = library.build_buffers(*places, BOS_ID, EOS_ID, IGNORED, ctypes.addressof(sides), labels.ctypes.data)
    if status > 0:
        raise ValueError(f"sentences of {status} tokens do not fit buffers of {sizes.tokens}")
    if status < 0:
        raise IndexError("a pair is in no shard" if status == -1 else f"more than {sizes.offset_count} sentences")
    return Buffers(tokens=tokens, positions=positions, offsets=offsets, labels=labels, lengths=lengths)


def _empty(buffers: int, sizes: tuple[int, int], dtype: type[np.generic]) -> tuple[np.ndarray, np.ndarray]:
    source, target = (np.empty((buffers, size), dtype=dtype) for size in sizes)
    return source, target
