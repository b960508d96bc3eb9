"""Open compressed files by the suffix of their names: gzip, xz, bzip2 and Zstandard.

Such a file consists of members (streams, frames), one after the other. The libraries' own files end silently at bytes
that are no member, or within the last one; here all of a file is read, or reported as damaged.
"""

import bz2
import functools
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import zstandard

from dist_transformer.base.errors import UserError

_PIECE = 2**16


@dataclass(frozen=True, kw_only=True, slots=True)
class _Format:
    new_member: Callable[[], Any]
    """Returns a decompressor of one member, with the methods and attributes of those of the standard library."""
    padding: int = 0
    """Zero bytes may follow a member in multiples of this; 0: not at all."""
    packed_bytes: int = _PIECE
    """Bytes that are read at a time."""
    limit: tuple[int, ...] = (_PIECE,)
    """Bytes that are unpacked at a time; empty: the decompressor has no limit."""


_FORMATS = {
    ".gz": _Format(new_member=functools.partial(zlib.decompressobj, wbits=31), padding=1),
    ".xz": _Format(new_member=functools.partial(lzma.LZMADecompressor, lzma.FORMAT_XZ), padding=4),
    ".bz2": _Format(new_member=bz2.BZ2Decompressor),
    # They unpack to at most 4 MiB: four bytes can stand for 128 KiB.
    ".zst": _Format(new_member=lambda: zstandard.ZstdDecompressor().decompressobj(), packed_bytes=2**7, limit=()),
}
DAMAGED = (EOFError, zlib.error, lzma.LZMAError, zstandard.ZstdError)
"""Errors of damaged content, except for those of bz2, which raises an OSError without a number."""


class _Content(io.RawIOBase):
    """Content of an open compressed file."""

    def __init__(self, file: IO[bytes], kind: _Format) -> None:
        self._file = file
        self._pieces, self._piece = _unpacked(file, kind), memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._piece:
            if (piece := next(self._pieces, None)) is None:
                return 0
            self._piece = memoryview(piece)
        taken = self._piece[: len(buffer)]
        buffer[: len(taken)] = taken
        self._piece = self._piece[len(taken) :]
        return len(taken)

    def close(self) -> None:
        self._file.close()
        super().close()


def _unpacked(file: IO[bytes], kind: _Format) -> Iterator[bytes]:
    """Unpack all members of a file, of which there is at least one.

    Raises:
        EOFError: the file ends within a member, or its padding has another length.
        Exception: of the library, because there is something else than a member.
    """
    read = functools.partial(file.read, kind.packed_bytes)
    packed = read()
    while True:
        member = kind.new_member()
        while not member.eof:
            is_end = not packed and getattr(member, "needs_input", True) and not (packed := read())
            piece = member.decompress(packed, *kind.limit)
            if is_end and not piece and not member.eof:
                raise EOFError("it ends too early")
            # The decompressor of zlib returns what it did not take, the others keep it.
            packed = member.unused_data or getattr(member, "unconsumed_tail", b"")
            yield piece
        zeros = 0
        while (packed := packed or read()) and kind.padding and packed[0] == 0:
            rest = packed.lstrip(b"\0")
            zeros += len(packed) - len(rest)
            packed = rest
        if zeros and zeros % kind.padding:
            raise EOFError(f"{zeros} zero bytes follow a part, not a multiple of {kind.padding}")
        if not packed:
            return


def is_compressed(path: Path) -> bool:
    return path.suffix in _FORMATS


def refuse_pipe(path: Path) -> None:
    """Refuse what can be read only once, without opening it: opening a pipe waits for a writer.

    Raises:
        UserError: it is a pipe or a device.
    """
    # The name of a pipe of the shell, as in <(command), says nothing in the processes of a launcher.
    is_there = path.exists() or str(path.parent) in ("/dev/fd", "/proc/self/fd")
    if is_there and not path.is_file() and not path.is_dir():
        raise UserError(f"{path} is a pipe or a device, and texts are read more than once: write it to a file first")


def open_content(path: Path) -> io.BufferedReader:
    """Open a file to read its bytes, unpacked if its name has the suffix of a compressed file.

    Raises:
        UserError: it is a pipe or a device.
        OSError: it cannot be opened.
    """
    refuse_pipe(path)
    if not is_compressed(path):
        return open(path, "rb")
    return io.BufferedReader(_Content(open(path, "rb"), _FORMATS[path.suffix]), _PIECE)
