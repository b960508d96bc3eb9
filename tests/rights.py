"""Rights of the files that the programs write: those that the umask gives."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

UMASK = 0o027
"""The group may read, others may not: neither a library's 0600 nor an unmasked 0644."""


@pytest.fixture
def umask() -> Iterator[int]:
    """The umask of the test and of what it starts."""
    before = os.umask(UMASK)
    yield UMASK
    os.umask(before)


def wrong_rights(folder: Path) -> dict[str, str]:
    """The folder and all below it whose rights are not those of a new folder or file."""
    paths = [folder, *folder.rglob("*")]
    found = {path: stat.S_IMODE(path.stat().st_mode) for path in paths}
    return {str(path): oct(mode) for path, mode in found.items() if mode != (0o750 if path.is_dir() else 0o640)}
