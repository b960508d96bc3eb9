"""The files of `make release` in dist/: the package index accepts both, and both install the same."""

import subprocess
import zipfile
from pathlib import Path

import pytest

from dist_transformer import __version__
from tests.compat.environments import make_environment, run_installed
from tests.conftest import ROOT

pytestmark = pytest.mark.slice(name="wheel")


def test_the_index_accepts_both_files(distributions: Path, tmp_path: Path) -> None:
    programs = make_environment(tmp_path / "venv", "twine", constrained=False)
    files = sorted(distributions.iterdir())
    assert [file.name for file in files] == [
        f"dist_transformer-{__version__}-py3-none-any.whl",
        f"dist_transformer-{__version__}.tar.gz",
    ]
    assert run_installed(programs, tmp_path, "twine", "check", "--strict", *files).count("PASSED") == 2


def test_the_source_distribution_makes_the_same_wheel(distributions: Path, tmp_path: Path) -> None:
    (source,), (wheel,) = distributions.glob("*.tar.gz"), distributions.glob("*.whl")
    programs = make_environment(tmp_path / "venv", "wheel")
    run_installed(programs, tmp_path, "pip", "wheel", "--quiet", "--no-deps", "-w", "made", source)
    (made,) = (tmp_path / "made").glob("*.whl")
    assert contents(made) == contents(wheel)


def test_the_installed_program_has_all_that_is_no_python(installed: Path, tmp_path: Path) -> None:
    assert run_installed(installed, tmp_path, "dist-transformer", "--version") == f"dist-transformer {__version__}\n"
    said = run_installed(installed, tmp_path, "python", "-c", WHAT_IS_NO_PYTHON)
    assert said.split() == ["True"] * 3
    packages = {line.split("==")[0] for line in run_installed(installed, tmp_path, "pip", "freeze").splitlines()}
    assert not {"pytest", "transformers", "ctranslate2", "mypy"} & packages


WHAT_IS_NO_PYTHON = """
import importlib.resources, importlib.util
files = importlib.resources.files("dist_transformer")
print(*(files.joinpath(name).is_file() for name in ("py.typed", "ds_configs/zero2.json", "serving/page/index.html")))
assert importlib.util.find_spec("benchmarks") is None
"""


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_no_file_of_the_checkout_is_left_out_of_the_source(distributions: Path, tmp_path: Path) -> None:
    (source,) = distributions.glob("*.tar.gz")
    subprocess.run(["tar", "-xzf", source, "-C", tmp_path], check=True)
    (folder,) = tmp_path.iterdir()
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert [name for name in listed.splitlines() if not (folder / name).exists()] == []
