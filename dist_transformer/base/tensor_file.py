"""Reader for parts of a safetensors file, with verified bytes.

The library reads by file name, which leaves a gap between check and use, or from bytes that it copies, which takes the
memory of two models. The format is a length, a JSON header and the numbers.
"""

import errno
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from dist_transformer.base.errors import UserError
from dist_transformer.base.files import require_size
from dist_transformer.base.verified import Stated, VerifiedFile, read_verified

_LENGTH_BYTES = 8
LARGEST_HEADER = 2**24
"""Bytes of the longest header, enough for 100,000 tensors."""
# Of a tensor of torch.
_MOST_DIMENSIONS = 64


@dataclass(frozen=True, slots=True)
class _Place:
    """Byte range, dtype and shape of a tensor."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class TensorFile:
    """A safetensors file whose bytes come from `read`, which verifies them.

    Raises:
        UserError: it is not a safetensors file.
    """

    def __init__(self, path: Path, size: int, read: Callable[[int, int], bytearray], *, remedy: str) -> None:
        self.path, self._read, self._remedy = path, read, remedy
        try:
            self.metadata, self._places = _parse(size, read)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise UserError(f"{path} cannot be read as safetensors ({error}): {remedy}") from None

    @classmethod
    def in_memory(cls, path: Path, stated: Stated) -> "TensorFile":
        """Read a whole file once, into memory.

        Raises:
            UserError: it cannot be read, does not have the recorded hash, or is not a safetensors file.
        """
        content = memoryview(read_verified(path, stated))
        return cls(path, len(content), lambda start, end: bytearray(content[start:end]), remedy=stated.remedy)

    @classmethod
    def on_disk(cls, path: Path, stated: Stated) -> "TensorFile":
        """Read a file twice: once for its hash, then the requested parts. It may be larger than the memory.

        Raises:
            UserError: it cannot be read, does not have the recorded hash, or is not a safetensors file.
        """
        file = VerifiedFile(path, stated)
        return cls(path, file.size, file.read, remedy=stated.remedy)

    def names(self) -> list[str]:
        return list(self._places)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._places[name].shape

    def dtype(self, name: str) -> str:
        """Return the dtype in the format's notation, such as `F32`."""
        return self._places[name].dtype

    def tensor(self, name: str) -> torch.Tensor:
        """Read a tensor of fp32 numbers."""
        return self._numbers(name, 0, math.prod(self.shape(name))).view(self.shape(name))

    def rows(self, name: str, first: int, end: int) -> torch.Tensor:
        """Read some rows of a tensor of fp32 numbers."""
        of_row = self.shape(name)[1:]
        numbers = math.prod(of_row)
        return self._numbers(name, first * numbers, end * numbers).view(end - first, *of_row)

    def _numbers(self, name: str, first: int, end: int) -> torch.Tensor:
        place = self._places[name]
        if place.dtype != "F32":
            raise UserError(f"{self.path} stores {name!r} as {place.dtype}, but weights must be F32: {self._remedy}")
        if first == end:
            return torch.empty(0)
        content = self._read(place.start + 4 * first, place.start + 4 * end)
        return torch.frombuffer(content, dtype=torch.float32)


def is_finite(tensor: torch.Tensor) -> bool:
    """Return whether every number of an fp32 tensor is finite."""
    # A NaN makes minimum and maximum NaN. This is four times as fast as testing each number, and needs no copy.
    return tensor.numel() == 0 or all(math.isfinite(end.item()) for end in tensor.aminmax())


def open_tensors(path: Path) -> Any:
    """Open a regular file with the library, which reads the whole header.

    Raises:
        OSError: it cannot be opened, or its header is too long.
        SafetensorError: it is not a safetensors file.
    """
    with path.open("rb") as file:
        require_size(int.from_bytes(file.read(_LENGTH_BYTES), "little"), LARGEST_HEADER)
    try:
        return safe_open(path, framework="pt")
    except MemoryError:
        # The library maps the file, for which an address space may be too small.
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)) from None


def values_problem(path: Path) -> str | None:
    """Describe the first tensor of a safetensors file with a value that is not finite; None if there is none.

    Tensors are read one at a time, so the file may be larger than the memory.

    Raises:
        OSError, SafetensorError, RuntimeError: it cannot be read.
    """
    with open_tensors(path) as stored:
        broken = next((name for name in stored.keys() if not is_finite(stored.get_tensor(name))), None)  # noqa: SIM118
    return None if broken is None else f"{path}: tensor {broken!r:.60} holds values that are not finite"


def _parse(size: int, read: Callable[[int, int], bytearray]) -> tuple[Mapping[str, str], Mapping[str, _Place]]:
    """Parse the metadata, and the place of each tensor.

    Raises:
        ValueError, TypeError, KeyError, AttributeError, RecursionError: the file does not follow the format.
    """
    if size < _LENGTH_BYTES:
        raise ValueError("it is too short")
    length = int.from_bytes(read(0, _LENGTH_BYTES), "little")
    begin = _LENGTH_BYTES + length
    if length > LARGEST_HEADER or begin > size:
        raise ValueError("its header is longer than the file")
    header = _object(json.loads(bytes(read(_LENGTH_BYTES, begin))), "its header")
    metadata = _object(header.pop("__metadata__", {}), "__metadata__")
    if any(type(value) is not str for value in metadata.values()):
        raise ValueError("its metadata are not texts")
    places, before = {}, begin
    found = [(name, _place(entry, name, begin)) for name, entry in header.items()]
    for name, place in sorted(found, key=lambda item: (item[1].start, item[1].end)):
        if place.start != before or not place.start <= place.end <= size:
            raise ValueError(f"tensor {name!r:.60} has a wrong byte range")
        if place.dtype == "F32" and place.end - place.start != 4 * math.prod(place.shape):
            raise ValueError(f"tensor {name!r:.60} has a byte range that does not fit its shape")
        places[name] = place
        before = place.end
    if before != size:
        raise ValueError("it has bytes after its tensors")
    return metadata, places


def _object(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{name} is not an object")
    return value


def _place(entry: Any, name: str, begin: int) -> _Place:
    """Read the entry of a tensor, whose offsets count from `begin`. Its numbers must be whole, without a sign."""
    values = _object(entry, f"the entry of tensor {name!r:.60}")
    dtype = values.get("dtype")
    shape, offsets = values.get("shape", ()), values.get("data_offsets", ())
    if type(dtype) is not str or not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise ValueError(f"tensor {name!r:.60} has a wrong dtype, shape or byte range")
    return _Place(dtype, tuple(shape), begin + offsets[0], begin + offsets[1])


def _are_sizes(numbers: Any) -> bool:
    # 2.0 and true are other types, which compare equal to whole numbers. The product of a million sizes takes hours.
    return (
        isinstance(numbers, list)
        and len(numbers) <= _MOST_DIMENSIONS
        and all(type(number) is int and 0 <= number < 2**63 for number in numbers)
    )
