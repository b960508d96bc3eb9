"""A data folder whose files are links, as in a cache of the Hugging Face hub."""

from pathlib import Path

import numpy as np
import pytest

from dist_transformer.base.errors import UserError
from dist_transformer.data.folder.reader import DataFolder
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
