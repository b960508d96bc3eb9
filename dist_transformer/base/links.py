"""Protection against links in untrusted folders: nothing is written or removed through them."""

import errno
import os
import stat
from pathlib import Path

from dist_transformer.base.errors import UserError

# Guarded folders: below them this process writes and removes nothing through a link.
_GUARDED: set[Path] = set()


def guard(folder: Path) -> None:
    """Guard `folder`: from now on, this process writes and removes nothing below it through a link.

    The folder itself may be reached through links.
    """
    _GUARDED.add(folder.absolute())


def refuse_link(path: Path) -> None:
    """Refuse to write to `path` if it is a link, or lies behind one, below a guarded folder.

    Raises:
        UserError: there is a link; the message names it.
    """
    _refuse_links(path.absolute())


def _refuse_links(place: Path) -> None:
    below: list[Path] = []
    for folder in (place, *place.parents):
        if folder in _GUARDED:
            break
        below.append(folder)
    else:
        return
    for each in below:
        if each.is_symlink():
            raise UserError(
                f"{each} is a link, and nothing is written or removed through links: put a real file or folder there, "
                "or remove the link"
            )


def refuse_shared(path: Path) -> None:
    """Refuse a path that is not a regular file, or that has a second name elsewhere. It may be absent.

    Raises:
        UserError: it is a link, a hard link, a folder, a pipe or a device.
    """
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        raise UserError(f"{path} is a link, a hard link, a folder, a pipe or a device, so it is not used: remove it")


def refuse_linked_parent(path: Path) -> None:
    place = path.absolute()
    if place not in _GUARDED:
        _refuse_links(place.parent)


def open_no_link(path: str, flags: int) -> int:
    """Open a file for writing, unless it is a link, a pipe (opening one waits for its reader) or a device."""
    handle = None
    try:
        handle = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise
    if handle is not None:
        if stat.S_ISREG(os.fstat(handle).st_mode):
            return handle
        os.close(handle)
    raise UserError(f"{path} is a link, a folder, a pipe or a device, so it is not written: remove it")
