"""URLs in messages and files: what may grant access is hidden wherever they are shown."""

import re

_HIDDEN = "***"
# Schemes whose user without a password is a name, or a place such as a container; elsewhere it may be a token.
_NAMING = frozenset(
    ["sftp", "ssh", "ftp", "ftps", "smb", "hdfs", "webhdfs", "abfs", "abfss", "wasb", "wasbs", "adl", "az"]
)
_SCHEME = r"([A-Za-z][A-Za-z0-9.-]{0,30})://"
# What lies before the last @ in front of the path; or, after a password with a slash, whose first part then looks like
# a port, before the last @ of all. A path may contain an @, too, such as the hub's paths before a revision.
_USER = re.compile(_SCHEME + r"(?:([^/?#\s]*)@|[^/?#\s@:\[]*:(?!:)(?!\d*(?:[/?#]|$))\S*@)")
# A URL; or its path with a query, where a library leaves out the host.
_URL = re.compile(_SCHEME + r"\S+|(?<![^\s'\"(=])/[^\s?]*\?[^\s=]+=\S*")
_QUERY = re.compile(r"[?#;]")
_ENDS = ")]}>'\",.:;"


def is_url(place: str) -> bool:
    return "://" in place


def without_secrets(text: str) -> str:
    """Replace the user, the query and the fragment of each URL in a text by `***`.

    They are hidden whole: no list has the names of all parameters that grant access.
    """
    return _URL.sub(lambda url: _hide(url[0]), text) if "/" in text else text


def _hide(url: str) -> str:
    if url.startswith("file://") and url.count("://") == 1:
        # The names of files may have such characters.
        return url
    url = _USER.sub(_hide_user, url)
    begin = _QUERY.search(url)
    if begin is None:
        return url
    # Punctuation at the end belongs to the sentence.
    query = url[begin.end() :].rstrip(_ENDS)
    return url[: begin.end()] + _HIDDEN + url[begin.end() + len(query) :] if query else url


def _hide_user(found: re.Match[str]) -> str:
    scheme, user = found[1], found[2]
    is_name = scheme.lower() in _NAMING and user is not None and ":" not in user
    return found[0] if is_name else f"{scheme}://{_HIDDEN}@"
