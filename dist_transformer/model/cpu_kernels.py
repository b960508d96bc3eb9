"""Kernels of the model on a CPU: `cpu_kernels.cpp`, compiled at first use.

Shapes of attention are those of `packed_attention`. `sums` holds the logarithm of the sum of each softmax, shape
(H, T), in fp32.
"""

import ctypes
import functools
from collections.abc import Sequence

import torch

from dist_transformer.native import load_native

_SUFFIXES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


class _Shape(ctypes.Structure):
    """The struct `Shape` of the C++ source."""

    _fields_ = (
        ("query_offsets", ctypes.c_void_p),
        ("key_offsets", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("sentences", "heads", "width", "tokens")),
        *((name, ctypes.c_int64) for name in ("q_stride", "kv_stride", "grad_q_stride", "grad_kv_stride")),
        ("causal", ctypes.c_int64),
        ("threads", ctypes.c_int64),
    )


class _Beams(ctypes.Structure):
    """The struct `Beams` of the C++ source."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("sentences", "beam", "heads", "width", "entries")),
        *((name, ctypes.c_int64) for name in ("q_sentence", "q_hypothesis", "q_head")),
        *((name, ctypes.c_int64) for name in ("kv_sentence", "kv_head", "kv_entry")),
        *((name, ctypes.c_int64) for name in ("mask_sentence", "mask_hypothesis", "threads")),
    )


class _Best(ctypes.Structure):
    """The struct `Best` of the C++ source."""

    _fields_ = (
        ("never", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("never_count", "end", "count")),
        *((name, ctypes.c_void_p) for name in ("values", "ends", "tokens")),
    )


@functools.cache
def _library() -> ctypes.CDLL | None:
    return load_native(__file__, slower="attention and decoding on a CPU")


def takes(dtype: torch.dtype) -> bool:
    """Return whether the library supports this dtype and can be compiled here."""
    return dtype in _SUFFIXES and _library() is not None


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    query_offsets: torch.Tensor,
    key_offsets: torch.Tensor,
    *,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output and the sums."""
    out = torch.empty(q.shape, dtype=q.dtype)
    sums = torch.empty(q.shape[1], q.shape[0])
    shape = _shape(q, k, query_offsets, key_offsets, causal=causal)
    _call("attend", shape, (q, k, v, out, sums))
    return out, sums


def return_gradients(
    gradient: torch.Tensor,
    inputs: Sequence[torch.Tensor],
    sums: torch.Tensor,
    results: Sequence[torch.Tensor],
    query_offsets: torch.Tensor,
    key_offsets: torch.Tensor,
    *,
    causal: bool,
) -> None:
    """Write the gradients of queries, keys and values to `results`."""
    shape = _shape(inputs[0], inputs[1], query_offsets, key_offsets, causal=causal, results=results)
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
    library = _library()
    assert library is not None
    library[f"best_tokens_{_SUFFIXES[logits_RV.dtype]}"](
        ctypes.c_void_p(logits_RV.data_ptr()),
        ctypes.c_int64(rows),
        ctypes.c_int64(vocabulary),
        ctypes.byref(best),
        ctypes.c_int64(torch.get_num_threads()),
    )
    return values_Rc, tokens_Rc, ends_R


def _shape(
    q: torch.Tensor,
    k: torch.Tensor,
    query_offsets: torch.Tensor,
    key_offsets: torch.Tensor,
    *,
    causal: bool,
    results: Sequence[torch.Tensor] = (),
) -> _Shape:
    if len(query_offsets) != len(key_offsets):
        raise ValueError(f"{len(query_offsets)} offsets of queries and {len(key_offsets)} of keys")
    tokens, heads, width = q.shape
    grad_strides = (results[0].stride(0), results[1].stride(0)) if results else (0, 0)
    return _Shape(
        query_offsets.data_ptr(),
        key_offsets.data_ptr(),
        len(query_offsets) - 1,
        heads,
        width,
        tokens,
        q.stride(0),
        k.stride(0),
        *grad_strides,
        causal,
        torch.get_num_threads(),
    )


def _call(name: str, shape: ctypes.Structure, tensors: Sequence[torch.Tensor]) -> None:
    library = _library()
    assert library is not None
    # ctypes releases the GIL during the call.
    function = library[f"{name}_{_SUFFIXES[tensors[0].dtype]}"]
    function(ctypes.byref(shape), *(ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors))
