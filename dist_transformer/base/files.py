"""Durable, atomic writes: the only place that writes and removes files."""

import contextlib
import glob
import hashlib
import io
import os
import re
import shutil
import signal
import stat
import sys
import threading
import uuid
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from dist_transformer.base.errors import UserError, WriteError, lack_of_room
from dist_transformer.base.locks import exclusive_folder, is_locked

_UNFINISHED = ".tmp"
_PICKLE_SUFFIXES = (".pkl", ".pickle", ".pt", ".pth", ".joblib")
# First bytes of pickles of protocol 2 to 5.
_PICKLE_STARTS = tuple(bytes([0x80, protocol]) for protocol in (2, 3, 4, 5))
# Suffix of the folders of `folder_beside`, and of older folders that were moved aside for them.
_HIDDEN = re.compile(r"(\.[0-9a-f]{32})(\.old)?")


def sync(path: Path) -> None:
    """Flush a file, or a folder's entries, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def whole_path(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """Yield the name of a new file in the same folder; it becomes `path`, durably, at the end of the block.

    At any moment `path` has its whole old content or its whole new content, even after a power failure. If the block
    raises, the old content stays. The new file's name is random, so that two writers never share it. A link at `path`
    is replaced, not followed. Streams that the system names (`/dev/stdout`) are written directly.

    Args:
        durable: False if the file is useless after a crash: it is written whole, but not flushed.

    Raises:
        WriteError: the system does not let us.
    """
    if _is_stream(path):
        yield path
        return
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex}{_UNFINISHED}")
    try:
        handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        rights = stat.S_IMODE(os.fstat(handle).st_mode)
        os.close(handle)
        yield beside
        if stat.S_IMODE(beside.stat().st_mode) != rights:
            # Some libraries also write a temporary file and rename it, and leave a file that only its owner can read.
            # The umask is not changed, because all threads share it.
            beside.chmod(rights)
        if durable:
            sync(beside)
        beside.replace(path)
        if durable:
            sync(path.absolute().parent)
    except Exception as error:
        raise _named(error, path, beside) from error
    finally:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)


def _named(error: Exception, path: Path, beside: Path) -> Exception:
    """Name the path in an error of the system: that of a write has no name, and a library's of a full disk is its own.

    Args:
        beside: what was written in place of the path; errors of other files stay as they are.
    """
    if number := lack_of_room(error):
        return WriteError(number, getattr(error, "strerror", None) or os.strerror(number), str(path))
    if not isinstance(error, OSError) or error.errno is None:
        return error
    is_own = error.filename is None or str(error.filename).startswith(str(beside))
    return WriteError(error.errno, error.strerror, str(path)) if is_own else error


def _is_stream(path: Path) -> bool:
    """Return whether a path is the system's name of an open pipe or a device, which only the system can create."""
    folder = path.absolute().parent
    named = str(folder) in ("/dev", "/dev/fd") or folder.parts[1:2] == ("proc",)
    return named and path.exists() and not path.is_file() and not path.is_dir()


def write_file(path: Path, content: bytes | str, *, durable: bool = True) -> None:
    """Write a file as `whole_path` does. Text is encoded in UTF-8, with unchanged line ends."""
    with whole_path(path, durable=durable) as beside, beside.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)


def require_writable(file: Path) -> None:
    """Check early that a file can probably be written.

    Raises:
        UserError: it cannot; the message names the place.
    """
    nearest = next(folder for folder in file.absolute().parents if folder.exists())
    if file.is_dir() or not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise UserError(f"{file} cannot be written: choose another place")


def refuse_content(out: Path) -> None:
    """Raise a UserError unless `out` does not exist or is an empty folder."""
    if out.is_symlink() or (out.exists() and not (out.is_dir() and not any(out.iterdir()))):
        raise UserError(f"{out} exists: choose another name, or remove it")


def write_new(path: Path, content: str) -> None:
    """Write a small file that does not exist yet; the first of several writers succeeds.

    Raises:
        FileExistsError: the file exists.
    """
    with path.open("xb") as file:
        file.write(content.encode())


def remove_unfinished(folder: Path, name: str = "*") -> None:
    """Remove temporary files of killed writers. No process may be writing files of that name (a glob) in the folder."""
    for left in folder.glob(f".{name}.*{_UNFINISHED}"):
        remove(left)


def remove(path: Path) -> None:
    """Remove a file, or a link itself. A missing file is not an error."""
    path.unlink(missing_ok=True)


def remove_tree(path: Path, *, as_far_as_possible: bool = False) -> None:
    """Remove a folder with its contents; anything else is removed as by `remove`.

    Args:
        as_far_as_possible: leave files that cannot be removed, without an error.
    """
    with contextlib.suppress(*([OSError] if as_far_as_possible else [])):
        if path.is_symlink() or not path.is_dir():
            remove(path)
        else:
            shutil.rmtree(path, ignore_errors=as_far_as_possible)


def make_folder(path: Path) -> None:
    """Make a folder and its missing parents, durably.

    Raises:
        WriteError: the system does not let us.
    """
    path = path.absolute()
    for folder in (*reversed(path.parents), path):
        if not folder.is_dir():
            try:
                folder.mkdir(exist_ok=True)
                sync(folder.parent)
            except OSError as error:
                raise _named(error, folder, folder) from error


def append_to(path: Path) -> io.BufferedWriter:
    return path.open("ab")


def move(source: Path, target: Path) -> None:
    """Rename a file or a folder, durably."""
    source.rename(target)
    for folder in {source.absolute().parent, target.absolute().parent}:
        sync(folder)


def log_lines(path: Path, *, in_progress: bool = False) -> Iterator[str]:
    """Read a text file to which a run appends lines, one at a time, with their ends.

    Bytes that are not UTF-8 are replaced. A last line that is torn has no end.

    Args:
        in_progress: leave out a last line without an end, which is still being written.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n") or not in_progress:
                yield line.decode("utf-8", errors="replace")


@contextlib.contextmanager
def folder_beside(path: Path) -> Iterator[Path]:
    """Make a hidden, locked folder in the folder of `path`, for the caller to fill and move to `path`.

    It is removed if it was not moved, also if SIGTERM ends the process. Each process gets its own. Unlocked ones, which
    killed processes left, are removed first.
    """
    for left in path.parent.glob(f".{glob.escape(path.name)}.*"):
        own = _HIDDEN.fullmatch(left.name.removeprefix(f".{path.name}"))
        # An older folder that was moved aside may be the only copy.
        if own and is_locked(path.with_name(f".{path.name}{own[1]}")) is False and (own[2] is None or path.exists()):
            remove_tree(left, as_far_as_possible=True)
    while True:
        folder = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        with contextlib.ExitStack() as held:
            held.enter_context(leaving_at_sigterm())
            try:
                folder.mkdir()
                # Before it was locked, another process may have removed it as a leftover.
                with contextlib.suppress(FileNotFoundError):
                    held.enter_context(exclusive_folder(folder))
                if not folder.exists():
                    continue
                yield folder
                return
            except Exception as error:
                raise _named(error, path, folder) from error
            finally:
                remove_tree(folder, as_far_as_possible=True)


@contextlib.contextmanager
def leaving_at_sigterm() -> Iterator[None]:
    """Turn SIGTERM into an exception, so that the blocks it leaves clean up; a handler of the program stays."""
    is_default = signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    if not is_default or threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        # A second one does not interrupt the cleaning.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_pickle(path: Path) -> bool:
    """Return whether loading a file could run code, judged by its name and its first bytes."""
    if path.suffix in _PICKLE_SUFFIXES:
        return True
    if path.suffix == ".safetensors":
        # Its header's length comes first and may look like a pickle's start, but such files are never unpickled.
        return False
    with path.open("rb") as file:
        start = file.read(4)
    if start.startswith(_PICKLE_STARTS):
        return True
    if start != b"PK\x03\x04" or not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return any(name.endswith(".pkl") for name in archive.namelist())
