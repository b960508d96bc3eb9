"""The folder of the parts of a translation: its manifest, and parts with seals, of which the output is made.

The manifest has everything that determines the output; parts of another one are refused. A part is a file of one line,
its seal, and then the translations of one chunk of the inputs. The seal is the SHA-256 of the translation, the chunk,
its source text and its translations. So a part that is damaged, empty, in the place of another one, of another
translation or of other source lines is recognized, and translated again.
"""

import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from dist_transformer.base.errors import UserError
from dist_transformer.base.files import sha256_of, write_file
from dist_transformer.base.sole_writer import Fence
from dist_transformer.config.plain import parse_json
from dist_transformer.data.text.compressed import is_compressed
from dist_transformer.model_folder import CONFIG_FILE, TOKENIZER_FILE, WEIGHTS_FILE, with_share
from dist_transformer.version import __version__

MANIFEST_FILE = "manifest.json"
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


def manifest_of(models: Sequence[Path], source: Source, settings: Mapping[str, Any]) -> bytes:
    """Return the content of a manifest: version, SHA-256 of the models' files and of the text, and settings."""
    values = {
        "version": __version__,
        "models": [
            {name: sha256_of(model / name) for name in (CONFIG_FILE, TOKENIZER_FILE, WEIGHTS_FILE)}
            | ({} if share == 1 else {"share": share})
            for model, share in map(with_share, models)
        ],
        "inputs": {"lines": source.lines, "sha256": source.sha256},
        "settings": settings,
    }
    return (json.dumps(values, indent=1, ensure_ascii=False) + "\n").encode()


def require_same(parts: Path, manifest: bytes) -> None:
    """Compare the manifest in a folder of parts, if there is one, with that of the command.

    Raises:
        UserError: they differ, and the message names each difference; or the one in the folder is damaged.
    """
    file = parts / MANIFEST_FILE
    if not file.exists():
        return
    try:
        other = _differences(parse_json(file.read_bytes()), parse_json(manifest))
    except (ValueError, LookupError, TypeError):
        raise UserError(f"{file} is damaged, or of another version: remove {parts} to start again") from None
    if other:
        raise UserError(
            f"{parts} was started {' and '.join(other)}: use the same settings and files to resume it, or remove that "
            "folder to start again"
        )


def _differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    other = []
    if before["version"] != now["version"]:
        other.append(f"by version {before['version']}, not {now['version']}")
    if before["models"] != now["models"]:
        other.append("with another model")
    if before["inputs"] != now["inputs"]:
        other.append("with other inputs, or with these before they changed")
    for flag in {**before["settings"], **now["settings"]}:
        was, is_now = before["settings"].get(flag), now["settings"].get(flag)
        if was != is_now:
            other.append(_difference(flag, was, is_now))
    return other


def _difference(flag: str, was: Any, is_now: Any) -> str:
    if was is None or was is False:
        return f"without {flag}"
    value = "" if was is True else f" {was}"
    return f"with {flag}{value}" + ("" if is_now is None or is_now is False else f", not {is_now}")


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

    def copy(self, whole: BinaryIO | None = None) -> bool:
        """Read the part and compare it with its seal; return False if it is absent or is not this part.

        Args:
            whole: file to which the translations are copied while they are read.

        Raises:
            OSError: it cannot be read, or `whole` cannot be written.
        """
        if not self.path.exists():
            return False
        with self.path.open("rb") as file:
            # A longer line is no seal.
            recorded, found = file.readline(_BLOCK), self._seal()
            while block := file.read(_BLOCK):
                found.update(block)
                if whole is not None:
                    whole.write(block)
        return recorded == f"{found.hexdigest()}\n".encode()

    def _seal(self) -> "hashlib._Hash":
        """Begin the seal; the translations follow."""
        return hashlib.sha256(f"{self.translation} {self.number} {self.source_sha256}\n".encode())


def _as_bytes(lines: Iterable[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode("utf-8")
