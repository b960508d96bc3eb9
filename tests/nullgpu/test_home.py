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
            r"^the null GPU needs a C\+\+ compiler: install g\+\+ \(Debian and Ubuntu: apt-get ",
        ),
        ("/usr/bin/g++", 2**30, r"home has less than 9 GB of room, which torch for CUDA needs: free some$"),
        ("/usr/bin/g++", 2**40, r"^torch==2\.11\.0 cannot be installed from PyPI \(no matching distribution\)$"),
    ],
)
def test_what_is_missing_is_one_sentence_and_not_taken_for_done(
    compiler: str | None, free: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: compiler)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(2**41, 0, free))
    home = Home(tmp_path / "home")
    home.python.parent.mkdir(parents=True)
    home.python.write_text("#!/bin/sh\necho 'no matching distribution' >&2\nexit 1\n")
    home.python.chmod(0o755)
    with pytest.raises(UserError, match=said):
        home.prepare()
    assert not (tmp_path / "home" / "installed").exists()
