"""Adam for ZeRO stage 0, where every rank updates every parameter and DeepSpeed only sums the gradients."""

from typing import Any

import torch
from torch import nn

from dist_transformer.training.engine import internals
from dist_transformer.training.engine.gradient_sums import accumulate_in_fp32
from dist_transformer.training.engine.muon import Muon


class PlainAdam(Muon):
    """AdamW or Muon in fp32 that skips a step whose gradient is not finite, and clips other gradients.

    The host does not wait to learn which.

    DeepSpeed's own bf16 wrapper at stage 0 sums gradients in bf16 and refuses fp32 sums. DeepSpeed treats this class as
    a plain fp32 optimizer, also after `keep_masters` has rounded the model.

    `_global_grad_norm` is the name that DeepSpeed's engine reads after a step.

    Args:
        groups: parameter groups of a model in fp32.
        max_grad_norm: norm to which longer gradients are clipped; 0 disables clipping.
        settings: keyword arguments of `Muon`.
    """

    def __init__(self, groups: list[dict[str, Any]], *, max_grad_norm: float, **settings: Any) -> None:
        super().__init__(groups, **settings)
        self.parameters: list[torch.Tensor] = [p for group in self.param_groups for p in group["params"]]
        self.masters = self.parameters
        """Tensors that Adam updates, in the order of `parameters`."""
        self.max_grad_norm = max_grad_norm
        self._global_grad_norm: torch.Tensor | float = 0.0

    def keep_masters(self) -> None:
        """Round the model's parameters to bf16 and update fp32 copies of them; gradients are accumulated in fp32.

        Call it before the first step, with the model on its device.
        """
        for group in self.param_groups:
            group["params"] = [p.detach().clone() for p in group["params"]]
        self.masters = [p for group in self.param_groups for p in group["params"]]
        for parameter in self.parameters:
            parameter.data = parameter.data.bfloat16()
            accumulate_in_fp32(parameter)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        rounded = self.masters is not self.parameters
        if rounded:
            for master, parameter in zip(self.masters, self.parameters, strict=True):
                master.grad = parameter.grad if parameter.grad is not None else master.grad
        gradients = [master.grad for master in self.masters if master.grad is not None]
        self._global_grad_norm = norm = nn.utils.get_total_norm(gradients)
        self.found_inf = internals.found_inf(norm)
        if self.max_grad_norm > 0:
            internals.scale_all(gradients, (self.max_grad_norm / (norm.double() + 1e-6)).clamp(max=1.0).float())
        super().step(closure)
        if rounded:
            internals.copy_all(self.parameters, self.masters)
            for master in self.masters:
                master.grad = None
