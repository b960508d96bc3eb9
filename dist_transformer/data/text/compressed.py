"""Open compressed files by the suffix of their names: gzip, xz, bzip2 and Zstandard."""

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import zstandard

# Bytes of a .zst file that are unpacked at a time. They unpack to at most 4 MiB: four bytes can stand for 128 KiB.
_ZSTD_INPUT = 2**7


class _ZstdContent(io.RawIOBase):
    """Content of a .zst file, which may have several frames.

    The library's own stream does not report a file that ends within a frame.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._packed, self._content = b"", memoryview(b"")
        self._frame: Any = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._content:
            self._packed = self._packed or self._file.read(_ZSTD_INPUT)
            if not self._packed:
                if self._frame is not None:
                    raise EOFError("it ends within a frame")
                return 0
            if self._frame is None:
                self._frame = zstandard.ZstdDecompressor().decompressobj()
            self._content = memoryview(self._frame.decompress(self._packed))
            self._packed = self._frame.unused_data
            if self._frame.eof:
                self._frame = None
        taken = self._content[: len(buffer)]
        buffer[: len(taken)] = taken
        self._content = self._content[len(taken) :]
        return len(taken)

    def close(self) -> None:
        self._file.close()
        super().close()


def _open_zstd(path: Path, mode: str) -> io.BufferedReader:
    return io.BufferedReader(_ZstdContent(open(path, mode)))


_OPENERS: dict[str, Callable[..., Any]] = {
    ".gz": gzip.open,
    ".xz": lzma.open,
    ".bz2": bz2.open,
    ".zst": _open_zstd,
}
DAMAGED = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile, zstandard.ZstdError)
"""Errors of damaged content, except for those of bz2, which raises an OSError without a number."""


def is_compressed(path: Path) -> bool:
    return path.suffix in _OPENERS


def open_content(path: Path) -> io.BufferedReader:
    """Open a file to read its bytes, unpacked if its name has the suffix of a compressed file.

    Raises:
        OSError: it cannot be opened.
    """
    return _OPENERS.get(path.suffix, open)(path, "rb")
