"""Load the compiled form of the packing loop, if this machine has a compiler."""

import ctypes
import functools
from collections.abc import Callable

import numpy as np

from dist_transformer.native import load_native


def pack_pairs() -> Callable[..., tuple[np.ndarray, ...]] | None:
    """Return the compiled loop, with the interface of `packing._pack_in_python`; None without a compiler."""
    library = _load()
    return None if library is None else functools.partial(_call, library.pack_pairs)


@functools.cache
def _load() -> ctypes.CDLL | None:
    library = load_native(__file__, slower="planning")
    if library is not None:
        numbers, array = [ctypes.c_int64, *[ctypes.c_int32] * 6], ctypes.c_void_p
        library.pack_pairs.argtypes = [array, *numbers, *[array] * 5]
        library.pack_pairs.restype = ctypes.c_int64
    return library


def _call(
    function: Callable[..., int], sizes: np.ndarray, limits: tuple[int, ...], room: list[int], is_last: bool
) -> tuple[np.ndarray, ...]:
    pairs = len(sizes)
    arrays = [np.empty(pairs, dtype=np.int32) for _ in range(5)]
    packs = function(sizes.ctypes.data, pairs, *limits, *room, is_last, *(array.ctypes.data for array in arrays))
    rows, *of_packs, left = arrays
    packed = int(of_packs[0][packs - 1]) if packs else 0
    return rows[:packed], *(array[:packs] for array in of_packs), left[: pairs - packed]
