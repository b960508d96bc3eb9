"""Kernels of the model on a CPU: `cpu_kernels.cpp`, compiled at first use.

Shapes of attention are those of `packed_attention`. `sums` holds the logarithm of the sum of each softmax, shape
(H, T), in fp32.
"""

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from dist_transformer.base.native import load_native

# Rows whose gradients of gain and bias a kernel adds up together.
_ROWS_OF_BLOCK = 128
_SUFFIXES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


def _struct(*members: str) -> type[ctypes.Structure]:
    """Make a struct of the C++ source from its members: a type, and the names that have it."""
    kinds = {"pointer": ctypes.c_void_p, "int": ctypes.c_int64, "float": ctypes.c_float}
    fields = [(name, kinds[kind]) for kind, *names in map(str.split, members) for name in names]
    return type("Struct", (ctypes.Structure,), {"_fields_": fields})


# The structs of the same names.
_Shape = _struct(
    "pointer query_offsets key_offsets",
    "int sentences heads width tokens q_stride kv_stride grad_q_stride grad_kv_stride causal threads",
)
_Beams = _struct(
    "int sentences beam heads width entries q_sentence q_hypothesis q_head kv_sentence kv_head kv_entry",
    "int mask_sentence mask_hypothesis threads",
)
_Residual = _struct("int rows width block lowest_kept", "float scale epsilon", "int threads")
_Sums = _struct("int rows width block threads")
_Matrix = _struct("int rows width threads")
_Softmax = _struct("int rows row_step vocabulary replace", "float smoothing", "int threads")
_Best = _struct("pointer never", "int never_count end count", "pointer values ends tokens")


class Keep(NamedTuple):
    """Decision by 16 random bits whether dropout keeps an element."""

    lowest: int
    """Elements with lower bits, as a signed number, are dropped."""
    scale: float
    """Factor of the others."""

    @classmethod
    def all_but(cls, p: float) -> "Keep":
        """Drop with probability `p`, rounded to 1/65536."""
        dropped = min(round(p * 2**16), 2**16 - 1)
        return cls(lowest=dropped - 2**15, scale=2**16 / (2**16 - dropped))


@functools.cache
def _library() -> ctypes.CDLL | None:
    return load_native(__file__, slower="attention and decoding on a CPU")


def takes(dtype: torch.dtype) -> bool:
    """Return whether the library supports this dtype and can be compiled here."""
    return dtype in _SUFFIXES and _library() is not None


def attend(
    inputs: Sequence[torch.Tensor], offsets: Sequence[torch.Tensor], *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output and the sums.

    Args:
        inputs: queries, keys and values.
        offsets: those of the queries and of the keys.
    """
    q = inputs[0]
    out, sums = torch.empty(q.shape, dtype=q.dtype), torch.empty(q.shape[1], q.shape[0])
    _call("attend", _shape(inputs, offsets, causal=causal), (*inputs, out, sums))
    return out, sums


def return_gradients(
    gradient: torch.Tensor,
    inputs: Sequence[torch.Tensor],
    sums: torch.Tensor,
    results: Sequence[torch.Tensor],
    offsets: Sequence[torch.Tensor],
    *,
    causal: bool,
) -> None:
    """Write the gradients of queries, keys and values to `results`."""
    shape = _shape(inputs, offsets, causal=causal, results=results)
    _call("return_gradients", shape, (*inputs, sums, gradient.contiguous(), *results))


def attend_beams(
    q_NHkK: torch.Tensor, k_NHXK: torch.Tensor, v_NHXK: torch.Tensor, mask_NkX: torch.Tensor
) -> torch.Tensor:
    """Attend from the k hypotheses of each sentence to those of its X entries that each hypothesis sees.

    The last dimension of every argument is contiguous.

    Args:
        mask_NkX: 0 where the hypothesis sees the entry, -inf elsewhere; (N, 1, X) if all see the same.

    Returns:
        Shape (N · k, H · K); 0 for a hypothesis that sees nothing.
    """
    sentences, heads, beam, width = q_NHkK.shape
    if k_NHXK.stride() != v_NHXK.stride():
        raise ValueError(f"strides of keys {k_NHXK.stride()} and of values {v_NHXK.stride()} differ")
    out_BD = torch.empty(sentences * beam, heads * width, dtype=q_NHkK.dtype)
    shape = _Beams(
        sentences,
        beam,
        heads,
        width,
        k_NHXK.shape[2],
        *(q_NHkK.stride(dimension) for dimension in (0, 2, 1)),
        *k_NHXK.stride()[:3],
        mask_NkX.stride(0),
        mask_NkX.stride(1) if mask_NkX.shape[1] > 1 else 0,
        torch.get_num_threads(),
    )
    _call("attend_beams", shape, (q_NHkK, k_NHXK, v_NHXK, mask_NkX, out_BD))
    return out_BD


def best_tokens(
    logits_RV: torch.Tensor, *, count: int, never: torch.Tensor, end: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Select the most probable tokens of each row of logits.

    Args:
        logits_RV: contiguous, fp32 or bf16.
        never: int64; tokens that are not selected, but take part in the softmax.
        end: token whose log probability is always returned.

    Returns:
        Log probabilities, shape (R, count), fp32, largest first, -inf where no token is left; their tokens, int64,
        ordered by token where log probabilities are equal; and the log probabilities of `end`, shape (R,).
    """
    rows, vocabulary = logits_RV.shape
    values_Rc, ends_R = torch.empty(rows, count), torch.empty(rows)
    tokens_Rc = torch.empty(rows, count, dtype=torch.int64)
    best = _Best(
        never.data_ptr(), len(never), end, count, values_Rc.data_ptr(), ends_R.data_ptr(), tokens_Rc.data_ptr()
    )
    _function(f"best_tokens_{_SUFFIXES[logits_RV.dtype]}")(
        ctypes.c_void_p(logits_RV.data_ptr()),
        ctypes.c_int64(rows),
        ctypes.c_int64(vocabulary),
        ctypes.byref(best),
        ctypes.c_int64(torch.get_num_threads()),
    )
    return values_Rc, tokens_Rc, ends_R


def add_and_normalise(
    x_TD: torch.Tensor,
    y_TD: torch.Tensor,
    bits_TD: torch.Tensor | None,
    gain_D: torch.Tensor,
    bias_D: torch.Tensor,
    keep: Keep,
    *,
    epsilon: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return LayerNorm(x + Dropout(y)), and for the backward pass mean and inverse deviation of each row, in fp32.

    Args:
        bits_TD: random, int16; None keeps all of y.
        keep: elements of y to keep.
    """
    out_TD = torch.empty(x_TD.shape, dtype=x_TD.dtype)
    means_T, factors_T = torch.empty(2, len(x_TD))
    shape = _Residual(*x_TD.shape, _ROWS_OF_BLOCK, *keep, epsilon, torch.get_num_threads())
    _call("add_and_normalise", shape, (x_TD, y_TD, bits_TD, gain_D, bias_D, out_TD, means_T, factors_T))
    return out_TD, means_T, factors_T


def return_normalised(
    gradient_TD: torch.Tensor,
    x_TD: torch.Tensor,
    y_TD: torch.Tensor,
    bits_TD: torch.Tensor | None,
    gain_D: torch.Tensor,
    means_T: torch.Tensor,
    factors_T: torch.Tensor,
    keep: Keep,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of x, y, gain and bias, the last two in fp32."""
    grad_x_TD = torch.empty(x_TD.shape, dtype=x_TD.dtype)
    grad_y_TD = grad_x_TD if bits_TD is None else torch.empty(x_TD.shape, dtype=x_TD.dtype)
    blocks = -(-len(x_TD) // _ROWS_OF_BLOCK)
    grad_gain_CD, grad_bias_CD = torch.empty(2, blocks, x_TD.shape[1])
    inputs = (x_TD, y_TD, bits_TD, gain_D, means_T, factors_T, gradient_TD.contiguous())
    shape = _Residual(*x_TD.shape, _ROWS_OF_BLOCK, *keep, 0.0, torch.get_num_threads())
    _call("return_normalised", shape, (*inputs, grad_x_TD, grad_y_TD, grad_gain_CD, grad_bias_CD))
    return grad_x_TD, grad_y_TD, grad_gain_CD.sum(0), grad_bias_CD.sum(0)


def random_words(seed: int, count: int) -> torch.Tensor:
    """Return `count` times 32 random bits, int32, which depend on the seed of 64 bits alone."""
    words = torch.empty(count, dtype=torch.int32)
    _function("random_words")(
        ctypes.c_uint64(seed),
        ctypes.c_int64(count),
        ctypes.c_void_p(words.data_ptr()),
        ctypes.c_int64(torch.get_num_threads()),
    )
    return words


def return_bias(gradient_TY: torch.Tensor, relu_TY: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of x and b in x + b, or in relu(x + b), whose output is given; the second one in fp32."""
    gradient_TY = gradient_TY.contiguous()
    returned_TY = gradient_TY if relu_TY is None else torch.empty_like(gradient_TY)
    rows, width = gradient_TY.shape
    sums_CY = torch.empty(-(-rows // _ROWS_OF_BLOCK), width)
    shape = _Sums(rows, width, _ROWS_OF_BLOCK, torch.get_num_threads())
    _call("return_bias", shape, (gradient_TY, relu_TY, returned_TY, sums_CY))
    return returned_TY, sums_CY.sum(0)


def transposed(x_TX: torch.Tensor) -> torch.Tensor:
    """Copy a contiguous bf16 matrix to its transpose, shape (X, T). Torch takes about twice as long."""
    rows, width = x_TX.shape
    transposed_XT = x_TX.new_empty(width, rows)
    _call("transpose", _Matrix(rows, width, torch.get_num_threads()), (x_TX, transposed_XT))
    return transposed_XT


def quantise(x_TX: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return integers from -127 to 127, int8, and the factor of each row, shape (T,) in fp32, whose product is about x.

    Args:
        x_TX: contiguous; a row without finite numbers has a factor that is not finite.
    """
    rows, width = x_TX.shape
    integers_TX, factors_T = torch.empty(rows, width, dtype=torch.int8), torch.empty(rows)
    _call("quantise", _Matrix(rows, width, torch.get_num_threads()), (x_TX, integers_TX, factors_T))
    return integers_TX, factors_T


def scale_sums(
    sums_TY: torch.Tensor,
    factors_T: torch.Tensor,
    factors_Y: torch.Tensor,
    bias_Y: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return int32 sums times the factors of their row and column, plus a bias of that dtype."""
    out_TY = torch.empty(sums_TY.shape, dtype=dtype)
    shape = _Matrix(*sums_TY.shape, torch.get_num_threads())
    _call("scale_sums", shape, (out_TY, sums_TY, factors_T, factors_Y, bias_Y))
    return out_TY


def smoothed_softmax(
    logits_RV: torch.Tensor, labels_R: torch.Tensor, *, smoothing: float, replace: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logarithm of the sum of exp, and the logit of the label, of each row, shape (R,) in fp32.

    Args:
        logits_RV: contiguous rows; with `replace` they become p - (1 - smoothing) · onehot(label).
        labels_R: int64.
    """
    totals_R, picked_R = torch.empty(2, len(logits_RV))
    rows, vocabulary = logits_RV.shape
    shape = _Softmax(rows, logits_RV.stride(0), vocabulary, replace, smoothing, torch.get_num_threads())
    _call("smoothed_softmax", shape, (logits_RV, labels_R, totals_R, picked_R))
    return totals_R, picked_R


def _shape(
    inputs: Sequence[torch.Tensor],
    offsets: Sequence[torch.Tensor],
    *,
    causal: bool,
    results: Sequence[torch.Tensor] = (),
) -> ctypes.Structure:
    of_queries, of_keys = offsets
    if len(of_queries) != len(of_keys):
        raise ValueError(f"{len(of_queries)} offsets of queries and {len(of_keys)} of keys")
    tokens, heads, width = inputs[0].shape
    strides = [tensor.stride(0) for tensor in (*inputs[:2], *results[:2])] + [0, 0]
    places, sizes = (of_queries.data_ptr(), of_keys.data_ptr()), (len(of_queries) - 1, heads, width, tokens)
    return _Shape(*places, *sizes, *strides[:4], causal, torch.get_num_threads())


def _call(name: str, shape: ctypes.Structure, tensors: Sequence[torch.Tensor | None]) -> None:
    first = tensors[0]
    assert first is not None
    pointers = (None if tensor is None else tensor.data_ptr() for tensor in tensors)
    _function(f"{name}_{_SUFFIXES[first.dtype]}")(ctypes.byref(shape), *map(ctypes.c_void_p, pointers))


def _function(name: str) -> Callable[..., None]:
    # ctypes releases the GIL during a call, and keeps the functions that it has looked up as attributes.
    found: Callable[..., None] = getattr(_library(), name)
    return found
