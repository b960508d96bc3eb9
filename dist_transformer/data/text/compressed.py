"""Open compressed files by the suffix of their names: gzip, xz, bzip2 and Zstandard.

Such a file consists of members (streams, frames), one after the other. The libraries' own files end silently at bytes
that are no member, or within the last one; here all of a file is read, or reported as damaged.
"""

import bz2
import functools
import io
import lzma
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from dist_transformer.base.errors import UserError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

_PIECE = 2**16
# Decompressors of one member, by suffix.
_MEMBERS: dict[str, Callable[[], Any]] = {
    ".gz": functools.partial(zlib.decompressobj, wbits=31),
    ".xz": functools.partial(lzma.LZMADecompressor, lzma.FORMAT_XZ),
    ".bz2": bz2.BZ2Decompressor,
    ".zst": zstd.ZstdDecompressor,
}
# Zero bytes may follow a member in multiples of this; otherwise not at all.
_PADDING = {".gz": 1, ".xz": 4}
DAMAGED = (EOFError, zlib.error, lzma.LZMAError, zstd.ZstdError)
"""Errors of damaged content, except for those of bz2, which raises an OSError without a number."""


class _Content(io.RawIOBase):
    """Content of an open compressed file."""

    def __init__(self, file: IO[bytes], suffix: str) -> None:
        self._file = file
        self._pieces, self._piece = _unpacked(file, suffix), memoryview(b"")

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


def _unpacked(file: IO[bytes], suffix: str) -> Iterator[bytes]:
    """Unpack all members of a file, of which there is at least one.

    Raises:
        EOFError: the file ends within a member, or its padding has another length.
        Exception: of the library, because there is something else than a member.
    """
    read, padding = functools.partial(file.read, _PIECE), _PADDING.get(suffix, 0)
    packed = read()
    while True:
        member = _MEMBERS[suffix]()
        while not member.eof:
            is_end = not packed and getattr(member, "needs_input", True) and not (packed := read())
            piece = member.decompress(packed, _PIECE)
            if is_end and not piece and not member.eof:
                raise EOFError("it ends too early")
            # The decompressor of zlib returns what it did not take, the others keep it.
            packed = member.unused_data or getattr(member, "unconsumed_tail", b"")
            yield piece
        zeros = 0
        while (packed := packed or read()) and padding and packed[0] == 0:
            rest = packed.lstrip(b"\0")
            zeros += len(packed) - len(rest)
            packed = rest
        if zeros and zeros % padding:
            raise EOFError(f"{zeros} zero bytes follow a part, not a multiple of {padding}")
        if not packed:
            return


def is_compressed(path: Path) -> bool:
    return path.suffix in _MEMBERS


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
    return io.BufferedReader(_Content(open(path, "rb"), path.suffix), _PIECE)
