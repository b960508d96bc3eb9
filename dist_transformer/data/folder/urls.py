"""URLs of data folders, and the secrets that may be in them.

Launchers print commands, run folders hold settings, and both are shared: a URL with a secret is refused, and what a
store says of an error is shown without.
"""

import re
from urllib.parse import unquote

from dist_transformer.errors import UserError

# Names of parameters, lower case, whose values let somebody in: of presigned URLs, SAS tokens and the like.
_SECRET_NAME = re.compile(
    r"token|secret|passw|pwd|signature|credential|auth(?!or)|api.?key|access.?key"
    r"|^(x-(amz|goog)-.*|sig|sas|key)$|[-_](key|sig)$"
)
_PARAMETER = re.compile(r"(?<=[?&;#])([^=&;#\s]+)=([^&;#\s'\")]*)")
# `://` and what may be a user with a password, or a token alone; a password may hold a slash, and then its first part
# stands where a port would. A path may hold an @ as well, as those of the hub do before a revision.
_USER = re.compile(r"(?<=://)(?:[^/?#\s@]*:[^/?#\s@]*|[^/?#\s@:]*:(?!\d*/)[^\s@]*)@")
_WEB_USER = re.compile(r"(?i)(https?://)[^/?#\s@]+@")
_SHOWN = "***"


def is_url(place: str) -> bool:
    return "://" in place


def without_secrets(text: str) -> str:
    """Give a text with `***` in place of each secret of the URLs in it."""

    def hide(parameter: re.Match[str]) -> str:
        is_secret = _SECRET_NAME.search(unquote(parameter[1]).lower()) and parameter[2]
        return f"{parameter[1]}={_SHOWN}" if is_secret else parameter[0]

    text = _WEB_USER.sub(rf"\g<1>{_SHOWN}@", _USER.sub(f"{_SHOWN}@", text))
    return _PARAMETER.sub(hide, text)


def refuse_secrets(url: str) -> None:
    """Raise a UserError for a URL with a password, a token or a signature."""
    shown = without_secrets(url)
    if shown != url:
        raise UserError(
            f"{shown} holds a password, which would be written to logs and to the run folder: give it by the store's "
            "own variables or files, or by those of fsspec (FSSPEC_FTP_PASSWORD, ~/.config/fsspec)"
        )
