"""An error that nobody expected, in one process and in two, as a user sees it."""

import re
from pathlib import Path

import pytest

from tests.conftest import run_python

pytestmark = pytest.mark.system

PLANTED = """
from dist_transformer.inference.files import corpus

def read_source(lines, chunk_lines):
    return int(None)

corpus.read_source = read_source
"""
LINE = r"TypeError in inference/files/corpus\.py:\d+: int\(\) argument must be .*, not 'NoneType'"
REMEDY = "; run again with --traceback to see all"


@pytest.mark.parametrize("ranks", [1, 2])
def test_it_is_one_line_and_a_traceback_on_request(ranks: int, model_folder: Path, tmp_path: Path) -> None:
    """The rank is named, and nothing partial stays."""
    (tmp_path / "planted.py").write_text(PLANTED, encoding="utf-8")
    (tmp_path / "in").write_text("a bird\n", encoding="utf-8")
    words = ["--import", "planted.py", "--model", model_folder, "--input", "in", "--output", "out"]
    whose = "rank 0: " if ranks > 1 else ""
    for flags, line in ([], LINE + REMEDY), (["--traceback"], LINE):
        done = run_python("-m", "dist_transformer", "translate", *words, *flags, cwd=tmp_path, ranks=ranks)
        assert (done.returncode, done.stdout) == (1, "")
        # A rank whose neighbour has ended says so in a line of its own.
        *shown, last = [each for each in done.stderr.splitlines() if "rank 1" not in each]
        assert re.fullmatch(f"error: {whose}{line}", last), done.stderr
        assert [shown[0]] == ["Traceback (most recent call last):"] if flags else shown == []
        assert {path.name for path in tmp_path.iterdir()} == {"planted.py", "in"}
