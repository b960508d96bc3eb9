import numpy as np
import pytest

from benchmarks.training.text import IGNORED_LABEL, TextSample
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.data.vocabulary.tokenizer import BOS_ID, EOS_ID, PAD_ID

pytestmark = pytest.mark.slice(name="benchmarks")


def test_buckets_hold_each_pair_once_under_the_budget(toy_data: DataFolder) -> None:
    """And a padded batch, by hand."""
    sample = TextSample(toy_data.train, pairs=300, longest=40, seed=3)
    batches = sample.bucketed(max_tokens=200, seed=0)
    assert sorted(np.concatenate(batches)) == list(range(len(sample)))
    sizes = [(b.source_BS.numel(), b.target_BT.numel()) for b in map(sample.batch, batches)]
    assert np.max(sizes) <= 200
    useful, whole = (sample.sizes.sum() / padded for padded in (np.sum(sizes), 300 * sample.sizes.max(axis=0).sum()))
    assert useful > whole + 0.1
    sample.sources, sample.targets = [np.array([7, 8]), np.array([9])], [np.array([5]), np.array([4, 6, 4])]
    sample.sizes = np.array([[3, 2], [2, 4]])
    batch = sample.batch([0, 1])
    assert batch.source_BS.tolist() == [[7, 8, EOS_ID], [9, EOS_ID, PAD_ID]]
    assert batch.source_mask_BS.tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch.target_BT.tolist() == [[BOS_ID, 5, PAD_ID, PAD_ID], [BOS_ID, 4, 6, 4]]
    assert batch.labels_BT.tolist() == [[5, EOS_ID, IGNORED_LABEL, IGNORED_LABEL], [4, 6, 4, EOS_ID]]
