"""Load the compiled forms of packing and of building micro-batches, if this machine has a compiler."""

import ctypes
import functools
from collections.abc import Callable

import numpy as np

from dist_transformer.base.native import load_native
from dist_transformer.data.folder.split import Memory
from dist_transformer.data.loading.buffers import Buffers, Sizes
from dist_transformer.data.vocabulary.tokenizer import BOS_ID, EOS_ID
from dist_transformer.model.packed import IGNORED


class _Side(ctypes.Structure):
    """The struct `Side` of the C++ source."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("size", "max_length")),
        *((name, ctypes.c_void_p) for name in ("tokens", "positions", "lengths", "offsets")),
    )


def pack_pairs() -> Callable[..., tuple[np.ndarray, ...]] | None:
    """Return the compiled loop, with the interface of `packing._pack_in_python`; None without a compiler."""
    library = _load()
    return None if library is None else functools.partial(_pack, library.pack_pairs)


def build_buffers() -> Callable[[Memory, np.ndarray, np.ndarray, Sizes], Buffers] | None:
    """Return the compiled form of `build_in_numpy`, which reads the pairs from memory; None without a compiler."""
    library = _load()
    return None if library is None else functools.partial(_build, library.build_buffers)


@functools.cache
def _load() -> ctypes.CDLL | None:
    library = load_native(__file__, slower="the data pipeline")
    if library is not None:
        numbers, array = [ctypes.c_int64, *[ctypes.c_int32] * 6], ctypes.c_void_p
        library.pack_pairs.argtypes = [array, *numbers, *[array] * 5]
        library.pack_pairs.restype = ctypes.c_int64
        library.build_buffers.argtypes = [array, ctypes.c_int64, array, array, *[ctypes.c_int64] * 5, array, array]
        library.build_buffers.restype = ctypes.c_int64
    return library


def _pack(
    function: Callable[..., int], sizes: np.ndarray, limits: tuple[int, ...], room: list[int], is_last: bool
) -> tuple[np.ndarray, ...]:
    pairs = len(sizes)
    arrays = [np.empty(pairs, dtype=np.int32) for _ in range(5)]
    packs = function(sizes.ctypes.data, pairs, *limits, *room, is_last, *(array.ctypes.data for array in arrays))
    rows, *of_packs, left = arrays
    packed = int(of_packs[0][packs - 1]) if packs else 0
    return rows[:packed], *(array[:packs] for array in of_packs), left[: pairs - packed]


def _build(
    function: Callable[..., int], memory: Memory, pair_ids: np.ndarray, counts: np.ndarray, sizes: Sizes
) -> Buffers:
    buffers = len(counts)
    pair_ids, counts = (np.ascontiguousarray(array, dtype=np.int64) for array in (pair_ids, counts))
    # Source and target each.
    tokens, positions = (_empty(buffers, sizes.tokens, np.int64) for _ in range(2))
    offsets = _empty(buffers, (sizes.offset_count,) * 2, np.int32)
    labels = np.empty_like(tokens[1])
    lengths = np.empty((2, len(pair_ids)), dtype=np.int64)
    sides = (_Side * 2)(
        *(
            _Side(size, longest, *(array.ctypes.data for array in arrays))
            for size, longest, *arrays in zip(
                sizes.tokens, sizes.max_lengths, tokens, positions, lengths, offsets, strict=True
            )
        )
    )
    table = memory.table
    places = [table.ctypes.data, len(table), pair_ids.ctypes.data, counts.ctypes.data, buffers, sizes.offset_count]
    status = function(*places, BOS_ID, EOS_ID, IGNORED, ctypes.addressof(sides), labels.ctypes.data)
    if status > 0:
        raise ValueError(f"sentences of {status} tokens do not fit buffers of {sizes.tokens}")
    if status < 0:
        raise IndexError("a pair is in no shard" if status == -1 else f"more than {sizes.offset_count} sentences")
    return Buffers(tokens=tokens, positions=positions, offsets=offsets, labels=labels, lengths=lengths)


def _empty(buffers: int, sizes: tuple[int, int], dtype: type[np.generic]) -> tuple[np.ndarray, np.ndarray]:
    source, target = (np.empty((buffers, size), dtype=dtype) for size in sizes)
    return source, target
