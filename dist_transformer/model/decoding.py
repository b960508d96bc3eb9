"""What the decoder remembers while it decodes k hypotheses of each of N sentences.

The keys and values of a token stay where they were computed: at the place of their step, and at the place that its
hypothesis had in the beam then. Search changes places in every step; what changes then is which entries each hypothesis
may see, a mask that is hundreds of times smaller than the caches. All entries of a sentence are the keys of all its
hypotheses at once, so they are read once for all of them.

A step is of all sentences together, so one that begins later begins at a later place; what its slot's last sentence
left is masked. The room grows with the steps, where steps may differ. Where they may not, for CUDA graphs, it is that
of the longest output from the start and is gone round again and again, every step attends to all of it, writes the same
tensors in place, and asks the host for nothing.
"""

from dataclasses import dataclass

import torch

from dist_transformer.model.products import Linear

# Places at first, beyond the length of the sources, where room grows; it grows by half.
_SPARE = 8


@dataclass(slots=True)
class LayerCache:
    """Of one layer: room for C steps, memory of S source tokens."""

    keys_NHCkK: torch.Tensor
    values_NHCkK: torch.Tensor
    memory_keys_NHSK: torch.Tensor
    memory_values_NHSK: torch.Tensor

    def add(self, place: int | torch.Tensor, key_NHkK: torch.Tensor, value_NHkK: torch.Tensor) -> None:
        _write(self.keys_NHCkK, place, key_NHkK)
        _write(self.values_NHCkK, place, value_NHkK)

    def until(self, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values at the first `end` places, two views (N, H, end · k, K)."""
        return self.keys_NHCkK[:, :, :end].flatten(2, 3), self.values_NHCkK[:, :, :end].flatten(2, 3)

    def remember(self, slots_n: torch.Tensor, memory_keys_nHSK: torch.Tensor, memory_values_nHSK: torch.Tensor) -> None:
        """The memory of the sentences in these slots."""
        self.memory_keys_NHSK.index_copy_(0, slots_n, memory_keys_nHSK)
        self.memory_values_NHSK.index_copy_(0, slots_n, memory_values_nHSK)


class DecoderState:
    """Caches of all layers, and what each hypothesis may see of them.

    Args:
        layers: caches of N slots.
        beam_size: k.
        longest: target tokens of a sentence, at most, `<s>` included.
        fixed_shapes: whether all steps are the same work.
        linear: computes the products of each step.
    """

    def __init__(
        self, layers: list[LayerCache], *, beam_size: int, longest: int, fixed_shapes: bool, linear: Linear
    ) -> None:
        self.layers, self.beam_size, self.fixed_shapes, self.linear = layers, beam_size, fixed_shapes, linear
        like = layers[0].memory_keys_NHSK
        slots, _, source_room, _ = like.shape
        self._longest = longest
        # Additive: 0 where a hypothesis may look, -inf where not. An idle slot sees everything, lest it be NaN.
        self.memory_mask_N1S = like.new_zeros(slots, 1, source_room)
        self._history_NkCk = like.new_empty(slots, beam_size, 0, beam_size)
        self._add_room(longest if fixed_shapes else source_room + _SPARE)
        if fixed_shapes:
            # What is masked takes part with weight 0, so it must be finite.
            for held in (self._history_NkCk, *(x for cache in layers for x in (cache.keys_NHCkK, cache.values_NHCkK))):
                held.zero_()
        diagonal = torch.eye(beam_size, dtype=torch.bool, device=like.device)
        self._own_place_kk = torch.zeros_like(diagonal, dtype=like.dtype).masked_fill_(~diagonal, -torch.inf)
        self.positions_N = torch.zeros(slots, dtype=torch.int64, device=like.device)
        """Of the next token of each sentence."""
        self.place: int | torch.Tensor = torch.zeros(1, dtype=torch.int64, device=like.device) if fixed_shapes else 0
        """Where the caches hold the step; of shape (1,), where no step may know it."""
        self.end = longest if fixed_shapes else 0
        """Places to attend to, the step's own included once it has begun."""

    def begin_sentences(self, slots_n: torch.Tensor, memory_mask_n1S: torch.Tensor) -> None:
        """New sentences in these slots, of which nothing is decoded."""
        self.memory_mask_N1S.index_copy_(0, slots_n, memory_mask_n1S)
        self._history_NkCk.index_fill_(0, slots_n, -torch.inf)
        self.positions_N.index_fill_(0, slots_n, 0)

    def begin_step(self) -> torch.Tensor:
        """Let each hypothesis see the token that it gets.

        Returns:
            additive mask of the entries to attend to, shape (N, k, end · k).
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

        The entries of an earlier sentence in the slot, which are masked, have positions below 0, or any below
        `longest` where the room is gone round.
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
        """The hypothesis at each place of the beam goes on from that which was at place `parents`.

        A sentence that is as long as can be stays at its last position: what follows is of no meaning.
        """
        index_NkCk = parents_Nk[:, :, None, None].expand(-1, -1, *self._history_NkCk.shape[2:])
        self._history_NkCk.copy_(self._history_NkCk.gather(1, index_NkCk))
        self.positions_N.add_(1).clamp_(max=self._longest - 1)
        if isinstance(self.place, int):
            self.place += 1
        else:
            self.place.add_(1).remainder_(self._longest)

    def keep(self, order_N: torch.Tensor, moved: torch.Tensor) -> None:
        """Keep the sentences `order`, of which those in the slots `moved` come from behind."""
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
    # An index that the host knows is written in half the time.
    if isinstance(place, int):
        held_NXCkX[:, :, place] = new_NXkX
    else:
        held_NXCkX.index_copy_(2, place, new_NXkX.unsqueeze(2))


def _with_room(held: torch.Tensor, places: int) -> torch.Tensor:
    """The same with more room, dimension 2."""
    room = held.shape[2]
    grown = held.new_empty(*held.shape[:2], room + places, *held.shape[3:])
    grown[:, :, :room] = held
    return grown
