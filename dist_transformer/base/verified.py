"""Content with its recorded SHA-256 at the time of use, whatever happens to its file before, meanwhile or after.

A file is never checked and then opened again: `read_verified` and `hold_verified` hash the bytes that they return, and
`VerifiedFile` hashes again what it reads again.
"""

import fcntl
import hashlib
import json
import mmap
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from dist_transformer.base.errors import UserError
from dist_transformer.base.files import LISTING_BYTES, require_size

Content = bytearray | mmap.mmap


class Sealed:
    """A copy of a file's content that no process can change.

    Args:
        descriptor: open memory file with the content, which other processes may map; None if the system has none.
    """

    def __init__(self, content: Content, descriptor: int | None = None) -> None:
        self.content, self.descriptor = content, descriptor

    @classmethod
    def of(cls, descriptor: int) -> "Sealed":
        """Map content that another process sealed; the object takes ownership of the descriptor."""
        return cls(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ), descriptor)

    @classmethod
    def copy_of(cls, parts: Sequence[bytes | memoryview]) -> "Sealed":
        """Seal a copy of the given bytes, end to end; Linux only."""
        return _seal(sum(len(part) for part in parts), lambda view: _lay(parts, view))

    def __del__(self) -> None:
        if self.descriptor is not None:
            os.close(self.descriptor)


# Bytes per block of the hash. Later reads are in whole blocks, so small blocks waste less.
_BLOCK = 2**18
_NO_HASH = "0" * 64
# No process can write, shrink or extend the content, or remove these seals.
_SEALS = (
    0 if sys.platform != "linux" else fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
)


@dataclass(frozen=True, slots=True)
class Stated:
    """The recorded SHA-256 of a file."""

    sha256: str
    where: str
    """Name of the file that records it, for messages."""
    remedy: str
    """Remedy for a damaged file."""
    most_bytes: int = LISTING_BYTES
    """Bytes of the largest file that is read into memory, or copied."""

    def require(self, path: Path, found: str) -> None:
        """Compare a hash with the recorded one.

        Raises:
            UserError: the hashes differ.
        """
        if found != self.sha256:
            raise UserError(f"{path} is damaged (its SHA-256 is not what {self.where} states): {self.remedy}")

    def unreadable(self, path: Path, error: OSError) -> UserError:
        return UserError(f"{path} cannot be read ({error.strerror or error}): {self.remedy}")


def read_verified(path: Path, stated: Stated) -> bytearray:
    """Read a whole file into memory.

    Raises:
        UserError: it cannot be read, or does not have the stated hash.
    """
    try:
        with path.open("rb") as file:
            content = _read_whole(file, _size_of(file, stated))
    except OSError as error:
        raise stated.unreadable(path, error) from None
    stated.require(path, hashlib.sha256(content).hexdigest())
    return content


def hold_verified(path: Path, stated: Stated) -> Sealed:
    """Make a copy of a file's content that no other process can change.

    Raises:
        UserError: the file cannot be read, or does not have the recorded hash.
    """
    try:
        with path.open("rb") as file:
            copied = read_sealed(file, _size_of(file, stated))
    except OSError as error:
        raise stated.unreadable(path, error) from None
    stated.require(path, hashlib.sha256(copied.content).hexdigest())
    return copied


def read_sealed(file: BinaryIO, size: int) -> Sealed:
    """Copy `size` bytes of a file, with zeros after an earlier end, to memory that the kernel protects from writes.

    The caller must check and use the copy, not the file, which may have changed.
    """
    if not hasattr(os, "memfd_create") or size == 0:
        return Sealed(_read_whole(file, size))
    return _seal(size, lambda view: _fill(view, file))


def _seal(size: int, fill: Callable[[memoryview], None]) -> Sealed:
    descriptor = os.memfd_create("dist_transformer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        with mmap.mmap(descriptor, size) as writable, memoryview(writable) as view:
            fill(view)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        return Sealed(mmap.mmap(descriptor, size, access=mmap.ACCESS_READ), descriptor)
    except BaseException:
        os.close(descriptor)
        raise


def _lay(parts: Sequence[bytes | memoryview], view: memoryview) -> None:
    place = 0
    for part in parts:
        view[place : place + len(part)] = part
        place += len(part)


class VerifiedFile:
    """A file of any size whose parts can be read again, with every byte verified.

    The first pass keeps the state of the hash before each block, not the content. A block that is read later is hashed
    from the state before it, which must give the state after it.

    Raises:
        UserError: the file cannot be read, or does not have the recorded hash.
    """

    def __init__(self, path: Path, stated: Stated) -> None:
        self.path, self._stated = path, stated
        self._states = [hashlib.sha256()]
        self.size = 0
        try:
            with path.open("rb") as file:
                while block := file.read(_BLOCK):
                    self.size += len(block)
                    self._states.append(self._states[-1].copy())
                    self._states[-1].update(block)
        except OSError as error:
            raise stated.unreadable(path, error) from None
        stated.require(path, self._states[-1].hexdigest())
        # Consecutive reads often share a block.
        self._last: tuple[int, bytes] = (-1, b"")

    def read(self, start: int, end: int) -> bytearray:
        """Read the bytes from `start` to `end`, which lie in the file.

        Raises:
            UserError: the file cannot be read, or has changed since the first pass.
        """
        out = bytearray(end - start)
        try:
            with self.path.open("rb") as file:
                for number in range(start // _BLOCK, -(-end // _BLOCK)):
                    first = number * _BLOCK
                    block = memoryview(self._block(file, number))[max(start - first, 0) : end - first]
                    place = max(first - start, 0)
                    out[place : place + len(block)] = block
        except OSError as error:
            raise self._stated.unreadable(self.path, error) from None
        return out

    def _block(self, file: Any, number: int) -> bytes:
        if number != self._last[0]:
            block = os.pread(file.fileno(), _BLOCK, number * _BLOCK)
            state = self._states[number].copy()
            state.update(block)
            if state.digest() != self._states[number + 1].digest():
                raise UserError(f"{self.path} changed while it was read: {self._stated.remedy}")
            self._last = number, block
        return self._last[1]


def with_own_hash(values: Mapping[str, Any]) -> bytes:
    """Write JSON that contains its own SHA-256, computed with zeros in the hash's place."""
    content = (json.dumps({**values, "sha256": _NO_HASH}, indent=1, ensure_ascii=False) + "\n").encode()
    return _replace_last(content, _NO_HASH, hashlib.sha256(content).hexdigest())


def has_own_hash(content: bytes, stated: str) -> bool:
    """Return whether a file has the SHA-256 that it states for itself."""
    return hashlib.sha256(_replace_last(content, stated, _NO_HASH)).hexdigest() == stated


def _replace_last(content: bytes, old: str, new: str) -> bytes:
    before, _, after = content.rpartition(old.encode())
    return before + new.encode() + after


def _size_of(file: BinaryIO, stated: Stated) -> int:
    size = os.fstat(file.fileno()).st_size
    require_size(size, stated.most_bytes)
    return size


def _read_whole(file: BinaryIO, size: int) -> bytearray:
    """Read a file's current content; the caller checks its hash."""
    content = bytearray(size)
    _fill(memoryview(content), file)
    return content


def _fill(view: memoryview, file: BinaryIO) -> None:
    """Read until the end of the view or of the file."""
    filled = 0
    while filled < len(view) and (count := file.readinto(view[filled:])):  # type: ignore[attr-defined]
        filled += count
