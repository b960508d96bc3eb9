"""Parts of a translation, each with a seal: only a part with the seal that it must have becomes part of the output.

A part is a file of one line, its seal, and then the translations of one chunk of the inputs. The seal is the SHA-256 of
the translation, the chunk, its source text and its translations. So a part that is damaged, empty, in the place of
another one, of another translation or of other source lines is recognized, and translated again.
"""

import hashlib
import itertools
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from dist_transformer.base.errors import UserError
from dist_transformer.base.files import write_file
from dist_transformer.base.sole_writer import Fence
from dist_transformer.data.text.compressed import is_compressed

_BLOCK = 2**20


def parts_of(output: Path) -> Path:
    """Return the folder of the parts of an output."""
    return output.with_name(f"{output.name}.parts")


def require_free(output: Path) -> None:
    """Check early that a translation can begin or resume, as far as the name of its output tells.

    Raises:
        UserError: the name is of a compressed file, or there is such a file, and no parts of it.
    """
    if is_compressed(output):
        raise UserError(f"{output} would hold plain text: use a name without {output.suffix}")
    if not parts_of(output).exists():
        refuse_existing(output)


def refuse_existing(output: Path) -> None:
    if os.path.lexists(output):
        raise UserError(f"{output} exists already: choose another --output, or remove it first")


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Text of the inputs."""

    chunks: tuple[tuple[int, str], ...]
    """Lines and SHA-256 of each chunk."""
    sha256: str
    """SHA-256 of all lines, each with a line end."""

    @property
    def lines(self) -> int:
        return sum(lines for lines, _ in self.chunks)


def read_source(lines: Iterable[str], chunk_lines: int) -> Source:
    """Read the lines of all inputs, and keep one chunk of them in memory."""
    whole, chunks = hashlib.sha256(), list[tuple[int, str]]()
    for chunk in in_chunks(lines, chunk_lines):
        whole.update(_as_bytes(chunk))
        chunks.append(describe_chunk(chunk))
    return Source(chunks=tuple(chunks), sha256=whole.hexdigest())


def in_chunks(lines: Iterable[str], chunk_lines: int) -> Iterator[list[str]]:
    """Cut lines into chunks. The chunks do not depend on the number of ranks."""
    left = iter(lines)
    while chunk := list(itertools.islice(left, chunk_lines)):
        yield chunk


def describe_chunk(lines: list[str]) -> tuple[int, str]:
    """Return the entry of a chunk in a `Source`."""
    return len(lines), hashlib.sha256(_as_bytes(lines)).hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Place and seal of the translations of one chunk."""

    path: Path
    translation: str
    """SHA-256 of everything that determines the output."""
    number: int
    source_sha256: str

    def write(self, texts: Iterable[str], fence: Fence) -> None:
        """Write the translations of each line, with their seal."""
        content, seal = "".join(texts).encode("utf-8"), self._seal()
        seal.update(content)
        fence()
        write_file(self.path, f"{seal.hexdigest()}\n".encode() + content)

    def copy(self, whole: BinaryIO | None = None) -> int | None:
        """Read the part, compare it with its seal, and count its lines; None if it is absent or is not this part.

        Args:
            whole: file to which the translations are copied while they are read.

        Raises:
            OSError: it cannot be read, or `whole` cannot be written.
        """
        if not self.path.exists():
            return None
        with self.path.open("rb") as file:
            # A longer line is no seal.
            stated, found, lines = file.readline(_BLOCK), self._seal(), 0
            while block := file.read(_BLOCK):
                found.update(block)
                lines += block.count(b"\n")
                if whole is not None:
                    whole.write(block)
        return lines if stated == f"{found.hexdigest()}\n".encode() else None

    def _seal(self) -> "hashlib._Hash":
        """Begin the seal; the translations follow."""
        return hashlib.sha256(f"{self.translation} {self.number} {self.source_sha256}\n".encode())


def _as_bytes(lines: Iterable[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode("utf-8")
