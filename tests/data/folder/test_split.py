"""Shards in memory: which ones stay, and that their files matter no more."""

import os
from pathlib import Path

import numpy as np
import pytest

from dist_transformer.base.errors import UserError
from dist_transformer.data.folder import split as folder_module
from dist_transformer.data.folder.reader import DataFolder


def test_few_shards_are_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If one shard has room, the first is read again when it is needed again."""
    monkeypatch.setattr(folder_module, "_KEPT_SHARDS", 1)
    train = DataFolder.open(folder).train
    train.tokens(np.array([0]))
    (folder / "train-00000.arrow").rename(folder / "elsewhere")
    assert train.tokens(np.array([0]))[0].tolist() == [10, 11]
    train.tokens(np.array([4]))
    with pytest.raises(UserError, match=r"train-00000\.arrow cannot be read \(No such file or directory\)"):
        train.tokens(np.array([0]))


@pytest.mark.parametrize(
    ("kept_bytes", "kept_shards", "stays"), [(2**20, 1, True), (2**20, 0, False), (0, 1, False), (-1, 1, False)]
)
def test_past_shards_stay_within_bytes_and_number(folder: Path, kept_bytes: int, kept_shards: int, stays: bool) -> None:
    """-1 stands for a byte less than the first shard has. What stays needs its file no more."""
    train = DataFolder.open(folder).train
    train.kept_bytes = kept_bytes if kept_bytes >= 0 else train.info.shards[0].bytes - 1
    train.kept_shards = kept_shards
    train.hold([0])
    train.hold([1])
    train.forget_past()
    (folder / "train-00000.arrow").unlink()
    if stays:
        assert train.tokens(np.array([4, 0]))[0].tolist() == [17, 18, 10, 11]
        assert train.hold([0]) == {}
    else:
        assert train.hold([0]).keys() == {0}


def test_held_shards_do_not_feel_what_becomes_of_their_files(folder: Path) -> None:
    """Cut short, overwritten in place, removed: what was verified is what is used, until others are held."""
    train = DataFolder.open(folder).train
    assert train.hold([0, 1]) == {}
    with (folder / "lengths.npy").open("r+b") as file:
        file.write(b"\xff" * (folder / "lengths.npy").stat().st_size)
    assert train.lengths.tolist() == [[3, 2], [2, 1], [4, 3], [2, 5], [3, 2]]
    os.truncate(folder / "train-00000.arrow", 10)
    with (folder / "train-00001.arrow").open("r+b") as file:
        file.write(b"x" * 200)
    assert train.tokens(np.array([4, 0]))[0].tolist() == [17, 18, 10, 11]
    # The next window needs the second shard; packs of this one may still wait.
    assert train.hold([1]) == {}
    assert train.tokens(np.array([0]))[0].tolist() == [10, 11]
    train.forget_past()
    assert train.tokens(np.array([4]))[0].tolist() == [17, 18]
    with pytest.raises(UserError, match=r"train-00000\.arrow is damaged"):
        train.tokens(np.array([0]))
    problems = train.hold([0])
    train.forget_past()
    assert problems.keys() == train.hold([0]).keys() == {0}
    with pytest.raises(UserError, match=r"train-00001\.arrow is damaged"):
        train.tokens(np.array([4]))
