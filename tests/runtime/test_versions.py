"""The hash that tells one code from another."""

import shutil
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT

HASH = "from dist_transformer.runtime.versions import hash_of_code; print(hash_of_code())"


def test_the_hash_is_that_of_the_files_as_they_are(tmp_path: Path) -> None:
    def hash_now() -> str:
        return subprocess.run(
            [sys.executable, "-c", HASH], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout

    code = tmp_path / "dist_transformer"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "dist_transformer", code, ignore=ignored)
    first = hash_now()
    assert len(first) == 12 + 1
    found = [first]
    for name in ("cli/plan.py", "model/cpu_kernels.cpp"):
        (code / name).write_text((code / name).read_text() + "\n")
        found.append(hash_now())
    (code / "new.py").touch()
    assert len({*found, hash_now()}) == 4
