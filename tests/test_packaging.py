"""Installation: pyproject.toml, constraints.txt and the Makefile."""

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.conftest import ROOT
from tests.test_architecture import BENCHMARKS, MODULES, PACKAGE, TOOLS

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
NAME = PROJECT["name"]
# What the part needs that writes models for other programs is an extra.
EXPORTS = sorted(file for room in ("export", "importing") for file in (PACKAGE / room).rglob("*.py"))
OWN = {NAME, "_start", "benchmarks", "tests", "tools"}


def clone_and_environment(folder: Path) -> tuple[Path, Path]:
    """A clone in a folder of the package's name, and an environment's Python with the libraries of this one."""
    clone, environment = folder / NAME, folder / "environment"
    (clone / "data").mkdir(parents=True)
    shutil.copytree(ROOT / NAME, clone / NAME, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "ds_configs", clone / "ds_configs")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    python = environment / "bin" / "python"
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "libraries.pth").write_text(f"{sysconfig.get_path('purelib')}\n", encoding="utf-8")
    return clone, python


@pytest.mark.system
def test_the_package_is_found_beside_a_clone_of_its_name(tmp_path: Path) -> None:
    """The clone's folder is no package, but it looks like one: it has the name, and `data/` as the package has."""
    clone, python = clone_and_environment(tmp_path)
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index", "--no-deps"]
    subprocess.run([*pip, "--no-build-isolation", "-e", clone], check=True, cwd=tmp_path, timeout=600)
    program = "import dist_transformer.data.vocabulary.tokenizer as module; print(module.__file__)"
    found = subprocess.check_output([python, "-c", program], cwd=tmp_path, text=True, timeout=600)
    assert found.strip() == str(clone / NAME / "data" / "vocabulary" / "tokenizer.py")


@pytest.mark.system
def test_wheel_and_source_hold_every_file_of_the_package(tmp_path: Path) -> None:
    """Also those that are no Python: templates, and the page of `serve`."""
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-t", "sdist", "-d", tmp_path]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=600)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.startswith(f"{NAME}/")}
    (source,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        sources = {name.partition("/")[2] for name in archive.getnames()}
    ls_files = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True)
    listed = set(ls_files.stdout.splitlines())
    configs = {f"{NAME}/{path.relative_to(ROOT)}" for path in (ROOT / "ds_configs").iterdir()}
    assert packed == {name for name in listed if name.startswith(f"{NAME}/")} | configs
    assert listed <= sources


def imports(path: Path) -> Iterator[str]:
    """List the top-level modules that a file imports anywhere, late imports included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        yield from (name.partition(".")[0] for name in names)


def imported_packages(*paths: Path) -> set[str]:
    """Distributions, by their canonical names, whose modules these files import."""
    names = {name for path in paths for name in imports(path)} - sys.stdlib_module_names - OWN
    distributions = packages_distributions()
    # A module of a package that is not installed goes by its own name.
    return {canonicalize_name(distributions.get(name, [name])[0]) for name in names}


def declared(*extras: str) -> dict[str, Requirement]:
    lines = [*PROJECT["dependencies"], *(line for extra in extras for line in PROJECT["optional-dependencies"][extra])]
    requirements = [Requirement(line) for line in lines]
    return {canonicalize_name(each.name): each for each in requirements if each.name != NAME}


def test_every_import_of_the_library_is_declared_and_no_more() -> None:
    library = set(MODULES.values()) - set(EXPORTS)
    # torch.utils.tensorboard imports the one; torch brings the other where it is built for GPUs; trackers are extras,
    # which are imported by name.
    # Python has `compression` from 3.14.
    needed = (imported_packages(*library, *TOOLS) | {"tensorboard"}) - {"triton", "compression"}
    assert needed == declared().keys()


def test_every_import_of_peers_and_tests_is_declared() -> None:
    assert imported_packages(*EXPORTS, *BENCHMARKS) <= declared("export", "bench").keys()
    tests = (ROOT / "tests").rglob("*.py")
    assert imported_packages(*tests) <= declared("export", "bench", "test").keys()


def test_which_torch_is_left_in_place() -> None:
    """NVIDIA's images have pre-releases, which pip must not replace."""
    of_nvidia = ("2.12.0a0+6a1bc3f.nv26.03", "2.16.0a0+1234567.nv26.11")
    versions = ("2.10.0", "2.11.0", "2.13.0+cpu", "2.15.0+cu132", *of_nvidia, "3.0.0")
    # pip asks this of what is installed; it would fetch no pre-release.
    accepted = [version for version in versions if declared()["torch"].specifier.contains(version, prereleases=True)]
    assert accepted == [*versions[1:-1]]


def test_make_installs_pinned_versions_that_the_project_allows() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    pinned = {canonicalize_name(name): version for name, version in pins.items()}
    for name, requirement in declared("export", "bench", "test", "docs").items():
        assert requirement.specifier.contains(pinned[name]), name
    # The wheel for CPUs is a version of its own, which this one includes.
    assert pinned["torch"] == "2.13.0"
    plan = subprocess.run(
        ["make", "--dry-run", "--always-make", ".venv/.installed"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert 'pip install $options -c constraints.txt -e ".[test]"' in plan.stdout


CHECK = ROOT / "tools" / "check_machine.sh"
BUILD = ROOT / "tools" / "torch_build.sh"
CPU_INDEX = "--extra-index-url https://download.pytorch.org/whl/cpu"


def check(python: str, *, cwd: Path = ROOT) -> str:
    done = subprocess.run(["/bin/sh", CHECK, python], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == done.stderr.startswith("error: ")
    assert len(done.stderr.splitlines()) <= 1
    return done.stderr


def fake(folder: Path, name: str, script: str) -> None:
    file = folder / name
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (None, "no-such-python was not found: install Python 3.11"),
        ('case $1 in --version) echo "Python 3.9.2" ;; *) exit 1 ;; esac', "Python 3.9.2 is too old"),
        ("case $2 in *venv*) exit 1 ;; *) exit 0 ;; esac", "has no venv module: install it"),
    ],
)
def test_what_this_machine_lacks(script: str | None, said: str, tmp_path: Path) -> None:
    assert check("python3") == ""
    if script is not None:
        fake(tmp_path, "python", script)
    assert said in check("no-such-python" if script is None else str(tmp_path / "python"))


def test_a_folder_with_a_space(tmp_path: Path) -> None:
    folder = tmp_path / "a b"
    folder.mkdir()
    assert "the path of this folder has a space" in check("python3", cwd=folder)


def torch_build(tmp_path: Path, *, driver: bool = False) -> tuple[str, str]:
    """Options for pip, and the report, on a machine with the wheels of this folder, with a driver or without one."""
    programs = tmp_path / "bin"
    programs.mkdir(parents=True)
    if driver:
        fake(programs, "nvidia-smi", "exit 0")
    pip = {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": str(tmp_path)}
    environment = {**os.environ, "PATH": str(programs), **pip}
    done = subprocess.run(
        ["/bin/sh", BUILD, sys.executable], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip(), done.stderr


def test_the_driver_decides_on_the_build_of_torch(tmp_path: Path) -> None:
    options, report = torch_build(tmp_path / "a")
    assert options == CPU_INDEX
    assert "no NVIDIA driver: downloading libraries with PyTorch's build for CPUs" in report
    options, report = torch_build(tmp_path / "b", driver=True)
    assert options == ""
    assert "downloading libraries with CUDA, 3 GB" in report


def test_torch_from_a_local_wheel(tmp_path: Path) -> None:
    about = "torch-2.13.0.dist-info"
    with zipfile.ZipFile(tmp_path / "torch-2.13.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")
    options, report = torch_build(tmp_path)
    assert options == ""
    assert "torch comes from a wheel on this machine" in report


def test_make_alone_lists_every_target() -> None:
    done = subprocess.run(["make", "-C", ROOT, "--no-print-directory"], capture_output=True, text=True, check=True)
    (phony,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    assert sorted(line.split()[1] for line in done.stdout.splitlines()) == sorted(phony.split())
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
