"""Paths that a user names: the check that comes before any work."""

from pathlib import Path

from dist_transformer.base.errors import UserError
from dist_transformer.base.urls import is_url, without_secrets


def require_usable(path: str | Path) -> None:
    """Check that files of that name can exist. It may be a URL.

    Raises:
        UserError: the path is empty or contains bytes that are not UTF-8; or it is a URL with something that may grant
            access.
    """
    text = str(path)
    refuse_secrets(text)
    if not text:
        raise UserError("a path is empty: pass the name of a file or a folder")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise UserError(f"the path {text:.200} is not UTF-8: rename the file or the folder") from None


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
