import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from dist_transformer.base.messages import pack, unpack


@dataclass(frozen=True, kw_only=True, slots=True)
class Inner:
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Outer:
    place: Path
    inner: Inner | None


class Point(NamedTuple):
    x: float
    y: float


def returned(value: Any, *kinds: type) -> Any:
    return unpack(pack(value, kinds), kinds)


@pytest.mark.parametrize(
    "value",
    [
        None,
        [True, 1, -1.5, 10**40, 0.1 + 0.2, math.inf, -0.0, 5e-324],
        ["", "ü 😀 \x00 \u2028", "\udcff", "\ud83d\ude00"],
        {1: "a", "1": "b", (1, None): ["c"], "tuple": {}, None: ()},
        ((1, 2), [(3,)], frozenset({4, "d"}), b"\x00\xff", Path("/a b/ü")),
    ],
    ids=str,
)
def test_values_come_back_with_their_types(value: Any) -> None:
    """Compare the texts, which differ for -0.0 and 0.0, for 1 and True, and for lists and tuples."""
    assert repr(returned(value)) == repr(value)


def test_classes_that_the_reader_names_come_back() -> None:
    value = [Outer(Path("a"), Inner(names=("b",))), Outer(Path("c"), None), Point(1.0, 2.0)]
    assert returned(value, Outer, Inner, Point) == value
    with pytest.raises(TypeError, match="a Point cannot be sent to another process: convert it, or name its class"):
        pack(value, (Outer, Inner))
    with pytest.raises(ValueError, match="a message holds 'Point', which is not expected here"):
        unpack(pack(value, (Outer, Inner, Point)), (Outer, Inner))


def test_numbers_of_numpy_come_back() -> None:
    assert math.isnan(returned(np.float64("nan")))
    assert repr(returned([np.int64(3), np.float64(0.5), np.bool_(True)])) == "[3, 0.5, True]"
    for array in (np.arange(6).reshape(2, 3).T, np.zeros((0, 3), np.float32), np.array([0.1, np.nan])):
        found = returned({"array": array})["array"]
        assert (found.dtype, found.shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(found, array)
        # The caller may write to it.
        found += 1


@pytest.mark.parametrize("value", [object(), pack, ValueError("a"), np.array([object()]), np.array(["a"])], ids=str)
def test_nothing_else_is_sent(value: Any) -> None:
    with pytest.raises(TypeError, match="cannot be sent to another process"):
        pack([value])


NO_MESSAGES = [
    *(b"", b"{", b"\x80\x04N.", b"\xff", b'{"class": 1}', b'{"tuple": [1], "dict": []}'),
    b'{"array": ["O", [1], "AAAAAAAAAAA="]}',
]


@pytest.mark.parametrize("content", NO_MESSAGES)
def test_what_is_no_message_is_refused(content: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - of several libraries
        unpack(content)
