"""C++ sources of this package, compiled for this machine at first use.

A library has no dependency but the compiler's own: neither headers of Python nor of torch, so it compiles in a second
or two. It is kept in the user's cache under a name that hashes source, compiler, flags and processor, so a home folder
that machines of several kinds share is safe. Processes do not wait for each other: each writes a file of its own and
renames it, so a process that is killed blocks nobody.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

from dist_transformer.errors import UserError, say
from dist_transformer.files import make_folder, read_small, remove, whole_path

_FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-shared", "-fPIC")
_SECONDS = 120
"""A compiler that takes longer hangs."""


def load_native(module: str, *, slower: str) -> ctypes.CDLL | None:
    """Compile the C++ file beside a module, unless that is done, and load it.

    Args:
        module: its `__file__`.
        slower: names what takes longer without the library.

    Returns:
        None where it cannot be compiled; one note on stderr says why and what helps.
    """
    source = Path(module).with_suffix(".cpp")
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    try:
        if compiler is None:
            raise OSError("no compiler is found")
        code = read_small(source)
        name = f"{source.stem}-{_key(code, compiler)}.so"
        folder = _cache()
        if folder is None:
            with tempfile.TemporaryDirectory() as scratch:
                return _load_cached(compiler, source, Path(scratch) / name)
        return _load_cached(compiler, source, folder / name)
    except (OSError, UserError, subprocess.SubprocessError) as error:
        lines = (getattr(error, "stderr", None) or str(error)).strip().splitlines() or [type(error).__name__]
        say(
            f"note: {source.name} cannot be compiled ({lines[0]:.120}), so {slower} is slower: install a C++ "
            "compiler (Debian and Ubuntu: apt-get install g++)",
            file=sys.stderr,
        )
        return None


def _load_cached(compiler: str, source: Path, library: Path) -> ctypes.CDLL:
    if library.exists():
        try:
            return ctypes.CDLL(str(library))
        except OSError:
            # Damaged: it is made again.
            remove(library)
    with whole_path(library) as beside:
        _compile(compiler, source, beside)
    return ctypes.CDLL(str(library))


def _compile(compiler: str, source: Path, library: Path) -> None:
    command = [*compiler.split(), *_FLAGS, str(source), "-o", str(library)]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=_SECONDS)


def _key(code: bytes, compiler: str) -> str:
    version = subprocess.run(
        [*compiler.split(), "--version"], check=True, capture_output=True, text=True, timeout=_SECONDS
    ).stdout
    parts = (code, version.encode(), " ".join(_FLAGS).encode(), _processor().encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _processor() -> str:
    """Return what `-march=native` depends on."""
    try:
        lines = read_small(Path("/proc/cpuinfo")).decode().splitlines()
    except OSError:
        return platform.processor()
    kinds = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.split("\t")[0].strip(" :") in kinds}))


def _cache() -> Path | None:
    """Return the user's folder for libraries; None where there is no place that is this user's alone."""
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
