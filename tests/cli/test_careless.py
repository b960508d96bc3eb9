"""Careless command lines and full disks: each ends with one sentence, never with a traceback."""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from dist_transformer.data.folder.reader import DataFolder
from tests import lived
from tests.commands import Commands, Ended
from tests.faults.disks import mounted

pytestmark = [pytest.mark.slow, pytest.mark.system]

# Commands with the flags of their folders: K of a kind, D data, R a run, M a model, T a text; O is a new output.
_FOLDERS = (
    ("inspect K", "D"),
    ("train --preset tiny --max-steps 1 --data K --run-dir O", "D"),
    ("train --preset tiny --max-steps 1 --data D --run-dir K", "R"),
    ("train --preset tiny --max-steps 1 --data D --run-dir O --init-from K", "M"),
    ("plan --preset tiny --data K", "D"),
    ("plan --against K", "R"),
    ("report K", "R"),
    ("verify K", "R"),
    ("average K --out O", "R"),
    ("average --checkpoints K --out O", "M"),
    ("translate --model K --input T --output O", "M"),
    ("translate --model M --input K --output O", "T"),
    ("evaluate --model K --src T --ref T", "M"),
    ("evaluate --model M --src K --ref T", "T"),
    ("score --model K --src T --tgt T", "M"),
    ("export --model K --to hf --src T --ref T --out O", "M"),
    ("import K --src T --ref T --out O", ""),
    ("serve --model K", "M"),
    ("pictures --model K --out O", "M"),
    ("prepare --src K --tgt T --out O", "T"),
    ("doctor --data K", "D"),
)
# Another folder, and a file or nothing in its place.
_OTHER = {"D": "RT", "R": "MT", "M": "DT", "T": "DN", "": "DT"}
_WRONG = [(words, kind) for words, right in _FOLDERS for kind in _OTHER[right]]


@pytest.fixture(scope="module")
def home(commands: Commands, toy_data: DataFolder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lived.live(commands, toy_data.path, tmp_path_factory.mktemp("home"))


def one_sentence(ended: Ended, words: object) -> None:
    """Refused: an error at the end, as a command or its parser writes it."""
    assert ended.status in (1, 2), (words, ended)
    assert "Traceback" not in ended.output
    assert "--traceback" not in ended.output, (words, ended.output)
    assert re.search("error: |Required options|FAIL", ended.output), (words, ended.output)


@pytest.mark.parametrize(("words", "kind"), _WRONG)
def test_a_folder_of_another_kind(commands: Commands, home: Path, tmp_path: Path, words: str, kind: str) -> None:
    """N: nothing is there."""
    folders = {"D": "data", "R": "run", "M": "run/model", "T": "in.en", "N": "none"}
    out = tmp_path / "out"
    places = {**{letter: home / name for letter, name in folders.items()}, "O": out}
    typed = [places.get(kind if word == "K" else word, word) for word in words.split()]
    one_sentence(commands.run(typed, tmp_path), typed)
    assert not (out / "config.json").exists()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    with mounted("-t", "tmpfs", "-o", "size=64k", "tmpfs", place):
        yield place


@pytest.mark.parametrize(
    ("free", "words"),
    [
        (0, (*lived.TRAIN, "disk/run", "--max-steps", "2")),
        (12288, (*lived.TRAIN, "disk/run", "--max-steps", "2")),
        (0, ("prepare", "--toy", "500", "--vocab-size", "400", "--out", "disk/x")),
        (12288, ("average", "--run-dir", "run", "--out", "disk/x")),
        (0, ("average", "--run-dir", "run", "--sweep", "1", "--out", "disk/x", "--beam", "1")),
        (0, ("translate", "--model", "run/model", "--input", "in.en", "--output", "disk/x")),
        (0, (*lived.EVALUATE, "--beam", "1", "--json", "disk/x")),
        (0, (*lived.SCORE, "--out", "disk/x")),
        (0, ("report", "run", "--out", "disk/x")),
        (0, ("pictures", "--out", "disk/x")),
        (12288, ("export", *lived.EVALUATE[1:], "--to", "hf", "--out", "disk/x")),
    ],
)
def test_a_full_disk(commands: Commands, home: Path, disk: Path, words: tuple[str, ...], free: int) -> None:
    """The sentence names the disk's path and what to do."""
    # Room for names and small files.
    with (disk / "ballast").open("wb", buffering=0) as ballast, suppress(OSError):
        while True:
            ballast.write(bytes(4096))
    os.truncate(disk / "ballast", (disk / "ballast").stat().st_size - free)
    typed = [word.replace("disk/", f"{disk}/") for word in words]
    ended = commands.run(typed, home)
    one_sentence(ended, typed)
    (line,) = [line for line in ended.output.splitlines() if line.startswith("error: ")]
    assert str(disk) in line
    assert re.search(r"\(No space left on device.*\): .*(free|choose)", line)
