"""Batches of sentences for decoding: how they are formed and laid out, and the best extensions of their hypotheses.

Sentences of a batch have similar lengths, and the longest come first, so that a lack of memory shows early. On a CPU
all sentences of a batch begin together, and its steps get smaller as sentences end. On CUDA a step is launched as a
graph of fixed shapes. A batch then has more sentences than slots, and when a sentence ends, the next one takes its
slot.

The tensors over the vocabulary are the largest ones of decoding. On a CPU, projection, softmax and selection process a
few rows at a time, which stay in the cache. Compiled code reads a row twice; torch's operators read it many times.
"""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from dist_transformer.data.vocabulary.tokenizer import BOS_ID, EOS_ID, PAD_ID, UNK_ID
from dist_transformer.inference.decoding import Decoding
from dist_transformer.inference.ensemble import DecodingModel
from dist_transformer.inference.prefixes import Prefixes, PrefixTracker
from dist_transformer.inference.repetition import Adjust, Repetition
from dist_transformer.model import cpu_kernels
from dist_transformer.model.packed import PackedTokens, pack_side
from dist_transformer.model.products import Linear

# A short sentence costs as much as this many tokens: its beams have logits and caches too.
_LEAST_COST = 8
# Lengths up to the same power of 2 share a graph, so that there are few graphs. Below this length, the rest of a step
# costs more than attention.
_LEAST_ROOM = 32
# Sentences per slot in a batch. More would leave fewer batches to share among ranks; fewer would leave slots idle more
# often, because slots are idle at the end of each batch.
_SENTENCES_OF_A_SLOT = 8
# With refilled slots, sizes are multiples of this, because GPU kernels read masks in pieces of this size.
_MULTIPLE = 8
# Logits that are computed at a time. On a CPU torch's operators read them many times, so 2 MB of fp32 should stay in
# the cache of a core. Compiled code reads them only twice, and the matrix product is faster with more rows. The same
# holds on a GPU.
_ELEMENTS = {"cpu": 2**19, "compiled": 2**22, "cuda": 2**31}
# Values per block in the search for the largest values: only the maximum of a block is compared at first.
_BLOCK = 64


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model in evaluation mode, and afterwards back in its mode."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    places: list[int]
    """Places of its sentences in the input."""
    slots: int | None = None
    """Sentences that are decoded at a time; None: all of them."""


def make_batches(
    places: Sequence[int], lengths: Sequence[int], *, beam_size: int, max_tokens: int, refills: bool
) -> list[Batch]:
    """Form batches of the sentences at `places`. The batches do not depend on the order of `places`.

    Args:
        lengths: tokens of all sentences of the input, with `</s>`.
        max_tokens: padded tokens of the sentences that are decoded at a time, times beam size. A longer sentence is
            decoded alone.
        refills: whether the next sentence takes the slot of one that ended.
    """
    places = sorted(places, key=lambda i: (-lengths[i], i))
    if not refills:
        costs = [max(lengths[i], _LEAST_COST) * beam_size for i in places]
        return [Batch(places=places[cut]) for cut in _even_cuts(costs, max_tokens)]
    batches = []
    for room, alike in itertools.groupby(places, key=lambda i: max(_LEAST_ROOM, 1 << (lengths[i] - 1).bit_length())):
        slots, members = max(1, max_tokens // (room * beam_size)), list(alike)
        size = _SENTENCES_OF_A_SLOT * slots
        batches += [Batch(places=members[i : i + size], slots=slots) for i in range(0, len(members), size)]
    return batches


def _even_cuts(costs: Sequence[int], budget: int) -> list[slice]:
    """Cut into as few batches as possible, of even cost: a small rest would take as many steps as a full batch."""
    fewest = len(_cut(costs, budget))
    even = sum(costs) / max(1, fewest)
    while even < budget and len(_cut(costs, even)) > fewest:
        even *= 1.02
    return _cut(costs, min(even, budget))


def _cut(costs: Sequence[int], budget: float) -> list[slice]:
    """Cut a list of falling costs so that highest cost times size of each part is within the budget.

    A part of one sentence may exceed the budget.
    """
    cuts, start = [], 0
    while start < len(costs):
        stop = start + max(1, int(budget // costs[start]))
        cuts.append(slice(start, stop))
        start = stop
    return cuts


def pack_sentences(sentences: Sequence[Sequence[int]], device: torch.device) -> PackedTokens:
    """Lay the tokens of sentences end to end."""
    lengths = np.array(list(map(len, sentences)))
    tokens = np.fromiter(itertools.chain.from_iterable(sentences), dtype=np.int64)
    packed = pack_side(tokens, lengths, size=len(tokens), offset_count=len(lengths) + 1, max_length=int(lengths.max()))
    return packed.to(device)


class Running:
    """Sentences that a model decodes at a time, each in a slot with its hypotheses: limits, caches, prefixes.

    Args:
        sources, settings: as for `beam_search`.
        slots: number of slots; they are idle at first.
        beam_size: hypotheses per slot.
        fixed_shapes: whether all steps have the same shapes.
        never: tokens that are never chosen, besides `<pad>`, `<unk>` and `<s>`.
        prefixes: texts that the outputs begin with. One with more tokens than the source replaces its length.
        given: tokens that every output begins with, such as its language. They are not chosen, and cost no probability.
        linear: computes the matrix products of each step.
    """

    def __init__(
        self,
        model: DecodingModel,
        sources: Sequence[Sequence[int]],
        settings: Decoding,
        *,
        slots: int,
        beam_size: int,
        fixed_shapes: bool = False,
        never: Sequence[int] = (),
        prefixes: Prefixes | None = None,
        given: Sequence[int] = (),
        linear: Linear = functional.linear,
    ) -> None:
        self.model, self.sources, self.settings, self.device = model, sources, settings, model.device
        lengths, positions = np.array([len(source) for source in sources]), model.config.max_positions
        if prefixes is not None:
            lengths = np.maximum(lengths, prefixes.least_lengths())
        self.limits = np.minimum(lengths + settings.max_extra_tokens, positions - 1)
        """Most tokens of each output, without `</s>`."""
        source_room, self.longest = max(map(len, sources)) + 1, int(self.limits.max()) + 1
        if fixed_shapes:
            source_room, self.longest = _rounded(source_room), min(_rounded(self.longest), positions)
        self.state: Any = model.new_decoder_state(
            slots=slots,
            beam_size=beam_size,
            source_room=source_room,
            longest=self.longest,
            fixed_shapes=fixed_shapes,
            linear=linear,
        )
        self.given = given
        self.tracker: PrefixTracker | None = None
        if prefixes is not None:
            self.tracker = PrefixTracker(prefixes, slots=slots, beam_size=beam_size, device=self.device)
        self.repetition: Repetition | None = None
        if not settings.samples and (settings.no_repeat_ngram_size is not None or settings.repetition_penalty != 1):
            self.repetition = Repetition(settings, slots=slots, longest=self.longest, device=self.device)
        self.never = torch.tensor([PAD_ID, UNK_ID, BOS_ID, *never], device=self.device)

    def begin_sentences(self, slots_n: torch.Tensor, sentences: Sequence[int]) -> None:
        """Put the sentences at these places of the sources into slots."""
        packed = pack_sentences([(*self.sources[i], EOS_ID) for i in sentences], self.device)
        self.model.begin_sentences(self.state, slots_n, packed)
        if self.tracker is not None:
            self.tracker.begin(slots_n, sentences)

    def adjustment(self, *, rows: int) -> Adjust | None:
        """Return what changes the log probabilities of next tokens of the first `rows` hypotheses of each slot."""
        positions_N = self.state.positions_N
        allowed_BV = None if self.tracker is None else self.tracker.allowed(positions_N, rows=rows)
        repeated = None if self.repetition is None else self.repetition.adjustment(positions_N, rows=rows)
        if allowed_BV is None:
            return repeated

        def adjust(logits_RV: torch.Tensor, logp_RV: torch.Tensor, part: slice) -> torch.Tensor:
            allowed_RV = allowed_BV[part]
            if repeated is not None:
                # A prefix may repeat itself; </s> is allowed behind it.
                logp_RV = torch.where(allowed_RV[:, EOS_ID, None], repeated(logits_RV, logp_RV, part), logp_RV)
            return logp_RV.masked_fill(~allowed_RV, -torch.inf)

        return adjust

    def end_step(self, parents_Nk: torch.Tensor, tokens_Nk: torch.Tensor) -> None:
        """Continue each place of the beam from the hypothesis that was at place `parents`, with a token more."""
        for tracker in (self.tracker, self.repetition):
            if tracker is not None:
                tracker.advance(self.state.positions_N, parents_Nk, tokens_Nk)
        self.state.end_step(parents_Nk)

    def keep_slots(self, kept_N: np.ndarray) -> tuple[np.ndarray, torch.Tensor]:
        """Drop the other slots. The last ones move to the places that become free, so that little is copied.

        Returns:
            the old slot of each place, on the host and on the device.
        """
        count = kept_N.sum()
        order = np.arange(count)
        moved = np.flatnonzero(~kept_N[:count])
        order[moved] = count + np.flatnonzero(kept_N[count:])
        order_N = torch.from_numpy(order).to(self.device)
        self.state.keep(order_N, torch.from_numpy(moved).to(self.device))
        for tracker in (self.tracker, self.repetition):
            if tracker is not None:
                tracker.keep(order_N)
        return order, order_N


def _rounded(size: int) -> int:
    return -(-size // _MULTIPLE) * _MULTIPLE


def best_extensions(
    model: DecodingModel,
    hidden_BD: torch.Tensor,
    alive_logp_Nk: torch.Tensor,
    *,
    linear: Linear,
    count: int,
    never: torch.Tensor,
    ends_only_N: torch.Tensor,
    adjust: Adjust | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Select the `count` most probable extensions of each sentence's k hypotheses.

    Extensions of equal probability are ordered by hypothesis, then by token.

    Args:
        model: projects hidden states to logits.
        hidden_BD: hidden states of the hypotheses, sentence-major: (N · k, D).
        alive_logp_Nk: log probability of the hypotheses.
        linear: computes the projection.
        never: tokens that are not chosen; the probabilities of the others stay the model's.
        adjust: changes the log probabilities of all hypotheses; None: nothing does.
        ends_only_N: bool; sentences whose hypotheses have the maximum length and may only take `</s>`.

    Returns:
        Log probability with the extension, hypothesis, token, and whether the hypothesis must end although another
        token is more probable than `</s>`; each of shape (N, count). If there are fewer extensions, the rest has a log
        probability of -inf.
    """
    sentences, beam = alive_logp_Nk.shape
    vocabulary = model.config.output_size
    compiled, count_of_row = adjust is None and _compiles(hidden_BD), min(count, vocabulary)
    rows = max(1, _ELEMENTS["compiled" if compiled else hidden_BD.device.type] // vocabulary)
    found = []
    for row, hidden_RD in enumerate(hidden_BD.split(rows)):
        logits_RV = model.project(hidden_RD, linear)
        if compiled:
            found.append(cpu_kernels.best_tokens(logits_RV, count=count_of_row, never=never, end=EOS_ID))
        else:
            part = slice(row * rows, (row + 1) * rows)
            found.append(_select(logits_RV.float(), count_of_row, never, adjust, part))
    value_BX, token_BX, end_B = (torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*found, strict=True))
    value_NkX, token_NkX = value_BX.view(sentences, beam, -1), token_BX.view(sentences, beam, -1)
    end_Nk = end_B.view(sentences, beam)
    is_cut_Nk = ends_only_N.unsqueeze(1) & (token_NkX[:, :, 0] != EOS_ID)
    value_NkX, token_NkX = _replace_by_ends(value_NkX, token_NkX, end_Nk, ends_only_N)
    # The best of a sentence are among the best of its hypotheses.
    value_NX, order_NX = (value_NkX + alive_logp_Nk.unsqueeze(2)).flatten(1).sort(dim=1, descending=True, stable=True)
    order_Nc = order_NX[:, :count]
    parent_Nc = order_Nc // value_NkX.shape[2]
    token_Nc = token_NkX.flatten(1).gather(1, order_Nc)
    return value_NX[:, :count], parent_Nc, token_Nc, is_cut_Nk.gather(1, parent_Nc)


def _compiles(hidden: torch.Tensor) -> bool:
    return hidden.device.type == "cpu" and cpu_kernels.takes(hidden.dtype)


def _select(
    logits_RV: torch.Tensor, count: int, never: torch.Tensor, adjust: Adjust | None, part: slice
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Do what `cpu_kernels.best_tokens` does, on any device, with log probabilities that are adjusted."""
    logp_RV = torch.log_softmax(logits_RV, dim=-1)
    if adjust is not None:
        logp_RV = adjust(logits_RV, logp_RV, part)
    end_R = logp_RV[:, EOS_ID].clone()
    return *largest(logp_RV.index_fill_(1, never, -torch.inf), count), end_R


def _replace_by_ends(
    value_NkX: torch.Tensor, token_NkX: torch.Tensor, end_Nk: torch.Tensor, ends_only_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Replace the extensions of sentences of maximum length by `</s>` alone."""
    only_end = functional.pad(end_Nk.unsqueeze(2), (0, value_NkX.shape[2] - 1), value=-torch.inf)
    only_token = torch.full_like(token_NkX, PAD_ID)
    only_token[:, :, 0] = EOS_ID
    ends_only_N11 = ends_only_N[:, None, None]
    return torch.where(ends_only_N11, only_end, value_NkX), torch.where(ends_only_N11, only_token, token_NkX)


def largest(values_RV: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Select the `count` largest fp32 values of each row and their places; equal values in order of place.

    Blocks are ordered by their maxima, and by place if these are equal. Each of the first `count` blocks has a value
    that comes before any value of the other blocks, so only these blocks are searched. The host reads no value.
    """
    blocks = values_RV.shape[1] // _BLOCK
    if blocks < 4 * count:
        places_Rc = _order(values_RV, count)
        return values_RV.gather(1, places_Rc), places_Rc
    body_RbX = values_RV[:, : blocks * _BLOCK].unflatten(1, (blocks, _BLOCK))
    chosen_Rc1 = _order(body_RbX.amax(2), count).sort(dim=1).values.unsqueeze(2)
    inside_RcX = body_RbX.gather(1, chosen_Rc1.expand(-1, -1, _BLOCK))
    places_RcX = chosen_Rc1 * _BLOCK + torch.arange(_BLOCK, device=values_RV.device)
    # The end of the vocabulary, which does not fill a block, takes part as a whole.
    tail = torch.arange(blocks * _BLOCK, values_RV.shape[1], device=values_RV.device)
    values = torch.cat([inside_RcX.flatten(1), values_RV[:, blocks * _BLOCK :]], dim=1)
    places = torch.cat([places_RcX.flatten(1), tail.expand(len(values_RV), -1)], dim=1)
    order_Rc = _order(values, count)
    return values.gather(1, order_Rc), places.gather(1, order_Rc)


def _order(values_RX: torch.Tensor, count: int) -> torch.Tensor:
    """Find the places of the largest values, shape (R, count).

    They are compared by distinct int64 keys, because `topk` promises no order among equal values. The bits of fp32
    numbers, read as integers, are in order for positive numbers and in reverse order for negative ones.
    """
    bits = values_RX.contiguous().view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    places = torch.arange(values_RX.shape[1] - 1, -1, -1, device=values_RX.device)
    return ((ordered.long() << 32) + places).topk(count).indices
