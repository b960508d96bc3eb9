"""Environments as users have them: empty but for what a requirement brings."""

import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT

CONSTRAINTS = ROOT / "constraints.txt"


def make_environment(folder: Path, *requirements: str, constrained: bool = True) -> Path:
    """Make a virtual environment and install requirements; give the folder of its programs.

    Args:
        constrained: With the versions of constraints.txt. Other versions of a library need others of its dependencies;
            name torch as `pinned("torch")` then, or pip takes the newest one, with gigabytes of CUDA.
    """
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    _install(folder, *(["-c", str(CONSTRAINTS)] if constrained else []), *requirements)
    return folder / "bin"


def extend_environment(programs: Path, folder: Path, *requirements: str) -> Path:
    """Make an environment with the packages of another one, and install more; give the folder of its programs.

    The other one stays as it is. Versions are free, as for a user who adds a package to what is installed.
    """
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    where = [programs / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = subprocess.run(where, check=True, capture_output=True, text=True).stdout
    (own,) = folder.glob("lib/python*/site-packages")
    (own / "of_the_other.pth").write_text(packages, encoding="utf-8")
    _install(folder, *requirements)
    for program in programs.iterdir():
        own = folder / "bin" / program.name
        if not own.exists() and program.read_bytes().startswith(f"#!{programs}/python".encode()):
            script = program.read_text(encoding="utf-8")
            own.write_text(f"#!{own.parent}/python\n{script.partition(chr(10))[2]}", encoding="utf-8")
            own.chmod(0o755)
    return folder / "bin"


def _install(folder: Path, *words: str) -> None:
    install = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run([*install, *words], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def pinned(name: str) -> str:
    """Give the requirement of constraints.txt for a package, such as `torch==2.13.0`."""
    return next(line for line in CONSTRAINTS.read_text(encoding="utf-8").splitlines() if line.startswith(f"{name}=="))


def run_installed(programs: Path, folder: Path, *words: object, timeout: float = 600) -> str:
    """Run a program of an environment in `folder`, without anything of this checkout; gives its standard output."""
    keep = ("HOME", "LANG", "TMPDIR", "DIST_TRANSFORMER_DATA")
    environment = {name: os.environ[name] for name in keep if name in os.environ}
    program, *arguments = map(str, words)
    done = subprocess.run(
        [programs / program, *arguments],
        cwd=folder,
        env={**environment, "PATH": f"{programs}:/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        timeout=timeout,
        check=False,
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0, f"{words}: status {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout
