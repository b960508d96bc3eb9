"""A data folder with links, pipes and devices in place of files: links to files are read, and nothing is waited for."""

import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from dist_transformer.base.errors import UserError
from dist_transformer.data.folder.reader import DataFolder
from tests.conftest import run_command
from tests.hub_cache import as_hub_cache

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


def test_files_may_be_links_to_files(toy_data: DataFolder, tmp_path: Path) -> None:
    linked = DataFolder.open(as_hub_cache(toy_data.path, tmp_path))
    linked.verify()
    assert linked.index == toy_data.index
    assert linked.valid_text() == toy_data.valid_text()
    pairs = np.arange(0, toy_data.index.train.pairs, 7)
    for ours, theirs in zip(linked.train.tokens(pairs), toy_data.train.tokens(pairs), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.slow
def test_training_from_links_is_training_from_the_files(toy_data: DataFolder, tmp_path: Path) -> None:
    small = "--preset tiny --model.width 16 --model.heads 2 --model.ffn-width 16 --batch.max-target-tokens 256"
    ledgers = []
    for number, data in enumerate((toy_data.path, as_hub_cache(toy_data.path, tmp_path / "hub"))):
        run = tmp_path / str(number)
        command = [sys.executable, "-m", "dist_transformer.train", *small.split(), "--data", data, "--run-dir", run]
        run_command(*command, "--max-steps", 2)
        ledgers.append((run / "ledger.jsonl").read_bytes())
    assert ledgers[0] == ledgers[1]


@pytest.mark.parametrize("name", FILES)
def test_a_link_to_nothing_or_in_a_circle(name: str, toy_data: DataFolder, tmp_path: Path) -> None:
    snapshot = as_hub_cache(toy_data.path, tmp_path)
    (snapshot / name).resolve().unlink()
    with pytest.raises(UserError, match=f"{snapshot / name} .*No such file.*: "):
        DataFolder.open(snapshot)
    (snapshot / name).unlink()
    (snapshot / name).symlink_to(Path(name).name)
    with pytest.raises(UserError, match=f"{snapshot / name} .*Too many levels of symbolic links.*: "):
        DataFolder.open(snapshot)


@pytest.mark.parametrize("name", ["lengths.npy", "valid/lengths.npy", "valid/source.txt"])
def test_a_link_to_a_file_of_any_size(name: str, toy_data: DataFolder, tmp_path: Path) -> None:
    """A file with holes, which would fill the memory, or the folder for temporary files."""
    snapshot = as_hub_cache(toy_data.path, tmp_path)
    os.truncate((snapshot / name).resolve(), 2**40)
    with pytest.raises(
        UserError, match=f"{snapshot / name} cannot be read .it has 1,099,511,627,776 bytes, but at most"
    ):
        DataFolder.open(snapshot).valid_text()


@pytest.mark.parametrize("kind", ["pipe", "link to a pipe", "device", "folder", "link to a folder"])
@pytest.mark.parametrize("name", FILES)
def test_what_is_no_file_is_refused(name: str, kind: str, toy_data: DataFolder, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    shutil.copytree(toy_data.path, folder)
    (folder / name).unlink()
    if kind == "pipe":
        os.mkfifo(folder / name)
    elif kind == "link to a pipe":
        os.mkfifo(tmp_path / "pipe")
        (folder / name).symlink_to(tmp_path / "pipe")
    elif kind == "link to a folder":
        (folder / name).symlink_to(tmp_path)
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
