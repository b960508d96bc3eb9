from pathlib import Path

import numpy as np

from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.data.folder.subset import write_subset

# From different shards, out of order.
PAIRS = np.array([1700, 3, 4, 900])


def test_a_subset_is_a_data_folder_of_those_pairs(toy_data: DataFolder, tmp_path: Path) -> None:
    """Its validation text is that of the pairs."""
    write_subset(toy_data, PAIRS, tmp_path / "subset")
    folder = DataFolder.open(tmp_path / "subset")
    folder.verify()
    wanted, tokenizer = toy_data.train.tokens(PAIRS), toy_data.tokenizer()
    for split in (folder.train, folder.valid):
        for found, expected in zip(split.tokens(np.arange(4)), wanted, strict=True):
            assert np.array_equal(found, expected)
        assert np.array_equal(split.lengths, np.stack([wanted[1], wanted[3]], axis=1) + 1)
    assert folder.index.corpus.startswith("4 pairs of ")
    for side, lines in enumerate(folder.valid_text()):
        rows = np.split(wanted[2 * side], np.cumsum(wanted[2 * side + 1])[:-1])
        assert [tokenizer.encode(line) for line in lines] == [row.tolist() for row in rows]
