"""The null GPU reports what it lacks before anything is installed."""

import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from dist_transformer.base.errors import UserError
from tests.nullgpu.home import Home

Usage = namedtuple("Usage", "total used free")


@pytest.mark.parametrize(
    ("compiler", "free", "said"),
    [
        (
            None,
            2**40,
            r"^the null GPU needs a C\+\+ compiler: install g\+\+ \(Debian and Ubuntu: apt-get install g\+\+\)$",
        ),
        ("/usr/bin/g++", 2**30, r"home has less than 9 GB of room, which torch for CUDA needs: free some$"),
    ],
)
def test_what_is_missing(
    compiler: str | None, free: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: compiler)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(2**41, 0, free))
    with pytest.raises(UserError, match=said):
        Home(tmp_path / "home").prepare()
    assert not (tmp_path / "home" / "venv").exists()


def test_a_failed_installation_is_one_sentence_and_not_taken_for_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: "/usr/bin/g++")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(2**41, 0, 2**41))
    home = Home(tmp_path / "home")
    home.python.parent.mkdir(parents=True)
    home.python.write_text("#!/bin/sh\necho 'no matching distribution' >&2\nexit 1\n")
    home.python.chmod(0o755)
    with pytest.raises(
        UserError, match=r"^torch==2\.11\.0 cannot be installed from PyPI \(no matching distribution\)$"
    ):
        home.prepare()
    assert not (tmp_path / "home" / "installed").exists()
