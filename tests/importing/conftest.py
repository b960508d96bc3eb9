"""Imports compare few lines; one folder of a model serves many tests."""

from pathlib import Path

import pytest

from dist_transformer.export import gate, libraries
from tests.importing.marian_folders import Lines, write_folder


@pytest.fixture(scope="module")
def plain(toy_lines: Lines, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plain") / "theirs"
    write_folder(path, toy_lines)
    return path


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "COMPARED_LINES", 30)
    monkeypatch.setattr(libraries, "_LONGEST_OUTPUT", 12)
