"""Paths that a user names: the check that comes before any work."""

import os
from pathlib import Path

from dist_transformer.base.errors import UserError
from dist_transformer.base.urls import is_url, without_secrets

# Limits of Linux and of its file systems.
_LONGEST_NAME = 255
_LONGEST_PATH = 4095


def require_usable(path: str | Path) -> None:
    """Check that files of that name can exist. It may be a URL.

    Raises:
        UserError: the path is empty, contains a NUL or bytes that are not UTF-8, or is too long; or it is a URL with
            something that may grant access.
    """
    text = str(path)
    refuse_secrets(text)
    if not text:
        raise UserError("a path is empty: pass the name of a file or a folder")
    if "\0" in text:
        raise UserError(f"the path {text:.60} contains a NUL character, which no file name can have: correct it")
    try:
        encoded = text.encode("utf-8")
    except UnicodeEncodeError:
        raise UserError(f"the path {text:.200} is not UTF-8: rename the file or the folder") from None
    name = max(encoded.split(os.sep.encode()), key=len)
    if len(name) > _LONGEST_NAME or len(encoded) > _LONGEST_PATH:
        size, most = (len(name), _LONGEST_NAME) if len(name) > _LONGEST_NAME else (len(encoded), _LONGEST_PATH)
        raise UserError(
            f"the {'name' if most == _LONGEST_NAME else 'path'} {text[:40]}… has {size:,} bytes, but at most {most:,} "
            "are possible: shorten it"
        )


def refuse_secrets(place: str) -> None:
    """Raise a UserError for a URL with a password, a query or a fragment: commands are printed, and folders shared."""
    # A password may have spaces; a text of several words would show the rest of it.
    url = "".join(place.split())
    if is_url(url) and without_secrets(url) != url:
        raise UserError(
            f"{without_secrets(url)} holds a password, a query or a fragment, which may grant access and would be "
            "written to logs and to the run folder: pass it in the store's own variables or files, or in those of "
            "fsspec (FSSPEC_FTP_PASSWORD, ~/.config/fsspec)"
        )


def usable_path(text: str) -> Path:
    """Read a path of the command line: what `type=Path` means in the parsers of commands.

    Raises:
        UserError: no file can have that name.
    """
    require_usable(text)
    return Path(text)


def usable_place(text: str) -> str:
    """Read a path or a URL of the command line, as `usable_path` does."""
    require_usable(text)
    return text
