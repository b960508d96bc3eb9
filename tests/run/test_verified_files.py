"""Pickles and files that do not belong into a run folder."""

import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.run.sound_run import failures


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("optimizer.pt", b"anything"),
        ("samples/notes.json", pickle.dumps({"a": 1})),
        ("tensorboard/events", pickle.dumps([1], protocol=2)),
        ("model.bin", None),
    ],
)
def test_a_pickle(run: Path, name: str, content: bytes | None) -> None:
    """One is in a zip, as torch writes its checkpoints."""
    (run / name).parent.mkdir(exist_ok=True)
    if content is None:
        torch.save({}, run / name)
    else:
        (run / name).write_bytes(content)
    found = failures(run)
    assert found.keys() == {"files"}
    assert f"{run / name} is a pickle" in found["files"]


def test_the_record_that_torch_writes_of_a_hang_may_be_a_pickle(run: Path) -> None:
    (run / "hangs").mkdir()
    (run / "hangs" / "nccl-rank-0").write_bytes(pickle.dumps({}))
    assert failures(run) == {}


def test_a_zip_without_a_pickle_is_none(run: Path) -> None:
    with zipfile.ZipFile(run / "samples.zip", "w") as archive:
        archive.writestr("a.txt", "a")
    assert failures(run) == {}


KILLED = "is being written now, or a killed process left it"
NAMES = {
    **dict.fromkeys(["checkpoints/.step-00000006.tmp", "weights/.step-6.safetensors.tmp", "config.json.tmp"], KILLED),
    **dict.fromkeys(["checkpoints/step-4", "checkpoints/notes.txt"], "is not a file of a run"),
    **dict.fromkeys(["weights/best.safetensors", "weights/ema-4.safetensors"], "is not a file of a run"),
}


@pytest.mark.parametrize("name", NAMES)
def test_what_a_killed_writer_leaves_or_is_no_file_of_a_run(run: Path, name: str) -> None:
    (run / name).write_text("")
    assert f"{run / name} {NAMES[name]}" in failures(run)["files"]


def test_all_that_does_not_belong_is_named(run: Path) -> None:
    """Up to five, and how many more there are."""
    for number in range(7):
        (run / f"checkpoints/notes-{number}.txt").write_text("")
    found = failures(run)["files"]
    assert found.count("is not a file of a run: move it away") == 5
    assert found.endswith("; and 2 more")


def test_a_folder_that_cannot_be_read_is_not_taken_as_empty(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scan = os.scandir

    def refused(path: Any) -> Any:
        if Path(path).name == "weights":
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refused)
    assert "cannot be read (PermissionError: [Errno 13] Permission denied" in failures(run)["files"]
