"""Files that are whole and on disk when we say so, and their hashes: the only place that writes and removes files.

A run, model or data folder may come from a stranger, who can put links, pipes and devices where files are expected.
Nothing below a guarded folder is written or removed through a link, and only regular files are read.
"""

import contextlib
import errno
import glob
import hashlib
import io
import os
import re
import shutil
import stat
import uuid
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from dist_transformer.errors import UserError
from dist_transformer.links import open_no_link, refuse_link, refuse_linked_parent
from dist_transformer.locks import exclusive_folder, is_locked

_UNFINISHED = ".tmp"
# Bytes of the largest file that is read at once without need: a tokenizer of 256,000 words has about 20 MB.
_SMALL = 2**28
# Bytes of the largest log: ten million steps.
_LOG = 2**32
_PICKLE_SUFFIXES = (".pkl", ".pickle", ".pt", ".pth", ".joblib")
# How pickles of protocol 2 to 5 begin.
_PICKLE_STARTS = tuple(bytes([0x80, protocol]) for protocol in (2, 3, 4, 5))
# What follows the name in those of `folder_beside`, and of what stepped aside for them.
_HIDDEN = re.compile(r"(\.[0-9a-f]{32})(\.old)?")


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
    place. A link at `path` is replaced, not followed. Streams that the system names (`/dev/stdout`) are written to.

    Args:
        durable: False for what is worth nothing after a crash: it is whole all the same, but not flushed.
        fence: called right before the new file takes the name; what it raises keeps the old one.

    Raises:
        UserError: a link would be passed, or something else than a file or a link is in the place.
    """
    if _is_stream(path):
        yield path
        return
    refuse_linked_parent(path)
    if os.path.lexists(path) and not path.is_symlink() and not path.is_file():
        raise UserError(
            f"{path} is a folder, a pipe or a device, and is not replaced: remove it or choose another place"
        )
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


def _is_stream(path: Path) -> bool:
    """Whether a path is one of the system's names of an open pipe or a device, which only the system can give."""
    folder = path.absolute().parent
    named = str(folder) in ("/dev", "/dev/fd") or folder.parts[1:2] == ("proc",)
    return named and path.exists() and not path.is_file() and not path.is_dir()


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
        UserError: a link would be passed.
    """
    refuse_linked_parent(path)
    with open(path, "xb", opener=open_no_link) as file:
        file.write(content.encode())


def remove_unfinished(folder: Path, name: str = "*") -> None:
    """Remove what writers left that were killed; nobody may be writing files of that name (a glob) in the folder."""
    for left in folder.glob(f".{name}.*{_UNFINISHED}"):
        remove(left)


def remove(path: Path) -> None:
    """Remove a file; of a link the link. What is not there is no error.

    Raises:
        UserError: a link would be passed.
    """
    refuse_linked_parent(path)
    path.unlink(missing_ok=True)


def remove_tree(path: Path, *, as_far_as_possible: bool = False) -> None:
    """Remove a folder with all that is in it; of anything else as `remove`.

    Args:
        as_far_as_possible: leave what cannot be removed, without an error.

    Raises:
        UserError: a link would be passed.
    """
    if path.is_symlink() or not path.is_dir():
        remove(path)
        return
    refuse_linked_parent(path)
    shutil.rmtree(path, ignore_errors=as_far_as_possible)


def make_folder(path: Path) -> None:
    """Make a folder, and those that it lies in, where they are missing; their names are on disk when this returns.

    Raises:
        UserError: it is a link, or a link would be passed.
    """
    refuse_link(path)
    path = path.absolute()
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync(folder.parent)


def append_to(path: Path) -> io.BufferedWriter:
    """Open a file to add to its end.

    Raises:
        UserError: it is a link, a pipe or a device, or a link would be passed.
    """
    refuse_linked_parent(path)
    return open(path, "ab", opener=open_no_link)


def move(source: Path, target: Path) -> None:
    """Rename a file or a folder; on disk when this returns.

    Raises:
        UserError: a link would be passed.
    """
    for path in (source, target):
        refuse_linked_parent(path)
    source.rename(target)
    for folder in {source.absolute().parent, target.absolute().parent}:
        sync(folder)


def _open_regular(path: str, flags: int) -> int:
    handle = os.open(path, flags | os.O_NONBLOCK)
    mode = os.fstat(handle).st_mode
    # A folder has an error of its own.
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is a pipe or a device, not a regular file")
    return handle


def open_regular(path: Path) -> io.BufferedReader:
    """Open a regular file to read; links are followed.

    A pipe would be waited for, and a device may never end.

    Raises:
        OSError: it cannot be opened, or is something else.
    """
    return open(path, "rb", opener=_open_regular)


def regular(path: Path) -> Path:
    """Give the path of a regular file, for a library that opens it.

    Raises:
        OSError: as `open_regular`.
    """
    open_regular(path).close()
    return path


def read_small(path: Path, *, most: int = _SMALL) -> bytes:
    """Read a file that is small when it is what its name says.

    Raises:
        OSError: it cannot be read, is no regular file, or has more than `most` bytes.
    """
    with open_regular(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes")
    return content


def read_log(path: Path) -> str:
    """Read a text file to which a run adds lines; bytes that are no UTF-8 are replaced.

    Raises:
        OSError: it cannot be read, is no regular file, or is too large.
    """
    return read_small(path, most=_LOG).decode("utf-8", errors="replace")


@contextlib.contextmanager
def folder_beside(path: Path) -> Iterator[Path]:
    """Make a hidden folder beside `path`, to become `path` when it is whole; it is removed where it does not.

    No other process gets the same one, and it is locked: one that is not was left by a process that was killed, and is
    removed first.

    Raises:
        UserError: a link would be passed.
    """
    refuse_linked_parent(path)
    for left in path.parent.glob(f".{glob.escape(path.name)}.*"):
        own = _HIDDEN.fullmatch(left.name.removeprefix(f".{path.name}"))
        # What stepped aside may be all that there is.
        if own and is_locked(path.with_name(f".{path.name}{own[1]}")) is False and (own[2] is None or path.exists()):
            remove_tree(left, as_far_as_possible=True)
    while True:
        folder = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        folder.mkdir()
        with contextlib.ExitStack() as held:
            # Another process may have taken it for one that was left, until it was locked.
            with contextlib.suppress(FileNotFoundError):
                held.enter_context(exclusive_folder(folder))
            if not folder.exists():
                continue
            try:
                yield folder
            finally:
                remove_tree(folder, as_far_as_possible=True)
            return


def sha256_of(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_pickle(path: Path) -> bool:
    """Whether a file would run code when it is loaded: by its name, or by how it begins."""
    if path.suffix in _PICKLE_SUFFIXES:
        return True
    if path.suffix == ".safetensors":
        # The length of its header comes first, and may look like a pickle's start; nothing unpickles such a file.
        return False
    with open_regular(path) as file:
        start = file.read(4)
    if start.startswith(_PICKLE_STARTS):
        return True
    if start != b"PK\x03\x04" or not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return any(name.endswith(".pkl") for name in archive.namelist())
