"""Residual connections (section 3.1). On a CPU compiled code computes those of the paper.

post-norm (the paper):  x = LayerNorm(x + Dropout(Sublayer(x)))
pre-norm:               x = x + Dropout(Sublayer(LayerNorm(x)))
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from dist_transformer.config.settings import ModelConfig
from dist_transformer.model import cpu_kernels
from dist_transformer.model.dropout import dropout, random_bits


class Residual(nn.Module):
    """Residual connection of a sublayer, in the order that `norm` names."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = (nn.LayerNorm if config.norm == "pre" else PostNorm)(config.width, config.norm_epsilon)
        self.dropout = config.dropout

    def forward(self, x: torch.Tensor, sublayer: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        if isinstance(self.norm, PostNorm):
            return self.norm(x, sublayer(x), self.dropout)
        return x + dropout(sublayer(self.norm(x)), self.dropout, self.training)


class PostNorm(nn.LayerNorm):
    """Normalisation of x + Dropout(y)."""

    def forward(self, x: torch.Tensor, y: torch.Tensor, p: float) -> torch.Tensor:  # type: ignore[override]
        if x.device.type != "cpu" or not self._is_compiled_for(x, y):
            return super().forward(x + dropout(y, p, self.training))
        p = p if self.training else 0.0
        return cast(torch.Tensor, _AddAndNormalise.apply(x, y, self.weight, self.bias, p, self.eps))

    def _is_compiled_for(self, x: torch.Tensor, y: torch.Tensor) -> bool:
        # Each call takes longer than two operators, which matters for the few rows of a step of decoding. torch.compile
        # fuses the operators itself.
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return False
        return x.dtype == y.dtype == self.weight.dtype and cpu_kernels.takes(x.dtype)


class _AddAndNormalise(torch.autograd.Function):
    """Compiled form of `PostNorm`, with the random numbers of `dropout` and sums in fp32."""

    @staticmethod
    def forward(
        ctx: Any, x_TD: torch.Tensor, y_TD: torch.Tensor, gain: torch.Tensor, bias: torch.Tensor, p: float, eps: float
    ) -> torch.Tensor:
        x_TD, y_TD, ctx.keep = x_TD.contiguous(), y_TD.contiguous(), cpu_kernels.Keep.all_but(p)
        bits_TD = random_bits(y_TD.shape) if p > 0 else None
        out_TD, *statistics = cpu_kernels.add_and_normalise(x_TD, y_TD, bits_TD, gain, bias, ctx.keep, epsilon=eps)
        ctx.save_for_backward(x_TD, y_TD, bits_TD, gain, *statistics)
        return out_TD

    @staticmethod
    def backward(ctx: Any, gradient_TD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_TD, y_TD, bits_TD, gain, means_T, factors_T = ctx.saved_tensors
        kept = (x_TD, y_TD, bits_TD, gain, means_T, factors_T, ctx.keep)
        return *cpu_kernels.return_normalised(gradient_TD, *kept), None, None
