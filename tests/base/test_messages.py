import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dist_transformer.base.messages import as_kind, pack, unpack


@pytest.mark.parametrize(
    ("value", "received"),
    [
        ([None, True, 1, 10**40, 0.1 + 0.2, math.inf, -0.0], [None, True, 1, 10**40, 0.1 + 0.2, math.inf, -0.0]),
        (["ü 😀 \x00 \u2028", "\udcff", "\ud83d\ude00"], ["ü 😀 \x00 \u2028", "\udcff", "\ud83d\ude00"]),
        ((1, {"a": (2,)}), [1, {"a": [2]}]),
        ([np.int64(3), np.float64(0.5), np.bool_(True), np.float32(0.5)], [3, 0.5, True, 0.5]),
    ],
)
def test_values_come_back(value: Any, received: Any) -> None:
    """Compared by their text, in which -0.0, 1 and True, and lists and tuples differ."""
    assert repr(unpack(pack(value).ljust(1000))) == repr(received)


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    place: Path
    pair: tuple[float, int] | None = None
    numbers: frozenset[int] = frozenset()


@dataclass(frozen=True, kw_only=True, slots=True)
class Whole:
    parts: dict[int, tuple[Part, ...]]
    best: Part | None = None


def test_dataclasses_come_back_with_all_that_is_in_them() -> None:
    part = Part(place=Path("a b"), pair=(0.5, 3), numbers=frozenset((2, 1)))
    whole = Whole(parts={3: (part, Part(place=Path("c")))}, best=part)
    assert as_kind(list[Whole], unpack(pack([whole]))) == [whole]
    assert as_kind(Whole, whole) is whole


@pytest.mark.parametrize("value", [object(), Path("a"), {1}, np.array([1])])
def test_nothing_else_is_sent(value: Any) -> None:
    with pytest.raises(TypeError):
        pack([value])
