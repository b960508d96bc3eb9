"""Muon for the matrices of encoder and decoder, Adam for the rest (Jordan et al. 2024, Liu et al. 2025).

Muon's update is the momentum with all its singular values moved to about 1. That takes a whole matrix, of which a rank
has only a part at stages 1 to 3: there the ranks exchange what they have, and each computes the matrices of its part.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dist_transformer.runtime import distributed
from dist_transformer.training.engine import internals

# Jordan's polynomial of degree 5, which moves the singular values of [0, 1] to about [0.7, 1.2] in five iterations.
_A, _B, _C, _ITERATIONS = 3.4445, -4.7750, 2.0315, 5
# Root mean square of an update at a rate of 1, which is about that of Adam, so that both have one rate (Liu et al.).
_RMS = 0.2
_TINY = 1e-7


@dataclass(frozen=True, slots=True)
class FlatMatrices:
    """The matrices in a flat tensor of ZeRO, of which each rank has an equal part, one after another."""

    lanes: int
    """Rows of a table that holds the whole flat tensor. 1 at stages 1 and 2, where a matrix is in one place; as many as
    ranks at stage 3, where each rank has a piece of every matrix."""
    places: tuple[tuple[int, tuple[int, ...]], ...]
    """First column and shape of each matrix that this rank has a part of."""


class Muon(torch.optim.AdamW):
    """AdamW, but Muon for the parameter groups that have a `momentum`.

    A matrix W with the gradient G is updated by
        M += (1 - momentum) · (G - M);  W -= rate · (weight_decay · W + 0.2 · √max(rows, columns) · orthogonal(N))
    where N = G + momentum · (M - G), Nesterov's momentum. M is the state `exp_avg`.

    Args:
        dtype: type of numbers in which matrices are orthogonalised.
        settings: keyword arguments of `torch.optim.AdamW`.
    """

    def __init__(self, groups: list[dict[str, Any]], *, dtype: torch.dtype = torch.float32, **settings: Any) -> None:
        super().__init__(groups, **settings)
        self.dtype = dtype
        self.flat: dict[torch.Tensor, FlatMatrices] = {}
        """Flat tensors in place of matrices, at stages 1 to 3."""
        self.found_inf: torch.Tensor | None = None
        """1 if the step must change nothing, 0 otherwise, fp32, shape (); AdamW reads it under this name, too."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        groups = self.param_groups
        for group in groups:
            if "momentum" in group and group["params"]:
                self._step_matrices(group)
        self.param_groups = [group for group in groups if "momentum" not in group]
        try:
            super().step(closure)
        finally:
            self.param_groups = groups

    def _step_matrices(self, group: dict[str, Any]) -> None:
        weights, momentum = group["params"], group["momentum"]
        gradients, means = [p.grad for p in weights], [self.state[p]["exp_avg"] for p in weights]
        if momentum > 0:
            # M += (1 - momentum) · (G - M) and G += momentum ÷ (1 - momentum) · M, which is N ÷ (1 - momentum): its
            # length has no meaning.
            ahead = {"means": means, "momentum": momentum, "rate": -momentum / (1 - momentum)}
            internals.descend_all(gradients, gradients, **ahead, found_inf=self.found_inf)
        if self.flat:
            updates = [self._own_part(self.flat[p], part) for p, part in zip(weights, gradients, strict=True)]
        else:
            updates = orthogonalised(gradients, self.dtype)
        decay = {"rate": group["lr"], "weight_decay": group["weight_decay"]}
        internals.descend_all(weights, updates, **decay, found_inf=self.found_inf)

    def _own_part(self, matrices: FlatMatrices, part: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the updates. Collective: every rank must call it."""
        table = distributed.all_gather_flat(part.to(self.dtype)).view(matrices.lanes, -1)
        columns = [slice(first, first - -math.prod(shape) // matrices.lanes) for first, shape in matrices.places]
        pieces = [table[:, place].reshape(-1) for place in columns]
        found = [
            piece[: math.prod(shape)].view(shape) for piece, (_, shape) in zip(pieces, matrices.places, strict=True)
        ]
        updates = torch.zeros_like(table, dtype=part.dtype)
        for place, update in zip(columns, orthogonalised(found, self.dtype), strict=True):
            filled = matrices.lanes * (place.stop - place.start) - update.numel()
            updates[:, place] = nn.functional.pad(update.flatten(), (0, filled)).view(matrices.lanes, -1)
        return updates.view(-1, len(part))[distributed.rank()]


def orthogonalised(matrices: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """Return 0.2 · √max(rows, columns) · U·Vᵀ, about, for each matrix U·S·Vᵀ. Matrices of one shape are one product.

    Args:
        dtype: type of numbers in which it computes.

    Returns:
        the updates in fp32.
    """
    alike: dict[tuple[int, int], list[int]] = {}
    for number, matrix in enumerate(matrices):
        alike.setdefault((min(matrix.shape), max(matrix.shape)), []).append(number)
    updates: dict[int, torch.Tensor] = {}
    for (_, longest), numbers in alike.items():
        # The product of a matrix and its transpose is smallest if it has fewer rows than columns.
        lies = [matrices[number].shape[1] == longest for number in numbers]
        rows = zip(numbers, lies, strict=True)
        x = torch.stack([matrices[number] if lie else matrices[number].mT for number, lie in rows]).to(dtype)
        # Rounded before, so that an exchange of rounded parts changes nothing.
        x.div_(torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True, dtype=torch.float32) + _TINY)
        for _ in range(_ITERATIONS):
            product = x @ x.mT
            x = torch.baddbmm(x, torch.baddbmm(product, product, product, beta=_B, alpha=_C), x, beta=_A)
        x = x.float() * (_RMS * math.sqrt(longest))
        standing = x if all(lies) else x.mT.contiguous()
        for place, (number, lie) in enumerate(zip(numbers, lies, strict=True)):
            updates[number] = (x if lie else standing)[place]
    return [updates[number] for number in range(len(matrices))]
