"""Files that are whole and on disk when we say so, and their hashes: the only place that writes files."""

import contextlib
import errno
import fcntl
import hashlib
import io
import os
import stat
import uuid
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

from dist_transformer.errors import UserError

_UNFINISHED = ".tmp"
# Bytes of the largest file that is read at once without need: a tokenizer of 256,000 words has about 20 MB.
_SMALL = 2**28
_PICKLE_SUFFIXES = (".pkl", ".pickle", ".pt", ".pth", ".joblib")
# How pickles of protocol 2 to 5 begin.
_PICKLE_STARTS = tuple(bytes([0x80, protocol]) for protocol in (2, 3, 4, 5))


def _no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def sync(path: Path) -> None:
    """Flush a file, or a folder's names, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def whole_path(path: Path, *, durable: bool = True, fence: Callable[[], object] | None = None) -> Iterator[Path]:
    """Give the name of a new file beside `path`; it becomes `path`, on disk, when the block is done.

    At any moment `path` holds its old content or the new one, whole, even when the power fails; when the block raises,
    the old one stays. The new file's name is random, so that no two writers share it and nobody can put a link in its
    place. A link at `path` is replaced, not followed; a device or a pipe is written to.

    Args:
        durable: False for what is worth nothing after a crash: it is whole all the same, but not flushed.
        fence: called right before the new file takes the name; what it raises keeps the old one.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        yield path
        return
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex}{_UNFINISHED}")
    handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
    rights = stat.S_IMODE(os.fstat(handle).st_mode)
    os.close(handle)
    try:
        yield beside
        if stat.S_IMODE(beside.stat().st_mode) != rights:
            # Some libraries write beside and rename, too, and leave a file that is its owner's alone. The umask, which
            # all threads share, is not touched.
            beside.chmod(rights)
        if durable:
            sync(beside)
        if fence is not None:
            fence()
        beside.replace(path)
        if durable:
            sync(path.absolute().parent)
    finally:
        beside.unlink(missing_ok=True)


def write_file(
    path: Path, content: bytes | str, *, durable: bool = True, fence: Callable[[], object] | None = None
) -> None:
    """Write a file as `whole_path` does; text becomes UTF-8, its line ends as they are."""
    with whole_path(path, durable=durable, fence=fence) as beside, beside.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)


def require_writable(file: Path) -> None:
    """Refuse a place where no file can be written, as far as can be seen before it is.

    Raises:
        UserError: it names the place.
    """
    nearest = next(folder for folder in file.absolute().parents if folder.exists())
    if file.is_dir() or not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise UserError(f"{file} cannot be written: choose another place")


def write_new(path: Path, content: str) -> None:
    """Write a small file that nobody has written yet; the first of several writers succeeds.

    Raises:
        FileExistsError: there is one.
    """
    with open(path, "xb", opener=_no_link) as file:
        file.write(content.encode())


def remove_unfinished(folder: Path, name: str = "*") -> None:
    """Remove what writers left that were killed; nobody may be writing files of that name (a glob) in the folder."""
    for left in folder.glob(f".{name}.*{_UNFINISHED}"):
        left.unlink(missing_ok=True)


def append_to(path: Path) -> io.BufferedWriter:
    """Open a file to add to its end. A link is refused."""
    return open(path, "ab", opener=_no_link)


def move(source: Path, target: Path) -> None:
    """Rename a file or a folder; on disk when this returns."""
    source.rename(target)
    for folder in {source.absolute().parent, target.absolute().parent}:
        sync(folder)


def read_small(path: Path, *, most: int = _SMALL) -> bytes:
    """Read a file that is small when it is what its name says.

    Raises:
        OSError: it cannot be read, or has more than `most` bytes.
    """
    with path.open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes")
    return content


def make_folders(path: Path) -> None:
    """Make a folder and those above it that are missing; on disk when this returns."""
    path = path.absolute()
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync(folder.parent)


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
    with open(path, "a+", encoding="utf-8", opener=_no_link) as file:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield file


@contextlib.contextmanager
def exclusive_folder(path: Path) -> Iterator[int | None]:
    """Hold a lock of a folder itself, which nobody can remove; it ends with its process.

    Returns:
        the folder's handle, or None where the file system locks files alone, as NFS.

    Raises:
        BlockingIOError: somebody else holds it.
    """
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        locked: int | None = handle
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError:
            locked = None
        yield locked
    finally:
        os.close(handle)
