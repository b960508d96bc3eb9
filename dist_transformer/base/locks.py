"""Locks of files and folders among the processes and threads of this machine; they end with their process."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO


@contextlib.contextmanager
def exclusive(path: Path, *, wait: bool = True) -> Iterator[TextIO]:
    """Hold the lock file `path` during the block.

    Yields:
        the file, open for notes of the lock's owner.

    Raises:
        BlockingIOError: another process or thread holds it, and `wait` is False.
    """
    with path.open("a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield file


@contextlib.contextmanager
def exclusive_folder(path: Path) -> Iterator[None]:
    """Hold a lock on a folder itself during the block, if the file system can lock more than files; NFS cannot.

    Raises:
        OSError: it is not a folder.
    """
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def is_locked(path: Path) -> bool | None:
    """Return whether a process holds the lock of a file or a folder; None if this is unknown."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(handle)
    return False
