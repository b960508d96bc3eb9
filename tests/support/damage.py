"""Damage to files, as disks, kills and networks do it."""

from collections.abc import Callable
from pathlib import Path
from random import Random

Fault = Callable[[bytes, Random], bytes | None]
"""The content of a damaged file, from the content of the sound one; None if the file is missing."""


def _flipped(content: bytes, generator: Random) -> bytes:
    changed = bytearray(content or b"\0")
    changed[generator.randrange(len(changed))] ^= 1 << generator.randrange(8)
    return bytes(changed)


FAULTS: dict[str, Fault] = {
    "missing": lambda content, generator: None,
    "empty": lambda content, generator: b"",
    "cut": lambda content, generator: content[: generator.randrange(max(1, len(content)))],
    "flipped": _flipped,
    # As some file systems do after a loss of power.
    "zeros": lambda content, generator: bytes(len(content)),
}


def damage(file: Path, fault: Fault, generator: Random) -> None:
    """Damage a file, which may be missing."""
    content = fault(file.read_bytes() if file.is_file() else b"", generator)
    file.unlink(missing_ok=True)
    if content is not None:
        file.write_bytes(content)


def flip(file: Path, at: int | None = None) -> None:
    """Flip one bit of a file: of the byte `at`, or of the one in the middle."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2 if at is None else at] ^= 1
    file.write_bytes(content)
