"""Versions of this package and of the libraries that matter, and a hash of the code."""

import hashlib
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from dist_transformer.base.files import sha256_of
from dist_transformer.version import __version__

_PACKAGES = ("torch", "deepspeed")


def versions() -> dict[str, str | None]:
    """Return the versions of this package, of the libraries that matter and of Python."""
    # The own version does not come from package metadata, because a clone on PYTHONPATH has none.
    return {
        "dist_transformer": __version__,
        **{name: _version(name) for name in _PACKAGES},
        "python": platform.python_version(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def hash_of_code() -> str:
    """Hash the source files of this package as installed, committed or not."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(file for file in package.rglob("*.*") if file.suffix in (".py", ".cpp")):
        digest.update(f"{path.relative_to(package)}\n".encode())
        digest.update(sha256_of(path).encode())
    return digest.hexdigest()[:12]
