"""C++ sources of this package, compiled for this machine at first use.

A library needs only the compiler, without headers of Python or torch, so it compiles in a second or two. It is kept in
the user's cache under a hash of source, compiler, flags and processor, so that different machines can share a home
folder. Processes do not wait for each other: each writes its own file and renames it, so a killed process blocks none.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

from dist_transformer.base.errors import UserError, logger
from dist_transformer.base.files import make_folder, remove, whole_path

_FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-shared", "-fPIC")
_SECONDS = 120
"""Limit for the compiler, after which it is assumed to hang."""


def load_native(module: str, *, slower: str) -> ctypes.CDLL | None:
    """Load the compiled C++ file of a module; compile it first if needed.

    Args:
        module: the module's `__file__`.
        slower: name of the work that is slower without the library.

    Returns:
        the library, or None if it cannot be compiled; a warning gives the cause.
    """
    source = Path(module).with_suffix(".cpp")
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    try:
        if compiler is None:
            raise OSError("no C++ compiler: on Debian and Ubuntu, apt-get install g++ installs one")
        code = source.read_bytes()
        name = f"{source.stem}-{_key(code, compiler)}.so"
        folder = _cache()
        if folder is None:
            with tempfile.TemporaryDirectory() as scratch:
                return _load_cached(compiler, source, Path(scratch) / name)
        return _load_cached(compiler, source, folder / name)
    except subprocess.TimeoutExpired:
        cause = f"{compiler} took more than {_SECONDS} seconds"
    except (OSError, UserError, subprocess.CalledProcessError) as error:
        # The compiler's own words, if it has some.
        cause = ((getattr(error, "stderr", "") or str(error)).strip().splitlines() or [type(error).__name__])[0]
    logger.warning(f"note: {source.name} cannot be compiled ({cause:.120}), so {slower} is slower")
    return None


def _load_cached(compiler: str, source: Path, library: Path) -> ctypes.CDLL:
    if library.exists():
        try:
            return ctypes.CDLL(str(library))
        except OSError:
            # It is damaged; compile it again.
            remove(library)
    with whole_path(library) as beside:
        command = [*compiler.split(), *_FLAGS, str(source), "-o", str(beside)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_SECONDS)
    return ctypes.CDLL(str(library))


def _key(code: bytes, compiler: str) -> str:
    version = subprocess.run(
        [*compiler.split(), "--version"], check=True, capture_output=True, text=True, timeout=_SECONDS
    ).stdout
    parts = (code, version.encode(), " ".join(_FLAGS).encode(), _processor().encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _processor() -> str:
    """Return the description of the processor, on which `-march=native` depends."""
    kinds = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU part")
    lines = {line for line in cpu_info().splitlines() if line.split("\t")[0].strip(" :") in kinds}
    return "\n".join(sorted(lines)) or platform.processor()


def cpu_info(file: Path = Path("/proc/cpuinfo")) -> str:
    """Read how Linux describes the processors; return an empty text where it does not."""
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _cache() -> Path | None:
    """Return the user's folder for libraries; None if there is no folder that only this user can write."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(base) / "dist_transformer" / "native"
    try:
        if not folder.exists():
            make_folder(folder)
            folder.chmod(stat.S_IRWXU)
        status = folder.stat()
    except (OSError, UserError):
        return None
    is_own = status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return folder if is_own and os.access(folder, os.W_OK) else None
