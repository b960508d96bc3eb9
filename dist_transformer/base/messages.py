"""JSON values as bytes, to exchange them with other processes. A pickle of another process could run any code here."""

import functools
import json
from dataclasses import is_dataclass
from typing import Any, TypeVar

T = TypeVar("T")


def pack(value: Any) -> bytes:
    """Write a value as bytes of JSON: tuples arrive as lists, dataclasses as objects, keys and paths as strings."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=_plain)
    # A text of a file may hold halves of surrogate pairs.
    return text.encode("utf-8", "surrogatepass")


def unpack(content: bytes) -> Any:
    """Read what `pack` wrote; spaces may follow."""
    return json.loads(content.decode("utf-8", "surrogatepass"))


def as_kind(kind: type[T], value: Any) -> T:
    """Build a dataclass, or a list or tuple of them, from what `unpack` returned; what is one already stays."""
    hashable: Any = kind
    built: T = _adapter(hashable).validate_python(value)
    return built


@functools.cache
def _adapter(kind: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def _plain(value: Any) -> Any:
    import numpy as np

    if is_dataclass(value) and not isinstance(value, type):
        return _adapter(type(value)).dump_python(value, mode="json", fallback=np.generic.item, warnings=False)
    return np.generic.item(value)
