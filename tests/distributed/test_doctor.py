"""`doctor` as a job starts it: two ranks that agree, two that do not, one that is missing, one that is stuck."""

import json
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.runtime.launch import free_port
from tests.conftest import ROOT, begin_python, run_ranks

pytestmark = pytest.mark.slow

DOCTOR = [sys.executable, "-m", "dist_transformer", "doctor"]


def start_ranks(folders: Sequence[Path], *arguments: object, world_size: int = 2) -> list[tuple[int, str, str]]:
    """Ranks 0, 1, … each in a folder of its own, as if on a node of its own disk: status, output, errors."""
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    common |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    started = [
        begin_python(
            *(*DOCTOR[1:], *arguments),
            output=folder.with_suffix(".output"),
            errors=folder.with_suffix(".errors"),
            cwd=folder,
            **{**common, "RANK": str(rank), "LOCAL_RANK": str(rank), "PYTHONPATH": f"{folder}:{ROOT}"},
        )
        for rank, folder in enumerate(folders)
    ]
    done = [rank.communicate(timeout=600) for rank in started]
    return [(rank.wait(), *texts) for rank, texts in zip(started, done, strict=True)]


def states(output: str) -> dict[str, str]:
    """Check → state, of the table."""
    names = ("ok", "WARN", "FAIL")
    rows = [line.split("  ") for line in output.splitlines()]
    found = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    return {row[0]: row[1] for row in found if len(row) > 2 and row[1] in names}


def test_two_ranks_that_agree_are_fit(toy_data: DataFolder, tmp_path: Path) -> None:
    flags = ("--run-dir", tmp_path / "runs" / "first", "--run-gib", 0.001, "--cache-dir", tmp_path)
    output = run_ranks(2, *DOCTOR[1:], *flags, "--data", toy_data.path)
    found = states(output)
    assert {"ranks", "all-reduce 1 MiB", "run folder shared", "file locks", "cache", "/dev/shm", "data"} <= found.keys()
    assert "FAIL" not in found.values()
    assert "gloo: " in output
    assert list(tmp_path.iterdir()) == []


def test_what_two_ranks_do_not_share_is_named(toy_data: DataFolder, tmp_path: Path) -> None:
    """Each rank in a folder of its own: another data folder, another run folder, none with so much room."""
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        shutil.copytree(toy_data.path, folder / "data")
    index = json.loads((folders[1] / "data" / "index.json").read_text())
    (folders[1] / "data" / "index.json").write_text(json.dumps({**index, "corpus": "another"}))
    found = start_ranks(folders, "--data", "data", "--run-dir", "run", "--run-gib", 1e9)
    assert [status for status, *_ in found] == [1, 1]
    output, errors = found[0][1:]
    assert {check for check, state in states(output).items() if state == "FAIL"} == {
        "run folder",
        "run folder shared",
        "data",
    }
    assert "rank 0 does not share files with rank 1" in output
    assert errors.count("error: not fit to train (run folder, run folder shared, data)") == 1
    # Rank 0 speaks for both, and nothing stays.
    assert found[1][1] == ""
    assert [[path.name for path in folder.glob("[!_s]*")] for folder in folders] == [["data"], ["data"]]


def test_a_rank_that_is_missing_is_named(tmp_path: Path) -> None:
    ((status, output, errors),) = start_ranks([tmp_path], "--timeout", 1, world_size=3)
    assert (status, output) == (1, "")
    assert re.match(r"error: rank 1-2 of 3 did not join in \d+ s \(this is 0 on ", errors)
    assert "Traceback" not in errors


def test_a_rank_that_is_stuck_is_named_with_its_check(tmp_path: Path) -> None:
    """On a disk that does not answer."""
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        (folder / "data").mkdir(parents=True)
        (folder / "data" / "index.json").write_text("{}")
    # Python imports it at its start.
    (folders[1] / "sitecustomize.py").write_text(
        "import io, time\n"
        "open_now = io.open\n"
        "\n"
        "def open_late(path, *arguments, **options):\n"
        "    time.sleep(600 if str(path).endswith('index.json') else 0)\n"
        "    return open_now(path, *arguments, **options)\n"
        "\n"
        "io.open = open_late\n"
    )
    found = start_ranks(folders, "--data", "data", "--timeout", 8)
    assert [status for status, *_ in found] == [1, 1]
    assert 'error: "facts of all ranks" did not end within 8 s (rank 1 on ' in found[0][2]
    assert 'is still at "data folder")' in found[0][2]
    assert "Traceback" not in found[0][2] + found[1][2]
