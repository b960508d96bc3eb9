"""The wheel as a user installs it: in an environment of its own, used from an empty folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compat.environments import make_environment
from tests.conftest import ROOT


@pytest.fixture(scope="session")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the source distribution of this checkout: that of DIST, or one that is made."""
    if "DIST" in os.environ:
        return Path(os.environ["DIST"])
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "hatchling", "build", "-d", folder]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=600)
    return folder


@pytest.fixture(scope="session")
def installed(distributions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment in which there is only the wheel, with what it requires."""
    (wheel,) = distributions.glob("*.whl")
    return make_environment(tmp_path_factory.mktemp("environment") / "venv", str(wheel))
