"""The lock of a run folder, and its fence: a process that has lost the folder must not write to it any more.

A process may lose its folder while it trains: a user removes the lock file or replaces the folder, and a second
training starts there. Or the process was suspended and wakes up after that. So the holder checks right before each
commit that the lock file is still its own.
"""

import errno
import json
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import IO

from dist_transformer.base.errors import UserError
from dist_transformer.base.files import append_to, make_folder, read_small
from dist_transformer.base.locks import exclusive, exclusive_folder
from dist_transformer.run.layout import LOCK_FILE

Fence = Callable[[], None]
"""A check that the holder of a run folder calls right before each commit.

Raises:
    UserError: the folder is no longer held, so nothing may be written.
"""

# A requeued job starts while the last ranks of its previous start are still exiting.
_PATIENCE_SECONDS = 5.0
# Errors from file systems without locks, such as Lustre mounted without `flock`.
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
# The lock file no longer exists. Other errors do not show who holds the folder.
_GONE = (FileNotFoundError, NotADirectoryError)


def unfenced() -> None:
    """Do nothing: the fence for ranks that commit nothing, and for folders that no other process uses."""


@contextmanager
def sole_writer(run_dir: Path, note: Callable[[str], None], *, patience: float = _PATIENCE_SECONDS) -> Iterator[Fence]:
    """Lock a run folder, so that no other process writes to it.

    The kernel holds the locks: they end with their process, however it ends, and leave nothing to remove. They work
    between nodes on file systems with shared locks: NFS, GPFS, Lustre mounted with `flock`. Besides the lock file, the
    folder itself is locked if the file system allows it, so that removing the file does not admit another process.

    Args:
        note: receives a message if the file system has no locks.
        patience: seconds to wait for a process that is about to end.

    Returns:
        the fence of this holder.

    Raises:
        UserError: another process holds the folder; the error gives host, process and time.
    """
    make_folder(run_dir)
    path, deadline = run_dir / LOCK_FILE, time.monotonic() + patience
    with ExitStack() as stack:
        file: IO[bytes] | None = None
        while file is None:
            try:
                file = _acquire(run_dir, path, stack)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                note(
                    f"{path} cannot be locked ({error}): make sure that no other run writes to this folder; if two do, "
                    "the one that started first stops at its next save"
                )
                file = stack.enter_context(append_to(path))
            if file is None:
                if time.monotonic() > deadline:
                    raise UserError(_in_use(run_dir, path))
                time.sleep(0.1)
        token = uuid.uuid4().hex
        holder = {"host": socket.gethostname(), "pid": os.getpid(), "since": _now(), "token": token}
        file.truncate(0)
        file.write(json.dumps(holder).encode())
        file.flush()
        at = os.fstat(file.fileno())
        try:
            yield partial(_require_held, run_dir, (at.st_dev, at.st_ino), token)
        finally:
            if _is_held(path, (at.st_dev, at.st_ino), token):
                # No process holds the folder now, and a run folder that is passed on should name no host.
                file.truncate(0)


def _acquire(run_dir: Path, path: Path, stack: ExitStack) -> IO[bytes] | None:
    """Lock the folder and its lock file; None if another process holds one of them, or has just replaced one."""
    with ExitStack() as attempt:
        try:
            folder = attempt.enter_context(exclusive_folder(run_dir.resolve(), wait=False))
            file = attempt.enter_context(exclusive(path, wait=False)).buffer
        except (BlockingIOError, *_GONE):
            return None
        # The folder may be reached through a link.
        for handle, place in ((folder, run_dir.resolve()), (file.fileno(), path)):
            try:
                if handle is not None and not os.path.samestat(os.fstat(handle), place.lstat()):
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


def _require_held(run_dir: Path, own: tuple[int, int], token: str) -> None:
    if not _is_held(run_dir / LOCK_FILE, own, token):
        raise UserError(
            f"{run_dir} is no longer held by this training: its lock file was removed or replaced, and another "
            "training may have started there; nothing more is written: run this command again when no other training "
            "uses the folder, and never remove the lock file of a running training"
        )


def _now() -> str:
    return datetime.now(UTC).isoformat(sep=" ", timespec="seconds")


def _in_use(run_dir: Path, lock: Path) -> str:
    try:
        holder = json.loads(read_small(lock))
        who = f"process {holder['pid']} on {holder['host']} since {holder['since']}"
    except (OSError, ValueError, LookupError, TypeError):
        who = "another process"
    return (
        f"{run_dir} is in use by {who}: wait until that run ends, or end it (ranks may outlive the launcher that "
        "started them), or choose another --run-dir"
    )
