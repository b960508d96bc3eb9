"""Pairs to shards."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.data.prepare import pipeline as module
from dist_transformer.data.prepare import shuffle
from tests.data.prepare.preparing import corpus, files_of, run, train_text


def test_each_pair_is_in_exactly_one_shard_or_held_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_PAIRS", 70)
    pairs = corpus(1_000)
    index, report = run(tmp_path, pairs, pairs_per_shard=200)
    data = DataFolder.open(tmp_path / "out")
    data.verify()
    held_out = list(zip(*data.valid_text(), strict=True))
    assert len(held_out) == 100
    assert Counter(train_text(data) + held_out) == Counter(pairs)
    assert index == data.index
    assert index.valid_held_out
    # 900 pairs in 5 shards of 180 on average; a hash deals them within 5 standard deviations of 12.
    assert [120 < shard.pairs < 240 for shard in index.train.shards] == [True] * 5
    assert "100 pairs held out" in "\n".join(report)
    assert report[-1].endswith(f"--data {tmp_path / 'out'} --run-dir runs/out")


def test_a_sorted_corpus_is_well_mixed(tmp_path: Path) -> None:
    run(tmp_path, corpus(1_000), pairs_per_shard=250)
    data = DataFolder.open(tmp_path / "out")
    numbers = np.array([int(source.split()[2]) for source, _ in train_text(data)])
    for start, stop in zip(data.train.shard_starts[:-1], data.train.shard_starts[1:], strict=True):
        assert 400 < numbers[start:stop].mean() < 600
    assert abs(np.corrcoef(numbers, np.arange(len(numbers)))[0, 1]) < 0.15


def test_shards_do_not_depend_on_chunks_and_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cover shards without pairs, too."""
    for chunk, tasks in ((1_000, 64), (30, 1), (70, 5)):
        monkeypatch.setattr(module, "CHUNK_PAIRS", chunk)
        monkeypatch.setattr(shuffle, "_LEAST_TASKS", tasks)
        index, _ = run(tmp_path, corpus(300), f"{tasks}", pairs_per_shard=2)
    assert 0 < len(index.train.shards) < 135
    assert files_of(tmp_path / "64") == files_of(tmp_path / "1") == files_of(tmp_path / "5")
