"""The Makefile: its list of targets, and messages on a machine that lacks something, before it installs anything."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

from tests.conftest import ROOT

CHECK = ROOT / "tools" / "check_machine.sh"
BUILD = ROOT / "tools" / "torch_build.sh"
CPU_INDEX = "--extra-index-url https://download.pytorch.org/whl/cpu"


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


def torch_build(tmp_path: Path, *, wheels: Path, driver: bool = False) -> tuple[str, str]:
    """Options for pip, and the report, on a machine with these wheels, with a driver or without one."""
    programs = tmp_path / "bin"
    programs.mkdir()
    if driver:
        fake(programs, "nvidia-smi", "exit 0")
    environment = {
        **os.environ,
        "PATH": str(programs),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_FIND_LINKS": str(wheels),
    }
    done = subprocess.run(
        ["/bin/sh", str(BUILD), sys.executable], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip(), done.stderr


def test_torch_for_cpus_where_there_is_no_driver(tmp_path: Path) -> None:
    options, report = torch_build(tmp_path, wheels=tmp_path)
    assert options == CPU_INDEX
    assert "no NVIDIA driver: downloading libraries with PyTorch's build for CPUs" in report


def test_torch_with_cuda_where_there_is_a_driver(tmp_path: Path) -> None:
    options, report = torch_build(tmp_path, wheels=tmp_path, driver=True)
    assert options == ""
    assert "downloading libraries with CUDA, 3 GB" in report


def test_torch_from_a_local_wheel(tmp_path: Path) -> None:
    about = "torch-2.13.0.dist-info"
    with zipfile.ZipFile(tmp_path / "torch-2.13.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")
    options, report = torch_build(tmp_path, wheels=tmp_path)
    assert options == ""
    assert "torch comes from a wheel on this machine" in report


def test_make_alone_lists_every_target() -> None:
    done = subprocess.run(["make", "-C", ROOT, "--no-print-directory"], capture_output=True, text=True, check=True)
    (phony,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    assert sorted(line.split()[1] for line in done.stdout.splitlines()) == sorted(phony.split())
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
