"""State of the decoder while it decodes k hypotheses for each of N sentences.

The keys and values of a token are never moved. They stay at the place of their step, and at the place that their
hypothesis had in the beam at that step. Beam search reorders hypotheses in every step; only a mask changes then, which
says which entries each hypothesis sees and is hundreds of times smaller than the caches. All hypotheses of a sentence
share all entries of that sentence as keys, so the entries are read once for all of them.

One step decodes all sentences together, so a sentence that begins later begins at a later place. The entries that the
previous sentence of its slot left are masked. If shapes may differ between steps, the caches grow with the steps. If
they may not (CUDA graphs), the caches have room for the longest output from the start and serve as a ring buffer: every
step attends to all of it, writes the same tensors in place, and does not synchronise with the host.
"""

from dataclasses import dataclass

import torch

from dist_transformer.model.products import Linear

# Initial places beyond the length of the sources if the caches grow; they grow by half.
_SPARE = 8


@dataclass(slots=True)
class LayerCache:
    """Cache of one layer: room for C steps, and the memory of S source tokens."""

    keys_NHCkK: torch.Tensor
    values_NHCkK: torch.Tensor
    memory_keys_NHSK: torch.Tensor
    memory_values_NHSK: torch.Tensor

    def add(self, place: int | torch.Tensor, key_NHkK: torch.Tensor, value_NHkK: torch.Tensor) -> None:
        """Store a step's keys and values; those of one hypothesis per sentence are stored for all."""
        _write(self.keys_NHCkK, place, key_NHkK)
        _write(self.values_NHCkK, place, value_NHkK)

    def until(self, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values at the first `end` places, two views (N, H, end · k, K)."""
        return self.keys_NHCkK[:, :, :end].flatten(2, 3), self.values_NHCkK[:, :, :end].flatten(2, 3)

    def remember(
        self, slots_T: torch.Tensor, positions_T: torch.Tensor, keys_THK: torch.Tensor, values_THK: torch.Tensor
    ) -> None:
        """Store the memory of source tokens, each at its position in its slot."""
        self.memory_keys_NHSK.transpose(1, 2)[slots_T, positions_T] = keys_THK
        self.memory_values_NHSK.transpose(1, 2)[slots_T, positions_T] = values_THK


class DecoderState:
    """Caches of all layers, and the mask of the entries that each hypothesis sees.

    Args:
        layers: caches of N slots.
        beam_size: k.
        longest: maximum target tokens per sentence, `<s>` included.
        fixed_shapes: whether all steps have the same shapes.
        linear: computes the matrix products of each step.
    """

    def __init__(
        self, layers: list[LayerCache], *, beam_size: int, longest: int, fixed_shapes: bool, linear: Linear
    ) -> None:
        self.layers, self.beam_size, self.fixed_shapes, self.linear = layers, beam_size, fixed_shapes, linear
        like = layers[0].memory_keys_NHSK
        slots, _, source_room, _ = like.shape
        self._longest = longest
        # Additive: 0 where a hypothesis sees the entry, -inf elsewhere. An idle slot sees everything, because a row
        # of -inf only would give NaN.
        self.memory_mask_N1S = like.new_zeros(slots, 1, source_room)
        self._history_NkCk = like.new_empty(slots, beam_size, 0, beam_size)
        self._add_room(longest if fixed_shapes else source_room + _SPARE)
        if fixed_shapes:
            # Masked entries take part with weight 0, so they must be finite.
            for held in (self._history_NkCk, *(x for cache in layers for x in (cache.keys_NHCkK, cache.values_NHCkK))):
                held.zero_()
        diagonal = torch.eye(beam_size, dtype=torch.bool, device=like.device)
        self._own_place_kk = torch.zeros_like(diagonal, dtype=like.dtype).masked_fill_(~diagonal, -torch.inf)
        self.positions_N = torch.zeros(slots, dtype=torch.int64, device=like.device)
        """Position of the next token of each sentence."""
        self.place: int | torch.Tensor = torch.zeros(1, dtype=torch.int64, device=like.device) if fixed_shapes else 0
        """Place of the current step in the caches; a tensor of shape (1,) if shapes are fixed, so that the host need
        not know it."""
        self.end = longest if fixed_shapes else 0
        """Number of places to attend to; includes the place of the current step once the step has begun."""

    def begin_sentences(self, slots_n: torch.Tensor, source_lengths_n: torch.Tensor) -> None:
        """Put new sentences, with nothing decoded yet, into these slots."""
        places_S = torch.arange(self.memory_mask_N1S.shape[2], device=slots_n.device)
        mask_nS = self.memory_mask_N1S.new_zeros(len(slots_n), len(places_S))
        mask_nS.masked_fill_(places_S >= source_lengths_n.unsqueeze(1), -torch.inf)
        self.memory_mask_N1S.index_copy_(0, slots_n, mask_nS.unsqueeze(1))
        self._history_NkCk.index_fill_(0, slots_n, -torch.inf)
        self.positions_N.index_fill_(0, slots_n, 0)

    def begin_step(self) -> torch.Tensor:
        """Make the new token of each hypothesis visible to that hypothesis.

        Returns:
            Additive mask of the entries to attend to, shape (N, k, end · k).
        """
        if not self.fixed_shapes:
            room = self._history_NkCk.shape[2]
            if self.end == room:
                self._add_room(room // 2)
            self.end += 1
        _write(self._history_NkCk, self.place, self._own_place_kk.expand(len(self._history_NkCk), -1, -1))
        return self._history_NkCk[:, :, : self.end].flatten(2)

    def places_in_history(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the positions of this step's tokens, shape (N,), and of the entries to attend to, (N, end · k).

        The entries that an earlier sentence left in the slot are masked. Their positions are negative, or, in a ring
        buffer, any number below `longest`.
        """
        ago_C = self.place - torch.arange(self.end, device=self.positions_N.device)
        if self.fixed_shapes:
            ago_C = ago_C.remainder(self._longest)
        entries_NC = self.positions_N.unsqueeze(1) - ago_C
        return self.positions_N, entries_NC.repeat_interleave(self.beam_size, dim=1)

    def places_in_memory(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the positions of this step's tokens, shape (N,), and of source tokens, (1, S)."""
        source_room = self.memory_mask_N1S.shape[2]
        return self.positions_N, torch.arange(source_room, device=self.positions_N.device).unsqueeze(0)

    def end_step(self, parents_Nk: torch.Tensor) -> None:
        """Continue each place of the beam from the hypothesis that was at place `parents`.

        A sentence of maximum length stays at its last position; its further steps have no meaning.
        """
        index_NkCk = parents_Nk[:, :, None, None].expand(-1, -1, *self._history_NkCk.shape[2:])
        self._history_NkCk.copy_(self._history_NkCk.gather(1, index_NkCk))
        self.positions_N.add_(1).clamp_(max=self._longest - 1)
        if isinstance(self.place, int):
            self.place += 1
        else:
            self.place.add_(1).remainder_(self._longest)

    def keep(self, order_N: torch.Tensor, moved: torch.Tensor) -> None:
        """Keep the sentences `order`, and move the caches of those that get another slot.

        Args:
            order_N: old slots of the sentences kept, by new slot.
            moved: the new slots whose sentence comes from another slot.
        """
        count, origins = len(order_N), order_N[moved]
        for cache in self.layers:
            for name in ("keys_NHCkK", "values_NHCkK", "memory_keys_NHSK", "memory_values_NHSK"):
                held = getattr(cache, name)
                held[moved] = held[origins]
                setattr(cache, name, held[:count])
        self.memory_mask_N1S, self._history_NkCk = self.memory_mask_N1S[order_N], self._history_NkCk[order_N]
        self.positions_N = self.positions_N[order_N]

    def _add_room(self, places: int) -> None:
        for cache in self.layers:
            cache.keys_NHCkK = _with_room(cache.keys_NHCkK, places)
            cache.values_NHCkK = _with_room(cache.values_NHCkK, places)
        self._history_NkCk = _with_room(self._history_NkCk, places)


def _write(held_NXCkX: torch.Tensor, place: int | torch.Tensor, new_NXkX: torch.Tensor) -> None:
    # Writing at an index that the host knows takes half the time.
    if isinstance(place, int):
        held_NXCkX[:, :, place] = new_NXkX
    else:
        held_NXCkX.index_copy_(2, place, new_NXkX.unsqueeze(2))


def _with_room(held: torch.Tensor, places: int) -> torch.Tensor:
    """Return a copy with `places` more places in dimension 2."""
    room = held.shape[2]
    grown = held.new_empty(*held.shape[:2], room + places, *held.shape[3:])
    grown[:, :, :room] = held
    return grown
