"""Matrix products with weights: x W^T + b.

Training: on a CPU in bf16, torch writes the bias to the output before the product and applies a ReLU after it. oneDNN
does both inside the product.

Inference: weights stay the same for thousands of products, mostly of few rows. oneDNN reads a weight faster from a
layout of its own: a packed weight. With AVX-512, packed weights reach 1.05 to 1.5 times the rate of plain ones in fp32,
and 1.3 to 2.6 times in bf16 (16 to 256 rows, Intel Xeon with AMX). With AVX2 alone they are slower. The choice depends
only on the processor and the shape, never on a timing, so every run on a machine computes the same.

torch does not document these operators, but its compiler calls them. If a version lacks them, weights stay plain.

In int8, each row of x and each row of W is integers from -127 to 127 times a factor of its own. The sums of their
products are exact, so the result of a row does not depend on other rows. With AVX-512-VNNI such a product takes 0.5 to
0.8 of the time of one in bf16 (16 to 256 rows; one core of an AMD EPYC with AVX-512-bf16, 2026-11-28).
"""

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from dist_transformer.model import cpu_kernels

Linear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""Function from (x, W, b) to x W^T + b: `functional.linear`, or the `Products` of decoding."""

# Smaller weights stay in the cache in any layout, and oneDNN's calls cost more than they gain.
_LEAST_ELEMENTS = 2**17
# Number of rows that the layout is optimised for.
_ROWS = 64
# From this many tokens and elements of the weight on, a separate transpose makes the gradient of a weight cheaper. With
# 2,048 tokens, weights of 512 x 2,048 and 2,048 x 512 elements take 4.9 and 4.5 ms instead of 7.7 and 8.2. With 512
# tokens, or 256 x 256 elements, it takes longer (one core of an Intel Xeon with AMX, caches cold, 2026-11-24).
_LARGE_ROWS, _LARGE_WEIGHT = 1024, 2**19


def linear(
    x_TX: torch.Tensor, weight_YX: torch.Tensor, bias_Y: torch.Tensor | None, *, relu: bool = False
) -> torch.Tensor:
    """Return x W^T + b, shape (T, Y), or the maximum of that and 0."""
    if bias_Y is not None and _is_fused(x_TX, weight_YX):
        return cast(torch.Tensor, _LinearInOneDNN.apply(x_TX, weight_YX, bias_Y, relu))
    y_TY = functional.linear(x_TX, weight_YX, bias_Y)
    return functional.relu(y_TY, inplace=True) if relu else y_TY


class FusedLinear(nn.Linear):
    """`nn.Linear` computed by `linear`."""

    def forward(self, x_TX: torch.Tensor, *, relu: bool = False) -> torch.Tensor:
        return linear(x_TX, self.weight, self.bias, relu=relu)


def _is_fused(x: torch.Tensor, weight: torch.Tensor) -> bool:
    if x.device.type != "cpu" or not x.dtype == weight.dtype == torch.bfloat16:
        return False
    # torch.compile fuses the operators itself. Without gradients `Products` computes what takes long.
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    return torch.bfloat16 in _supported() and cpu_kernels.takes(torch.bfloat16)


class _LinearInOneDNN(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TX: torch.Tensor, weight_YX: torch.Tensor, bias_Y: torch.Tensor, relu: bool
    ) -> torch.Tensor:
        y_TY: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x_TX, weight_YX, bias_Y, "relu" if relu else "none", [], ""
        )
        ctx.save_for_backward(x_TX, weight_YX, *([y_TY] if relu else []))
        return y_TY

    @staticmethod
    def backward(ctx: Any, gradient_TY: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_TX, weight_YX, *relu = ctx.saved_tensors
        gradient_TY, grad_bias_Y = cpu_kernels.return_bias(gradient_TY, *relu)
        grad_weight_YX = _weight_gradient(gradient_TY, x_TX)
        return gradient_TY @ weight_YX, grad_weight_YX, grad_bias_Y.to(gradient_TY.dtype), None


def _weight_gradient(gradient_TY: torch.Tensor, x_TX: torch.Tensor) -> torch.Tensor:
    """Compute gradient^T x.

    With AMX, oneDNN takes up to twice as long for a product whose first factor it must transpose itself, so the
    narrower of the two is transposed before a large product.
    """
    is_large = len(x_TX) >= _LARGE_ROWS and x_TX.shape[1] * gradient_TY.shape[1] >= _LARGE_WEIGHT
    if not is_large or not _has_amx():
        return gradient_TY.t() @ x_TX
    if gradient_TY.shape[1] <= x_TX.shape[1]:
        return cpu_kernels.transposed(gradient_TY) @ x_TX
    return cpu_kernels.transposed(cpu_kernels.transposed(x_TX.contiguous()) @ gradient_TY)


class Products:
    """Linear maps with constant weights. A weight is packed at its first use, and again after an in-place change.

    A change through `weight.data`, as DeepSpeed's optimizers make it, is not detected: create a new `Products` then.

    Args:
        in_int8: whether to multiply in int8.
    """

    def __init__(self, *, in_int8: bool = False) -> None:
        self._in_int8 = in_int8
        # The key is the address and shape of a weight, which differ between slices of one parameter. The entry keeps
        # the weight alive, so that no other tensor gets its address. In int8 a weight is packed with its factors.
        self._packed: dict[tuple[int, torch.Size], tuple[torch.Tensor, int, tuple[torch.Tensor, ...]]] = {}

    def __call__(self, x_BX: torch.Tensor, weight_YX: torch.Tensor, bias_Y: torch.Tensor | None = None) -> torch.Tensor:
        """Return x W^T + b, shape (B, Y)."""
        if self._in_int8:
            weight_XY, factors_Y = self._pack(weight_YX)
            x_BX8, factors_B = cpu_kernels.quantise(x_BX.contiguous())
            return cpu_kernels.scale_sums(torch._int_mm(x_BX8, weight_XY), factors_B, factors_Y, bias_Y, x_BX.dtype)
        if weight_YX.numel() < _LEAST_ELEMENTS or not _gains(weight_YX):
            return functional.linear(x_BX, weight_YX, bias_Y)
        (packed,) = self._pack(weight_YX)
        found: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x_BX, packed, bias_Y, "none", [], "")
        return found

    def _pack(self, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        key, version = (weight.data_ptr(), weight.shape), -1 if weight.is_inference() else weight._version
        _, packed_version, packed = self._packed.get(key, (weight, None, ()))
        if packed_version != version:
            packed = self._packed_now(weight.detach())
            self._packed[key] = weight, version, packed
        return packed

    def _packed_now(self, weight_YX: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self._in_int8:
            weight_YX, factors_Y = cpu_kernels.quantise(weight_YX.contiguous())
            return weight_YX.t().contiguous(), factors_Y
        return (torch.ops.mkldnn._reorder_linear_weight(weight_YX, _ROWS),)


class ComputedBy(TorchFunctionMode):
    """Context in which another function computes what calls `functional.linear`, such as the layers of torch."""

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self._linear = linear

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        return (self._linear if function is functional.linear else function)(*arguments, **named or {})


def _gains(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    return weight.dtype in _supported()


@functools.cache
def _has_amx() -> bool:
    """Return whether the processor has matrix units, which make other work a large share of the time."""
    return bool(getattr(torch.cpu, "_is_amx_tile_supported", bool)())


@functools.cache
def _supported() -> tuple[torch.dtype, ...]:
    """Return the precisions in which oneDNN's operators can be called."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return ()
    has_bf16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return (torch.float32, torch.bfloat16) if has_bf16 else (torch.float32,)
