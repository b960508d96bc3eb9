"""Attention over packed sentences as custom operators of torch, which torch.compile does not change.

Our own kernels compute them: `gpu_kernels` for short sentences, and `cpu_kernels`.

Shapes are those that the projections write: queries (T, H, K), keys and values (S, 2, H, K), or all three together in
self-attention, (T, 3, H, K). Offsets are as in `PackedTokens`. Results equal those of `torch.nn.attention.varlen` up to
rounding.
"""

import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from dist_transformer.base.errors import logger
from dist_transformer.model import cpu_kernels

# Rows and columns of a tile, and warps that compute it. Milliseconds of forward and backward pass for 25k tokens,
# causal, in 16 heads of 64, at 13, 29, 60 and 128 tokens per sentence (H100, 2026-11-23): 0.72, 0.70, 0.74, 0.83.
# Tiles of 64 with 4 warps: 1.02, 0.73, 0.66. Tiles of 16 with 1 warp: 0.61, 0.91, 1.06, 1.28. FlashAttention 2: 5.46,
# 3.66, 2.83, 2.80.
_TILES = {"B": 32, "num_warps": 4, "num_stages": 1}
_WIDTHS = (16, 32, 64, 128)


def gpu_takes(head_width: int) -> bool:
    """Return whether the GPU kernels support heads of this width and can be compiled here."""
    return head_width in _WIDTHS and _compiles(head_width)


@functools.cache
def _compiles(head_width: int) -> bool:
    """Try once whether Triton can compile the kernels: it needs a C compiler and Python's headers at run time."""
    if importlib.util.find_spec("triton") is None:
        return False
    offsets = torch.tensor([0, 1], dtype=torch.int32, device="cuda")
    q, k, v = torch.zeros(3, 1, 1, head_width, dtype=torch.bfloat16, device="cuda")
    try:
        _forward((q, k, v), (offsets, offsets), causal=False)
    # Triton does not document the errors that it raises if it cannot compile.
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        logger.warning(
            f"note: kernels for short sentences cannot be compiled ({reason:.120}), so attention is slower: install a "
            "C compiler and Python's headers (Debian and Ubuntu: apt-get install gcc python3-dev)"
        )
        return False
    return True


def self_attention(qkv_T3HK: torch.Tensor, offsets_N: torch.Tensor, *, causal: bool) -> torch.Tensor:
    """Let each sentence attend to itself. Shape: (T, H, K)."""
    return cast(torch.Tensor, _OPERATORS.self_attention(qkv_T3HK, offsets_N, causal)[0])


def cross_attention(
    q_THK: torch.Tensor, kv_S2HK: torch.Tensor, query_offsets_N: torch.Tensor, key_offsets_N: torch.Tensor
) -> torch.Tensor:
    """Let sentence i of the queries attend to sentence i of the keys. Shape: (T, H, K)."""
    return cast(torch.Tensor, _OPERATORS.cross_attention(q_THK, kv_S2HK, query_offsets_N, key_offsets_N)[0])


def _self_attention(qkv: torch.Tensor, offsets: torch.Tensor, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output, and the sums of the softmax, which the backward pass needs (see the kernels)."""
    return _forward(qkv.unbind(1), (offsets, offsets), causal=causal)


def _self_attention_backward(
    gradient: torch.Tensor,
    qkv: torch.Tensor,
    out: torch.Tensor,
    sums: torch.Tensor,
    offsets: torch.Tensor,
    causal: bool,
) -> torch.Tensor:
    result = _like(qkv)
    _backward(gradient, qkv.unbind(1), out, sums, result.unbind(1), (offsets, offsets), causal=causal)
    return result


def _cross_attention(
    q: torch.Tensor, kv: torch.Tensor, query_offsets: torch.Tensor, key_offsets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return _forward((q, *kv.unbind(1)), (query_offsets, key_offsets), causal=False)


def _cross_attention_backward(
    gradient: torch.Tensor,
    q: torch.Tensor,
    kv: torch.Tensor,
    out: torch.Tensor,
    sums: torch.Tensor,
    query_offsets: torch.Tensor,
    key_offsets: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    dq, dkv = _like(q), _like(kv)
    inputs, results = (q, *kv.unbind(1)), (dq, *dkv.unbind(1))
    _backward(gradient, inputs, out, sums, results, (query_offsets, key_offsets), causal=False)
    return dq, dkv


def _like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _forward(
    inputs: Sequence[torch.Tensor], offsets: Sequence[torch.Tensor], *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, _ = inputs
    # Triton's interpreter takes the other types of a CPU.
    if q.device.type == "cpu" and cpu_kernels.takes(q.dtype):
        return cpu_kernels.attend(inputs, offsets, causal=causal)
    from dist_transformer.model.gpu_kernels import attend

    tokens, heads, width = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    sums = torch.empty(heads, tokens, dtype=torch.float32, device=q.device)
    strides = (x.stride(0) for x in (q, k, out))
    grid = (len(offsets[0]) - 1, heads)
    # Triton launches on the current device.
    with torch.cuda.device_of(q):
        attend[grid](*inputs, out, sums, *offsets, width**-0.5, tokens, *strides, CAUSAL=causal, D=width, **_TILES)
    return out, sums


def _backward(
    gradient: torch.Tensor,
    inputs: Sequence[torch.Tensor],
    out: torch.Tensor,
    sums: torch.Tensor,
    results: Sequence[torch.Tensor],
    offsets: Sequence[torch.Tensor],
    *,
    causal: bool,
) -> None:
    if out.device.type == "cpu" and cpu_kernels.takes(out.dtype):
        cpu_kernels.return_gradients(gradient, inputs, sums, results, offsets, causal=causal)
        return
    from dist_transformer.model.gpu_kernels import return_gradients

    tokens, heads, width = out.shape
    tensors = (*inputs, out, sums, gradient.contiguous(), *results, *offsets)
    strides = (x.stride(0) for x in (*inputs[:2], out, *results[:2]))
    grid = (len(offsets[0]) - 1, heads)
    with torch.cuda.device_of(out):
        return_gradients[grid](*tensors, width**-0.5, tokens, *strides, CAUSAL=causal, D=width, **_TILES)


def _shapes(queries: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output and the sums without values; the queries may have keys and values next to them."""
    tokens, heads, width = len(queries), *queries.shape[-2:]
    return queries.new_empty(tokens, heads, width), queries.new_empty(heads, tokens, dtype=torch.float32)


def _keep_self(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    qkv, offsets, ctx.causal = inputs
    ctx.save_for_backward(qkv, *output, offsets)


def _return_self(ctx: Any, gradient: torch.Tensor, _: Any) -> tuple[torch.Tensor, None, None]:
    return _OPERATORS.self_attention_backward(gradient, *ctx.saved_tensors, ctx.causal), None, None


def _keep_cross(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, kv, query_offsets, key_offsets = inputs
    ctx.save_for_backward(q, kv, *output, query_offsets, key_offsets)


def _return_cross(ctx: Any, gradient: torch.Tensor, _: Any) -> tuple[torch.Tensor, torch.Tensor, None, None]:
    return *_OPERATORS.cross_attention_backward(gradient, *ctx.saved_tensors), None, None


def _define(schema: str, function: Callable[..., Any], shapes: Callable[..., Any]) -> str:
    """Define an operator: what it computes, and the shapes of its results for torch.compile. Return its name."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{_LIBRARY.ns}::{name}", shapes, lib=_LIBRARY)
    return f"{_LIBRARY.ns}::{name}"


# Not by `torch.library.custom_op`: the first call of its operators imports torch's compiler, which takes longer than
# to translate a line.
_LIBRARY = torch.library.Library("dist_transformer", "FRAGMENT")
_OPERATORS: Any = torch.ops.dist_transformer
_define(
    "self_attention_backward(Tensor gradient, Tensor qkv, Tensor out, Tensor sums, Tensor offsets, bool causal)"
    " -> Tensor",
    _self_attention_backward,
    lambda gradient, qkv, *_: _like(qkv),
)
_define(
    "cross_attention_backward(Tensor gradient, Tensor q, Tensor kv, Tensor out, Tensor sums, Tensor query_offsets, "
    "Tensor key_offsets) -> (Tensor, Tensor)",
    _cross_attention_backward,
    lambda gradient, q, kv, *_: (_like(q), _like(kv)),
)
_SELF = "self_attention(Tensor qkv, Tensor offsets, bool causal) -> (Tensor, Tensor)"
_CROSS = "cross_attention(Tensor q, Tensor kv, Tensor query_offsets, Tensor key_offsets) -> (Tensor, Tensor)"
_NAMES = _define(_SELF, _self_attention, _shapes), _define(_CROSS, _cross_attention, _shapes)
torch.library.register_autograd(_NAMES[0], _return_self, setup_context=_keep_self, lib=_LIBRARY)
torch.library.register_autograd(_NAMES[1], _return_cross, setup_context=_keep_cross, lib=_LIBRARY)
