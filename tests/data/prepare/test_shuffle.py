"""Pairs to shards."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dist_transformer.data.folder import format as shards
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.data.prepare import pipeline as module
from tests.data.prepare.preparing import corpus, run, train_text


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
    assert report[-1].endswith(f"--data {tmp_path / 'out'} --run-dir runs/first")


def test_a_sorted_corpus_is_well_mixed(tmp_path: Path) -> None:
    run(tmp_path, corpus(1_000), pairs_per_shard=250)
    data = DataFolder.open(tmp_path / "out")
    numbers = np.array([int(source.split()[2]) for source, _ in train_text(data)])
    for start, stop in zip(data.train.shard_starts[:-1], data.train.shard_starts[1:], strict=True):
        assert 400 < numbers[start:stop].mean() < 600
    assert abs(np.corrcoef(numbers, np.arange(len(numbers)))[0, 1]) < 0.15


@pytest.mark.system
def test_chunks_are_opened_once_for_several_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_PAIRS", 100)
    opened: list[str] = []
    mapped: list[int] = []
    read_batch, write_shard = shards.read_batch, shards.write_shard

    def count(path: Path, *arguments: Any, **options: Any) -> Any:
        opened.append(path.name)
        return read_batch(path, *arguments, **options)

    def look(*arguments: Any) -> Any:
        mapped.append(sum("/ids-" in line for line in Path("/proc/self/maps").read_text().splitlines()))
        return write_shard(*arguments)

    monkeypatch.setattr(shards, "read_batch", count)
    monkeypatch.setattr(shards, "write_shard", look)
    index, _ = run(tmp_path, corpus(1_000), pairs_per_shard=2)
    # 900 pairs in 450 shards; 64 tasks at least, so 7 shards each: 65 tasks open each of the 10 chunks once.
    assert 350 < len(index.train.shards) < 450
    assert sum(name.startswith("ids-") for name in opened) == 65 * 10
    assert set(mapped) == {0}
