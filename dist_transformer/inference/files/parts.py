"""Sealed parts of a translation: only a part with the seal that it must have becomes part of the output.

A part is a file of one line of JSON, its seal, and then the translations of one chunk of the inputs. The seal states
the translation, the chunk, its source text and its translations, by SHA-256. So a part that is damaged, empty, in the
place of another one, of another translation or of other source lines is recognized, and translated again.
"""

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from dist_transformer.base.files import write_file
from dist_transformer.base.sole_writer import Fence

_BLOCK = 2**20


def parts_of(output: Path) -> Path:
    """Return the folder of the parts of an output."""
    return output.with_name(f"{output.name}.parts")


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Text of the inputs."""

    chunks: tuple[tuple[int, bytes], ...]
    """Lines and SHA-256 of each chunk."""
    sha256: str
    """SHA-256 of all lines, each with a line end."""

    @property
    def lines(self) -> int:
        return sum(lines for lines, _ in self.chunks)


def read_source(lines: Iterable[str], chunk_lines: int) -> Source:
    """Read the lines of all inputs, and keep one chunk of them in memory."""
    whole, chunks = hashlib.sha256(), list[tuple[int, bytes]]()
    for chunk in in_chunks(lines, chunk_lines):
        text = _as_bytes(chunk)
        whole.update(text)
        chunks.append((len(chunk), hashlib.sha256(text).digest()))
    return Source(chunks=tuple(chunks), sha256=whole.hexdigest())


def in_chunks(lines: Iterable[str], chunk_lines: int) -> Iterator[list[str]]:
    """Cut lines into chunks. The chunks do not depend on the number of ranks."""
    left = iter(lines)
    while chunk := list(itertools.islice(left, chunk_lines)):
        yield chunk


def is_source_of(chunk: tuple[int, bytes], lines: list[str]) -> bool:
    """Return whether a chunk of a `Source` has these lines."""
    return chunk == (len(lines), hashlib.sha256(_as_bytes(lines)).digest())


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Place and seal of the translations of one chunk."""

    path: Path
    translation: str
    """SHA-256 of everything that determines the output."""
    number: int
    chunk: tuple[int, bytes]
    """Lines and SHA-256 of the source text."""

    def write(self, texts: Iterable[str], fence: Fence) -> None:
        """Write the translations of each line, with their seal."""
        content = "".join(texts).encode("utf-8")
        fence()
        write_file(self.path, self._seal(content.count(b"\n"), hashlib.sha256(content)) + content)

    def copy(self, whole: BinaryIO | None = None) -> int | None:
        """Read the part, compare it with its seal, and count its lines; None if it is absent or is not this part.

        Args:
            whole: file to which the translations are copied while they are read.

        Raises:
            OSError: it cannot be read, or `whole` cannot be written.
        """
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return None
        with file:
            # A longer line is no seal.
            stated, found, lines = file.readline(_BLOCK), hashlib.sha256(), 0
            while block := file.read(_BLOCK):
                found.update(block)
                lines += block.count(b"\n")
                if whole is not None:
                    whole.write(block)
        return lines if stated == self._seal(lines, found) else None

    def _seal(self, lines: int, text: "hashlib._Hash") -> bytes:
        source_lines, source = self.chunk
        seal = {
            "translation": self.translation,
            "chunk": self.number,
            "source_lines": source_lines,
            "source_sha256": source.hex(),
            "lines": lines,
            "sha256": text.hexdigest(),
        }
        return json.dumps(seal).encode() + b"\n"


def _as_bytes(lines: Iterable[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode("utf-8")
