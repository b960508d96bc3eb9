"""The Makefile: its list of targets, and messages on a machine that lacks something, before it installs anything."""

import os
import re
import subprocess
from pathlib import Path

from tests.conftest import ROOT

CHECK = ROOT / "tools" / "check_machine.sh"


def check(python: str, *, cwd: Path = ROOT, path: str | None = None) -> str:
    environment = {**os.environ, "PATH": path or os.environ["PATH"]}
    done = subprocess.run(
        ["/bin/sh", str(CHECK), python], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode in (0, 1)
    assert (done.returncode == 1) == done.stderr.startswith("error: ")
    assert len(done.stderr.splitlines()) <= 1
    return done.stderr


def fake(folder: Path, name: str, script: str) -> None:
    file = folder / name
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)


def test_this_machine_has_all() -> None:
    assert check("python3") == ""


def test_no_python() -> None:
    assert "no-such-python was not found: install Python 3.11" in check("no-such-python")


def test_an_old_python(tmp_path: Path) -> None:
    fake(tmp_path, "python3.9", 'case $1 in --version) echo "Python 3.9.2" ;; *) exit 1 ;; esac')
    assert "Python 3.9.2 is too old" in check(str(tmp_path / "python3.9"))


def test_no_venv_module(tmp_path: Path) -> None:
    fake(tmp_path, "python3", "case $2 in *venv*) exit 1 ;; *) exit 0 ;; esac")
    assert "has no venv module: install it" in check(str(tmp_path / "python3"))


def test_a_folder_with_a_space(tmp_path: Path) -> None:
    folder = tmp_path / "a b"
    folder.mkdir()
    assert "the path of this folder has a space" in check("python3", cwd=folder)


def test_make_alone_lists_every_target() -> None:
    done = subprocess.run(["make", "-C", ROOT, "--no-print-directory"], capture_output=True, text=True, check=True)
    (phony,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    assert sorted(line.split()[1] for line in done.stdout.splitlines()) == sorted(phony.split())
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
