"""The lock of a folder, and its fence: a process that has lost the folder must not write to it any more.

Where locks are local to a node or missing, a second command may start in a folder while the first one works or is
suspended. The lock file then holds the token of the second. So the holder checks right before each commit that the
token is still its own.
"""

import errno
import fcntl
import json
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from dist_transformer.base.errors import UserError
from dist_transformer.base.files import append_to, make_folder

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

    The kernel holds the lock: it ends with its process, however that ends, and leaves nothing to remove. It works
    between nodes on file systems with shared locks: NFS, GPFS, Lustre mounted with `flock`.

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
    path, deadline, token = folder / LOCK_FILE, time.monotonic() + patience, uuid.uuid4().hex
    with append_to(path) as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise UserError(words.in_use(_holder(path))) from None
                time.sleep(0.1)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                note(f"{path} cannot be locked ({error}): {words.unlocked}")
                break
        holder = {"host": socket.gethostname(), "pid": os.getpid(), "since": _now(), "token": token}
        file.truncate(0)
        file.write(json.dumps(holder).encode())
        file.flush()

        def fence() -> None:
            if not _is_held(path, token):
                raise UserError(words.lost)

        try:
            yield fence
        finally:
            if _is_held(path, token):
                # No process holds the folder now, and a folder that is passed on should name no host.
                file.truncate(0)


def _is_held(path: Path, token: str) -> bool:
    try:
        return json.loads(path.read_bytes())["token"] == token
    except (FileNotFoundError, NotADirectoryError, ValueError, LookupError):
        # Another error of the system does not show who holds the folder.
        return False


def _now() -> str:
    return datetime.now(UTC).isoformat(sep=" ", timespec="seconds")


def _holder(lock: Path) -> str:
    try:
        holder = json.loads(lock.read_bytes())
        return f"process {holder['pid']} on {holder['host']} since {holder['since']}"
    except (OSError, ValueError, LookupError, TypeError):
        return "another process"
