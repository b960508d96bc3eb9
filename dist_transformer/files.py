"""Files that are on disk when we say so, and their hashes."""

import contextlib
import fcntl
import hashlib
import os
import stat
import uuid
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

_PICKLE_SUFFIXES = (".pkl", ".pickle", ".pt", ".pth", ".joblib")
# How pickles of protocol 2 to 5 begin.
_PICKLE_STARTS = tuple(bytes([0x80, protocol]) for protocol in (2, 3, 4, 5))


def sync(path: Path) -> None:
    """Flush a file, or a folder's names, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_synced(path: Path, content: bytes) -> None:
    """Write a file and flush it; its name is on disk when its folder is flushed too."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A name beside `path` to write to; it becomes `path` when the block is done, so that `path` is whole or absent.

    The block flushes what it writes. No two processes get the same name, wherever they run.
    """
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial")
    try:
        yield partial
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def with_default_rights(path: Path) -> Iterator[None]:
    """Give the file that the block writes to `path` the rights that the umask leaves to a new file.

    For libraries that write beside `path` and rename: such a file is its owner's alone. The process's umask, which all
    threads share, is not touched.
    """
    path.unlink(missing_ok=True)
    path.touch()
    rights = stat.S_IMODE(path.stat().st_mode)
    yield
    path.chmod(rights)


def make_folder_beside(path: Path) -> Path:
    """Make a hidden folder beside `path`, to become `path` when it is whole; no other process gets the same one."""
    folder = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    folder.mkdir()
    return folder


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_pickle(path: Path) -> bool:
    """Whether a file would run code when it is loaded: by its name, or by how it begins."""
    if path.suffix in _PICKLE_SUFFIXES:
        return True
    if path.suffix == ".safetensors":
        # The length of its header comes first, and may look like a pickle's start; nothing unpickles such a file.
        return False
    with path.open("rb") as file:
        start = file.read(4)
    if start.startswith(_PICKLE_STARTS):
        return True
    if start != b"PK\x03\x04" or not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return any(name.endswith(".pkl") for name in archive.namelist())


@contextlib.contextmanager
def exclusive(path: Path, *, wait: bool = True) -> Iterator[TextIO]:
    """Hold the lock file `path`, among processes and threads of this machine; it ends with its process.

    Returns:
        the file, open for the holder's own notes.

    Raises:
        BlockingIOError: somebody else holds it, and `wait` is False.
    """
    with path.open("a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield file


def replace_synced(path: Path, content: bytes) -> None:
    """Give a file new content, on disk when this returns; at any moment it holds the old content or the new."""
    temporary = path.with_name(f".{path.name}.tmp")
    write_synced(temporary, content)
    temporary.replace(path)
    sync(path.parent)
