import numpy as np
import pytest

from benchmarks.training.text import IGNORED_LABEL, TextSample
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.data.vocabulary.tokenizer import BOS_ID, EOS_ID, PAD_ID

pytestmark = pytest.mark.slice(name="benchmarks")


@pytest.fixture
def sample(toy_data: DataFolder) -> TextSample:
    return TextSample(toy_data.train, pairs=300, longest=40, seed=3)


def test_a_padded_batch_by_hand(sample: TextSample) -> None:
    sample.sources, sample.targets = [np.array([7, 8]), np.array([9])], [np.array([5]), np.array([4, 6, 4])]
    sample.sizes = np.array([[3, 2], [2, 4]])
    batch = sample.batch([0, 1])
    assert batch.source_BS.tolist() == [[7, 8, EOS_ID], [9, EOS_ID, PAD_ID]]
    assert batch.source_mask_BS.tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch.target_BT.tolist() == [[BOS_ID, 5, PAD_ID, PAD_ID], [BOS_ID, 4, 6, 4]]
    assert batch.labels_BT.tolist() == [[5, EOS_ID, IGNORED_LABEL, IGNORED_LABEL], [4, 6, 4, EOS_ID]]


def test_buckets_hold_each_pair_once_under_the_budget(sample: TextSample) -> None:
    batches = sample.bucketed(max_tokens=200, seed=0)
    assert sorted(np.concatenate(batches)) == list(range(len(sample)))
    for rows in batches:
        batch = sample.batch(rows)
        assert max(batch.source_BS.numel(), batch.target_BT.numel()) <= 200
    useful = sample.sizes.sum() / sum(b.source_BS.numel() + b.target_BT.numel() for b in map(sample.batch, batches))
    whole = sample.sizes.sum() / (len(sample) * sample.sizes.max(axis=0).sum())
    assert useful > whole + 0.1
