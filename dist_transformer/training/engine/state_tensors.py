"""Weights and moments as one fp32 tensor per parameter, read and written at every ZeRO stage."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from dist_transformer.cost.memory import SAVED_AT_ONCE
from dist_transformer.runtime import distributed
from dist_transformer.training.engine import internals
from dist_transformer.training.engine.plain_adam import PlainAdam

WEIGHT = "weight"
"""Key of the weight among the tensors of a parameter, next to MOMENTS and EMA."""
Reader = Callable[[nn.Parameter, str], torch.Tensor]
"""Function from a parameter and a key to the whole tensor, flat or in its shape, in fp32."""


def make_state_tensors(
    zero_optimizer: Any, stage: int, device: torch.device
) -> "Masters | FlatPartitions | Partitions":
    """Make the access to the tensors of this stage; at stage 0 the optimizer is a `PlainAdam`."""
    if isinstance(zero_optimizer, PlainAdam):
        return Masters(zero_optimizer)
    return Partitions() if stage == 3 else FlatPartitions(zero_optimizer, device)


class Masters:
    """Weights and moments at stage 0, where each rank has all of them."""

    def __init__(self, optimizer: PlainAdam) -> None:
        self._of = {id(p): master for p, master in zip(optimizer.parameters, optimizer.masters, strict=True)}
        self._state = optimizer.state

    def reader(self) -> Reader:
        return self._tensor

    def set(self, parameter: nn.Parameter, key: str, value: torch.Tensor) -> None:
        self._tensor(parameter, key).data.copy_(value)

    def _tensor(self, parameter: nn.Parameter, key: str) -> torch.Tensor:
        master = self._of[id(parameter)]
        return master if key == WEIGHT else self._state[master][key]


class FlatPartitions:
    """Weights and moments at stages 1 and 2, where each rank has a part of flat tensors."""

    def __init__(self, zero_optimizer: Any, device: torch.device) -> None:
        self._zero, self._device, self._access = zero_optimizer, device, internals.tensor_access()

    def reader(self) -> Reader:
        """Return a function that gathers pieces of the flat tensors: far fewer collectives than parameters.

        Reading is a collective, and each piece is gathered once if parameters are read in their order. A tensor is a
        view of a piece, of which there is one at a time for each kind of tensor.
        """
        flat = internals.flat_tensors(self._zero)
        parts = [(places, {WEIGHT: part.detach(), **self._zero.optimizer.state[part]}) for places, part in flat]
        places = {id(p): (number, at) for number, (of, _) in enumerate(parts) for p, at in of.items()}
        pieces: dict[tuple[int, str], torch.Tensor] = {}
        firsts: dict[tuple[int, str], int] = {}

        def read(parameter: nn.Parameter, key: str) -> torch.Tensor:
            number, start = places[id(parameter)]
            of, end = (number, key), start + parameter.numel()
            if of not in pieces or not firsts[of] <= start < end <= firsts[of] + len(pieces[of]):
                # It is freed before the next one is allocated.
                pieces.pop(of, None)
                firsts[of], last = start, max(end, start + SAVED_AT_ONCE)
                pieces[of] = distributed.gather_piece(parts[number][1][key], start, last, self._device)
            return pieces[of][start - firsts[of] : end - firsts[of]]

        return read

    def set(self, parameter: nn.Parameter, key: str, value: torch.Tensor) -> None:
        if key == WEIGHT:
            self._access.safe_set_full_fp32_param(parameter, value)
        else:
            self._access.safe_set_full_optimizer_state(parameter, value, key)


class Partitions:
    """Weights and moments at stage 3, where each rank has a part of each. Reading is a collective."""

    def __init__(self) -> None:
        self._access = internals.tensor_access()

    def reader(self) -> Reader:
        return self._tensor

    def _tensor(self, parameter: nn.Parameter, key: str) -> torch.Tensor:
        whole: torch.Tensor
        if key == WEIGHT:
            whole = self._access.safe_get_full_fp32_param(parameter)
        else:
            whole = self._access.safe_get_full_optimizer_state(parameter, key)
        return whole

    def set(self, parameter: nn.Parameter, key: str, value: torch.Tensor) -> None:
        if key == WEIGHT:
            self._access.safe_set_local_fp32_param(parameter, _own_part(parameter, value))
        else:
            self._access.safe_set_local_optimizer_state(parameter, _own_part(parameter, value), key)


def _own_part(parameter: nn.Parameter, value: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a ZeRO-3 parameter's full value.

    DeepSpeed pads parameters to a multiple of the ranks, but not the full tensors written to them: all parts have equal
    size, so the last are padded.
    """
    size = internals.part_size(parameter)
    part = value.flatten()[size * distributed.rank() :][:size]
    return nn.functional.pad(part, (0, size - part.numel()))
