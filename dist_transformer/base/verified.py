"""Content with its recorded SHA-256, which is checked once, when the content is read."""

import hashlib
import io
import json
import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dist_transformer.base.errors import UserError
from dist_transformer.base.files import sha256_of

Content = bytes | mmap.mmap


class Held:
    """A copy of a file's content, which stays as it was verified when the file changes.

    Args:
        descriptor: open memory file with the content, which other processes may map; None if the system has none.
    """

    def __init__(self, content: Content, descriptor: int | None = None) -> None:
        self.content, self.descriptor = content, descriptor

    @classmethod
    def of(cls, descriptor: int) -> "Held":
        """Map content that another process holds; the object takes ownership of the descriptor."""
        return cls(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ), descriptor)

    @classmethod
    def copy_of(cls, parts: Sequence[bytes | memoryview]) -> "Held":
        """Hold a copy of the given bytes, end to end; Linux only."""
        content = b"".join(parts)
        return _hold(len(content), io.BytesIO(content).readinto)

    def __del__(self) -> None:
        if self.descriptor is not None:
            os.close(self.descriptor)


_NO_HASH = "0" * 64


@dataclass(frozen=True, slots=True)
class Stated:
    """The recorded SHA-256 of a file."""

    sha256: str
    where: str
    """Name of the file that records it, for messages."""
    remedy: str
    """Remedy for a damaged file."""

    def require(self, path: Path, found: str) -> None:
        """Compare a hash with the recorded one.

        Raises:
            UserError: the hashes differ.
        """
        if found != self.sha256:
            raise UserError(f"{path} is damaged (its SHA-256 is not what {self.where} states): {self.remedy}")

    def check(self, path: Path) -> None:
        """Hash a file of any size.

        Raises:
            UserError: it cannot be read, or does not have the recorded hash.
        """
        try:
            found = sha256_of(path)
        except OSError as error:
            raise self.unreadable(path, error) from None
        self.require(path, found)

    def unreadable(self, path: Path, error: OSError) -> UserError:
        return UserError(f"{path} cannot be read ({error.strerror or error}): {self.remedy}")


def read_verified(path: Path, stated: Stated) -> bytes:
    """Read a whole file into memory.

    Raises:
        UserError: it cannot be read, or does not have the recorded hash.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise stated.unreadable(path, error) from None
    stated.require(path, hashlib.sha256(content).hexdigest())
    return content


def hold_verified(path: Path, stated: Stated) -> Held:
    """Copy a file's content into memory that other processes may map.

    Raises:
        UserError: the file cannot be read, or does not have the recorded hash.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            has_memory_files = hasattr(os, "memfd_create") and size > 0
            copied = _hold(size, file.readinto) if has_memory_files else Held(file.read())
    except OSError as error:
        raise stated.unreadable(path, error) from None
    stated.require(path, hashlib.sha256(copied.content).hexdigest())
    return copied


def _hold(size: int, fill: Callable[[memoryview], object]) -> Held:
    descriptor = os.memfd_create("dist_transformer", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, size)
        with mmap.mmap(descriptor, size) as writable, memoryview(writable) as view:
            fill(view)
        return Held(mmap.mmap(descriptor, size, access=mmap.ACCESS_READ), descriptor)
    except BaseException:
        os.close(descriptor)
        raise


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
