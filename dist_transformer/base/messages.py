"""JSON values as bytes, to exchange them with other processes. A pickle of another process could run any code here."""

import json
from typing import Any

import numpy as np


def pack(value: Any) -> bytes:
    """Write a JSON value as bytes. Tuples arrive as lists, keys as strings, and numbers of numpy as those of Python."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=np.generic.item)
    # A text of a file may hold halves of surrogate pairs.
    return text.encode("utf-8", "surrogatepass")


def unpack(content: bytes) -> Any:
    """Read what `pack` wrote; spaces may follow."""
    return json.loads(content.decode("utf-8", "surrogatepass"))
