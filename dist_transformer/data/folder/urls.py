"""URLs of data folders, and secrets in them.

Launchers print commands, run folders contain settings, and users share both. So a URL with a secret is refused, and
errors of a store are shown without secrets.
"""

import re
from urllib.parse import unquote

from dist_transformer.base.errors import UserError

# Names of parameters, in lower case, whose values grant access: those of presigned URLs, SAS tokens and the like.
_SECRET_NAME = re.compile(
    r"token|secret|passw|pwd|signature|credential|auth(?!or)|api.?key|access.?key"
    r"|^(x-(amz|goog)-.*|sig|sas|key)$|[-_](key|sig)$"
)
_PARAMETER = re.compile(r"(?<=[?&;#])([^=&;#\s]+)=([^&;#\s'\")]*)")
# `://` and then a user with a password, or only a token. A password may contain a slash, and then its first part looks
# like a port. A path may contain an @, too, such as the hub's paths before a revision.
_USER = re.compile(r"(?<=://)(?:[^/?#\s@]*:[^/?#\s@]*|[^/?#\s@:]*:(?!\d*/)[^\s@]*)@")
_WEB_USER = re.compile(r"(?i)(https?://)[^/?#\s@]+@")
_SHOWN = "***"


def is_url(place: str) -> bool:
    return "://" in place


def without_secrets(text: str) -> str:
    """Replace each secret in the URLs of a text by `***`."""

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
            f"{shown} holds a password, which would be written to logs and to the run folder: pass it in the store's "
            "own variables or files, or in those of fsspec (FSSPEC_FTP_PASSWORD, ~/.config/fsspec)"
        )
