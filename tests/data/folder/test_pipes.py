"""A data folder of a stranger, with pipes and devices where files are expected: no reader waits for them."""

import os
import shutil
from pathlib import Path

import pytest

from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.errors import UserError

FILES = (
    "index.json",
    "tokenizer.json",
    "lengths.npy",
    "train-00000.arrow",
    "valid/source.txt",
    "valid/target.txt",
    "valid/lengths.npy",
    "valid/valid-00000.arrow",
)


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
@pytest.mark.parametrize("name", FILES)
def test_what_is_no_file_is_refused(name: str, kind: str, toy_data: DataFolder, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    shutil.copytree(toy_data.path, folder)
    (folder / name).unlink()
    if kind == "pipe":
        os.mkfifo(folder / name)
    elif kind == "device":
        (folder / name).symlink_to("/dev/zero")
    else:
        (folder / name).mkdir()
    with pytest.raises(UserError, match=f"{folder / name} .*[:] "):
        DataFolder.open(folder).verify()


@pytest.mark.parametrize("name", FILES)
def test_what_becomes_a_pipe_while_it_is_open(name: str, toy_data: DataFolder, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    shutil.copytree(toy_data.path, folder)
    opened = DataFolder.open(folder)
    (folder / name).unlink()
    os.mkfifo(folder / name)
    if name != "index.json":
        with pytest.raises(UserError, match=f"{folder / name} cannot be read"):
            opened.verify()
    if name.endswith(".txt"):
        with pytest.raises(UserError, match="it is a pipe or a device, not a regular file"):
            opened.valid_text()
