"""Ways to damage content, as strategies of Hypothesis: each gives bytes."""

import base64
import bz2
import copy
import gzip
import json
import lzma
import struct
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

Damage = Callable[[bytes], st.SearchStrategy[bytes]]

# What stands for JSON text that no value of Python is written as.
_RAW = {
    "@raw 0@": "1e999",
    "@raw 1@": "-1e999",
    "@raw 2@": "NaN",
    "@raw 3@": "9" * 5000,
    "@raw 4@": "[" * 100_000 + "]" * 100_000,
    "@raw 5@": '{"a":' * 50_000 + "1" + "}" * 50_000,
    "@raw 6@": '{"a": 1, "a": 2}',
    "@raw 7@": "0.0000001e-400",
    "@raw 8@": '"\\ud800"',
    "@raw 9@": "[",
}
_HOSTILE = st.one_of(
    st.sampled_from([None, True, False, -1, 0, 1, 2, 3, 7, 10**9, 2**31, 2**32, 2**63, 2**64, 10**30, 0.5, 1e300]),
    st.sampled_from(["", ".", "..", "../../x", "/etc/passwd", "a\nb", "\x1b[2J", "\0", "x" * 100_000, "é\u2028"]),
    st.sampled_from([[], {}, [[]], [{}], [None], {"a": 1}, [1, 2, 3], {"type": "Precompiled"}, [10**9] * 1000]),
    st.sampled_from([*_RAW]),
    st.integers(-(2**70), 2**70),
    st.text(max_size=8),
)
_NUMBERS = [0, 1, 2**7, 2**8 - 1, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1]


def _places(value: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """List the places of everything in a JSON value; of a long list or table only the first few."""
    inner: list[Any] = []
    if isinstance(value, dict):
        inner = list(value)[:40]
    elif isinstance(value, list):
        inner = list(range(min(len(value), 5)))
    return [here, *(place for key in inner for place in _places(value[key], (*here, key)))]


@st.composite
def json_values(draw: st.DrawFn, sound: Any) -> str:
    """JSON text with a few values replaced, removed, added or renamed."""
    value = {"": copy.deepcopy(sound)}
    for _ in range(draw(st.integers(1, 3))):
        place = ("", *draw(st.sampled_from(_places(value[""]))))
        parent: Any = value
        for key in place[:-1]:
            parent = parent[key]
        how = draw(st.sampled_from(["replace"] * 6 + ["remove", "add", "rename", "repeat"]))
        new = copy.deepcopy(draw(_HOSTILE))
        if how == "replace" or len(place) == 1:
            parent[place[-1]] = new
        elif how == "remove":
            del parent[place[-1]]
        elif how == "repeat" and isinstance(parent, list):
            parent.extend(copy.deepcopy(parent[place[-1]]) for _ in range(3))
        elif isinstance(parent, list):
            parent.insert(0, new)
        elif how == "rename":
            parent[draw(st.text(max_size=3))] = parent.pop(place[-1])
        else:
            parent[draw(st.sampled_from(["x", "type", "format_version", "corpora", "data", "a\nb"]))] = new
    text = json.dumps(value[""])
    for name, raw in _RAW.items():
        text = text.replace(json.dumps(name), raw)
    return text


@st.composite
def raw_bytes(draw: st.DrawFn, sound: bytes, region: tuple[int, int] | None = None) -> bytes:
    """Bytes changed in a few places, more often in a region that says what the rest is."""
    content = bytearray(sound)
    for _ in range(draw(st.integers(1, 4))):
        if not content:
            break
        first, stop = region if region and draw(st.booleans()) else (0, len(content))
        at = draw(st.integers(min(first, len(content) - 1), max(0, min(stop, len(content)) - 1)))
        how = draw(st.sampled_from(["flip", "flip", "set", "number", "number", "cut", "remove", "repeat", "insert"]))
        if how == "flip":
            content[at] ^= 1 << draw(st.integers(0, 7))
        elif how == "set":
            content[at] = draw(st.integers(0, 255))
        elif how == "number":
            width = draw(st.sampled_from([2, 4, 8]))
            number = draw(st.sampled_from(_NUMBERS)) % 2 ** (8 * width)
            place = at - at % draw(st.sampled_from([1, width]))
            content[place : place + width] = number.to_bytes(width, "little")
        elif how == "cut":
            del content[at:]
        elif how == "remove":
            del content[at : at + draw(st.integers(1, 64))]
        elif how == "repeat":
            content[at:at] = content[at : at + draw(st.integers(1, 64))]
        else:
            content[at:at] = draw(st.binary(min_size=1, max_size=16))
    return bytes(content)


def json_file(sound: bytes) -> st.SearchStrategy[bytes]:
    values = json_values(json.loads(sound)).map(lambda text: text.encode("utf-8", "surrogatepass"))
    return st.one_of(values, values, values, raw_bytes(sound))


@st.composite
def tokenizer_file(draw: st.DrawFn, sound: bytes) -> bytes:
    """Damage a tokenizer file like any JSON file, or with parts that the library is known not to survive."""
    if draw(st.booleans()):
        return draw(json_file(sound))
    parts = json.loads(sound)
    how = draw(st.sampled_from(["charsmap", "id", "added id"]))
    if how == "charsmap":
        charsmap = base64.b64encode(draw(st.binary(max_size=12))).decode()
        parts["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": charsmap}
    elif how == "id":
        piece = draw(st.sampled_from(sorted(parts["model"]["vocab"])))
        parts["model"]["vocab"][piece] = draw(st.sampled_from([-1, 0, 10**6, 4 * 10**9, 2**32]))
    else:
        parts["added_tokens"][0]["id"] = draw(st.sampled_from([-1, 1, 10**6, 4 * 10**9, 2**32]))
    return json.dumps(parts).encode()


@st.composite
def json_lines(draw: st.DrawFn, sound: bytes) -> bytes:
    lines = sound.splitlines()
    at = draw(st.integers(0, len(lines) - 1))
    lines[at] = draw(json_file(lines[at]))
    return b"\n".join(lines) + b"\n" * draw(st.integers(0, 1))


def safetensors_file(sound: bytes) -> st.SearchStrategy[bytes]:
    """The header, its length, or any byte."""
    length = struct.unpack("<Q", sound[:8])[0]
    header, rest = json.loads(sound[8 : 8 + length]), sound[8 + length :]

    def with_header(text: str) -> bytes:
        content = text.encode("utf-8", "surrogatepass")
        return struct.pack("<Q", len(content)) + content + rest

    values = json_values(header).map(with_header)
    return st.one_of(values, values, raw_bytes(sound, (0, 8 + length)))


def start_of(count: int) -> Damage:
    return lambda sound: raw_bytes(sound, (0, count))


def end_of(count: int) -> Damage:
    return lambda sound: raw_bytes(sound, (max(0, len(sound) - count), len(sound)))


def compressed_text(sound: bytes) -> st.SearchStrategy[bytes]:
    """A first byte that says how, and the content: damaged, or a bomb."""
    sound = gzip.decompress(sound[1:])
    packers = [gzip.compress, lambda text: lzma.compress(text, preset=0), bz2.compress]
    bomb, lines = b"a" * 2**25, b"a a\n" * 2**18
    packed = [[bytes([how]) + pack(text) for how, pack in enumerate(packers)] for text in (sound, bomb, lines)]
    damaged = st.one_of(*(raw_bytes(content[1:], (0, 32)).map(content[:1].__add__) for content in packed[0]))
    return st.one_of(damaged, damaged, damaged, damaged, st.sampled_from([*packed[1], *packed[2]]))
