"""What pyproject.toml and constraints.txt say: what is installed, how, and in which versions."""

import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

from tests.conftest import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
NAME = PROJECT["name"]


def clone_and_environment(folder: Path) -> tuple[Path, Path]:
    """A clone in a folder of the package's name, and an environment's Python with the libraries of this one."""
    clone, environment = folder / NAME, folder / "environment"
    (clone / "data").mkdir(parents=True)
    shutil.copytree(ROOT / NAME, clone / NAME, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    python = environment / "bin" / "python"
    where = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = Path(subprocess.run(where, check=True, capture_output=True, text=True).stdout.strip())
    (packages / "libraries.pth").write_text(f"{sysconfig.get_path('purelib')}\n", encoding="utf-8")
    return clone, python


def test_the_package_is_found_beside_a_clone_of_its_name(tmp_path: Path) -> None:
    """The clone's folder is no package, but it looks like one: it has the name, and `data/` as the package has."""
    clone, python = clone_and_environment(tmp_path)
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index", "--no-deps"]
    subprocess.run([*pip, "--no-build-isolation", "-e", clone], check=True, cwd=tmp_path, timeout=120)
    program = "import dist_transformer.data.tokenizer as module; print(module.__file__)"
    done = subprocess.run(
        [python, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(clone / NAME / "data" / "tokenizer.py")
