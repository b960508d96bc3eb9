"""Locks of files and folders among the processes and threads of this machine; they end with their process."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from dist_transformer.base.links import open_no_link, refuse_linked_parent


@contextlib.contextmanager
def exclusive(path: Path, *, wait: bool = True) -> Iterator[TextIO]:
    """Hold the lock file `path` during the block.

    Yields:
        the file, open for notes of the lock's owner.

    Raises:
        BlockingIOError: another process or thread holds it, and `wait` is False.
        UserError: it is a link, a pipe or a device, or there is a link on the way.
    """
    refuse_linked_parent(path)
    with open(path, "a+", encoding="utf-8", opener=open_no_link) as file:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield file


@contextlib.contextmanager
def exclusive_folder(path: Path, *, wait: bool = True) -> Iterator[int | None]:
    """Hold a lock on a folder itself during the block; unlike a lock file, it cannot be removed.

    Yields:
        the folder's handle, or None if the file system can only lock files, such as NFS.

    Raises:
        BlockingIOError: another process or thread holds it, and `wait` is False.
        OSError: it is not a folder, or is a link.
    """
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        locked: int | None = handle
        try:
            fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError:
            locked = None
        yield locked
    finally:
        os.close(handle)


def is_locked(path: Path) -> bool | None:
    """Return whether a process holds the lock of a file or a folder; None if this is unknown, such as for a link."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
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
