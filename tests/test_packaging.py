"""The content of pyproject.toml and constraints.txt: what is installed, how, and in which versions."""

import ast
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
EXPORTS = sorted((PACKAGE / "export").rglob("*.py"))
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
    where = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = Path(subprocess.run(where, check=True, capture_output=True, text=True).stdout.strip())
    (packages / "libraries.pth").write_text(f"{sysconfig.get_path('purelib')}\n", encoding="utf-8")
    return clone, python


@pytest.mark.system
def test_the_package_is_found_beside_a_clone_of_its_name(tmp_path: Path) -> None:
    """The clone's folder is no package, but it looks like one: it has the name, and `data/` as the package has."""
    clone, python = clone_and_environment(tmp_path)
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index", "--no-deps"]
    subprocess.run([*pip, "--no-build-isolation", "-e", clone], check=True, cwd=tmp_path, timeout=600)
    program = "import dist_transformer.data.vocabulary.tokenizer as module; print(module.__file__)"
    done = subprocess.run(
        [python, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(clone / NAME / "data" / "vocabulary" / "tokenizer.py")


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
    ls_files = subprocess.run(["git", "ls-files", NAME], cwd=ROOT, check=True, capture_output=True, text=True)
    listed = set(ls_files.stdout.split())
    configs = {f"{NAME}/{path.relative_to(ROOT)}" for path in (ROOT / "ds_configs").iterdir()}
    assert packed == listed | configs
    assert listed <= sources
    assert {f"{NAME}/serving/page/{name}" for name in ("index.html", "page.css", "page.js")} <= packed
    assert {f"{NAME}/reporting/html/templates/{name}" for name in ("report.html.j2", "page.css")} <= packed


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


@pytest.mark.parametrize(
    ("version", "accepted"),
    [
        ("2.10.0", False),
        ("2.11.0", True),
        ("2.13.0+cpu", True),
        ("2.15.0+cu132", True),
        # As in NVIDIA's images: pip must not put another in its place.
        ("2.12.0a0+6a1bc3f.nv26.03", True),
        ("2.16.0a0+1234567.nv26.11", True),
        ("3.0.0", False),
    ],
)
def test_which_torch_is_left_in_place(version: str, accepted: bool) -> None:
    # pip asks this of what is installed; it would fetch no pre-release.
    assert declared()["torch"].specifier.contains(version, prereleases=True) == accepted


# tests/compat/test_export.py has exported models loaded by both of transformers.
@pytest.mark.parametrize(("name", "majors"), [("transformers", (4, 5)), ("accelerate", (1,)), ("ctranslate2", (4,))])
def test_peers_are_capped_by_their_major_version(name: str, majors: tuple[int, ...]) -> None:
    specifier = declared("export", "bench")[name].specifier
    assert [specifier.contains(f"{major}.999") for major in range(max(majors) + 2)] == [
        major in majors for major in range(max(majors) + 2)
    ]


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
