"""The lock of a folder, and its fence: a process that has lost the folder must not write to it any more.

A process may lose its folder while it works: a user removes the lock file or replaces the folder, and a second command
starts there. Or the process was suspended and wakes up after that. So the holder checks right before each commit that
the lock file is still its own.
"""

import errno
import json
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import IO

from dist_transformer.base.errors import UserError
from dist_transformer.base.files import append_to, make_folder, read_small
from dist_transformer.base.locks import exclusive, exclusive_folder

Fence = Callable[[], None]
"""A check that the holder of a folder calls right before each commit.

Raises:
    UserError: the folder is no longer held, so nothing may be written.
"""

LOCK_FILE = "lock"
# A requeued job starts while the last ranks of its previous start are still exiting.
PATIENCE_SECONDS = 5.0
# Errors from file systems without locks, such as Lustre mounted without `flock`.
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
# The lock file no longer exists. Other errors do not show who holds the folder.
_GONE = (FileNotFoundError, NotADirectoryError)


def unfenced() -> None:
    """Do nothing: the fence for ranks that commit nothing, and for folders that no other process uses."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Words:
    """Parts of the messages about a folder, which name its use."""

    in_use: Callable[[str], str]
    """Builds the error about a folder in use; its argument is the holder."""
    lost: str
    """The error of a holder that has lost the folder."""
    unlocked: str
    """End of the note about a file system without locks: what the user must see to."""


@contextmanager
def sole_writer(
    folder: Path, words: Words, note: Callable[[str], None], *, patience: float = PATIENCE_SECONDS
) -> Iterator[Fence]:
    """Lock a folder, so that no other process writes to it.

    The kernel holds the locks: they end with their process, however it ends, and leave nothing to remove. They work
    between nodes on file systems with shared locks: NFS, GPFS, Lustre mounted with `flock`. Besides the lock file, the
    folder itself is locked if the file system allows it, so that removing the file does not admit another process.

    Args:
        folder: made if it does not exist; the file `lock` in it is the lock file.
        note: receives a message if the file system has no locks.
        patience: seconds to wait for a process that is about to end.

    Returns:
        the fence of this holder.

    Raises:
        UserError: another process holds the folder; the error gives host, process and time.
    """
    make_folder(folder)
    path, deadline = folder / LOCK_FILE, time.monotonic() + patience
    with ExitStack() as stack:
        file: IO[bytes] | None = None
        while file is None:
            try:
                file = _acquire(folder, path, stack)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                note(f"{path} cannot be locked ({error}): {words.unlocked}")
                file = stack.enter_context(append_to(path))
            if file is None:
                if time.monotonic() > deadline:
                    raise UserError(words.in_use(_holder(path)))
                time.sleep(0.1)
        token = uuid.uuid4().hex
        holder = {"host": socket.gethostname(), "pid": os.getpid(), "since": _now(), "token": token}
        file.truncate(0)
        file.write(json.dumps(holder).encode())
        file.flush()
        at = os.fstat(file.fileno())
        try:
            yield partial(_require_held, path, (at.st_dev, at.st_ino), token, words.lost)
        finally:
            if _is_held(path, (at.st_dev, at.st_ino), token):
                # No process holds the folder now, and a folder that is passed on should name no host.
                file.truncate(0)


def _acquire(folder: Path, path: Path, stack: ExitStack) -> IO[bytes] | None:
    """Lock the folder and its lock file; None if another process holds one of them, or has just replaced one."""
    with ExitStack() as attempt:
        try:
            handle = attempt.enter_context(exclusive_folder(folder.resolve(), wait=False))
            file = attempt.enter_context(exclusive(path, wait=False)).buffer
        except (BlockingIOError, *_GONE):
            return None
        # The folder may be reached through a link.
        for locked, place in ((handle, folder.resolve()), (file.fileno(), path)):
            try:
                if locked is not None and not os.path.samestat(os.fstat(locked), place.lstat()):
                    return None
            except _GONE:
                return None
        stack.push(attempt.pop_all())
    return file


def _is_held(path: Path, own: tuple[int, int], token: str) -> bool:
    try:
        at = path.lstat()
        return (at.st_dev, at.st_ino) == own and json.loads(read_small(path))["token"] == token
    except (*_GONE, ValueError, LookupError, TypeError):
        return False


def _require_held(path: Path, own: tuple[int, int], token: str, lost: str) -> None:
    if not _is_held(path, own, token):
        raise UserError(lost)


def _now() -> str:
    return datetime.now(UTC).isoformat(sep=" ", timespec="seconds")


def _holder(lock: Path) -> str:
    try:
        holder = json.loads(read_small(lock))
        return f"process {holder['pid']} on {holder['host']} since {holder['since']}"
    except (OSError, ValueError, LookupError, TypeError):
        return "another process"
