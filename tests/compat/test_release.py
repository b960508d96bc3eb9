"""The files of `make release` in dist/: the package index accepts both, and both install the same."""

import zipfile
from pathlib import Path

import pytest

from dist_transformer import __version__
from tests.compat.environments import make_environment, run_installed

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


def test_the_installed_program_has_its_version_and_no_tools_of_tests(installed: Path, tmp_path: Path) -> None:
    assert run_installed(installed, tmp_path, "dist-transformer", "--version") == f"dist-transformer {__version__}\n"
    packages = {line.split("==")[0] for line in run_installed(installed, tmp_path, "pip", "freeze").splitlines()}
    assert not {"pytest", "transformers", "ctranslate2", "mypy"} & packages


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}
