"""What the decoder remembers while it decodes k hypotheses of each of N sentences.

The keys and values of a token stay where they were computed: at their position, and at the place that its hypothesis
had in the beam then. Search changes places in every step; what changes then is which entries each hypothesis may see,
a mask that is hundreds of times smaller than the caches. All entries of a sentence are the keys of all its hypotheses
at once, so they are read once for all of them.
"""

from dataclasses import dataclass

import torch

# Room for positions at first, beyond the length of the sources; where outputs are longer, it grows by half.
_SPARE = 8


@dataclass(slots=True)
class LayerCache:
    """Of one layer: C positions of room, memory of S source tokens."""

    keys_NHCkK: torch.Tensor
    values_NHCkK: torch.Tensor
    memory_keys_NHSK: torch.Tensor
    memory_values_NHSK: torch.Tensor

    def add(self, position: int, key_NHkK: torch.Tensor, value_NHkK: torch.Tensor) -> None:
        self.keys_NHCkK[:, :, position] = key_NHkK
        self.values_NHCkK[:, :, position] = value_NHkK

    def until(self, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the first `end` positions, two views (N, H, end · k, K)."""
        return self.keys_NHCkK[:, :, :end].flatten(2, 3), self.values_NHCkK[:, :, :end].flatten(2, 3)


class DecoderState:
    """Caches of all layers, and what each hypothesis may see of them.

    Args:
        layers: caches without room.
        memory_mask_N1S: additive; -inf for padded source tokens.
        beam_size: k.
    """

    def __init__(self, layers: list[LayerCache], memory_mask_N1S: torch.Tensor, *, beam_size: int) -> None:
        self.layers, self.memory_mask_N1S, self.beam_size = layers, memory_mask_N1S, beam_size
        self.position = 0
        """Tokens of each hypothesis that the caches hold."""
        # Additive; 0 where the token of a hypothesis at a position was computed at that place of the beam.
        self._history_NkCk = memory_mask_N1S.new_empty(len(memory_mask_N1S), beam_size, 0, beam_size)
        diagonal = torch.eye(beam_size, dtype=torch.bool, device=memory_mask_N1S.device)
        self._own_place_kk = torch.zeros_like(diagonal, dtype=memory_mask_N1S.dtype).masked_fill_(~diagonal, -torch.inf)

    def begin_step(self) -> torch.Tensor:
        """Make room for a token of each hypothesis, which sees itself.

        Returns:
            additive mask of all entries, that token's included, shape (N, k, (position + 1) · k).
        """
        room = self._history_NkCk.shape[2]
        if self.position == room:
            more = room // 2 or self.memory_mask_N1S.shape[2] + _SPARE
            for cache in self.layers:
                cache.keys_NHCkK = _with_room(cache.keys_NHCkK, more)
                cache.values_NHCkK = _with_room(cache.values_NHCkK, more)
            self._history_NkCk = _with_room(self._history_NkCk, more)
        self._history_NkCk[:, :, self.position] = self._own_place_kk
        return self._history_NkCk[:, :, : self.position + 1].flatten(2)

    def end_step(self) -> None:
        self.position += 1

    def reorder(self, parents_Nk: torch.Tensor) -> None:
        """The hypothesis at each place goes on from that at place `parents`."""
        index_NkCk = parents_Nk[:, :, None, None].expand(-1, -1, *self._history_NkCk.shape[2:])
        self._history_NkCk = self._history_NkCk.gather(1, index_NkCk)

    def keep(self, order_N: torch.Tensor, moved: torch.Tensor) -> None:
        """Keep the sentences `order`, of which those at the places `moved` come from behind."""
        count, origins = len(order_N), order_N[moved]
        for cache in self.layers:
            for name in ("keys_NHCkK", "values_NHCkK", "memory_keys_NHSK", "memory_values_NHSK"):
                held = getattr(cache, name)
                held[moved] = held[origins]
                setattr(cache, name, held[:count])
        self.memory_mask_N1S, self._history_NkCk = self.memory_mask_N1S[order_N], self._history_NkCk[order_N]


def _with_room(held: torch.Tensor, more: int) -> torch.Tensor:
    """The same with `more` positions, dimension 2, which nobody reads before they are written."""
    room = held.shape[2]
    grown = held.new_empty(*held.shape[:2], room + more, *held.shape[3:])
    grown[:, :, :room] = held
    return grown
