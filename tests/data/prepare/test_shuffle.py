"""Pairs to shards."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_transformer.data.folder import format as shards
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.data.prepare import pipeline as module
from dist_transformer.data.prepare import shuffle
from dist_transformer.data.prepare.shuffle import plan_passes
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


@pytest.mark.system
def test_no_file_is_opened_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_PAIRS", 100)
    opened: list[str] = []
    mapped: list[int] = []
    left: list[Path] = []
    read_batch, write_shard = shards.read_batch, shards.write_shard

    def count(path: Path, *arguments: Any, **options: Any) -> Any:
        opened.append(path.name)
        return read_batch(path, *arguments, **options)

    def look(*arguments: Any) -> Any:
        maps = Path("/proc/self/maps").read_text().splitlines()
        mapped.append(sum("/ids-" in line or "/merge-" in line for line in maps))
        left.extend(arguments[0].parent.glob("ids-*"))
        return write_shard(*arguments)

    monkeypatch.setattr(shards, "read_batch", count)
    monkeypatch.setattr(shards, "write_shard", look)
    index, _ = run(tmp_path, corpus(1_000), pairs_per_shard=2)
    # 900 pairs in 450 shards; 64 tasks at least, so 65 of at most 7 shards. 9 merges open each of the 10 chunks once,
    # and at most 8 tasks open the file of a merge.
    assert 350 < len(index.train.shards) < 450
    times = Counter(name for name in opened if name.startswith(("ids-", "merge-")))
    assert [times[name] for name in times if name.startswith("ids-")] == [9] * 10
    assert sum(times[name] for name in times if name.startswith("merge-")) == 65
    assert max(times.values()) == 9
    assert set(mapped) == {0}
    # What was merged does not fill the disk.
    assert left == []


def test_any_number_of_passes_gives_the_same_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut into groups of a few files, with ranges and shards without pairs."""
    monkeypatch.setattr(module, "CHUNK_PAIRS", 30)
    for opens, tokens in ((1_000, 10**6), (2, 10**6), (3, 900)):
        monkeypatch.setattr(shuffle, "_OPENS", opens)
        monkeypatch.setattr(shuffle, "_MERGED_AT_ONCE", tokens)
        run(tmp_path, corpus(300), f"{opens}", pairs_per_shard=2)
    assert files_of(tmp_path / "1000") == files_of(tmp_path / "2") == files_of(tmp_path / "3")


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 300), st.integers(1, 5_000), st.integers(1, 20), st.integers(0, 10**12))
def test_passes_give_each_range_all_of_its_files(files: int, count: int, at_once: int, tokens: int) -> None:
    names = [f"ids-{number}" for number in range(files)]
    passes, ranges = plan_passes(names, count, at_once=at_once, tokens=tokens)
    # The chunks behind a file, and the shards that it covers.
    content = {name: ({name}, (0, count)) for name in names}
    for number, merges in enumerate(passes):
        assert max(Counter(name for merge in merges for name in merge.files).values()) <= 10
        for index, merge in enumerate(merges):
            behind = [content[name] for name in merge.files]
            assert all(first <= merge.first < merge.stop <= stop for _, (first, stop) in behind)
            chunks = set().union(*(chunks for chunks, _ in behind))
            assert len(chunks) == sum(len(chunks) for chunks, _ in behind)
            content[f"merge-{number}-{index:06}.arrow"] = (chunks, (merge.first, merge.stop))
    assert [place for whole in ranges for place in range(whole.first, whole.stop)] == list(range(count))
    for whole in ranges:
        assert -(-(whole.stop - whole.first) // at_once) <= 10
        assert (whole.first % at_once, whole.stop % at_once if whole.stop < count else 0) == (0, 0)
        behind = [content[name] for name in whole.files]
        assert sorted(chunk for chunks, _ in behind for chunk in chunks) == sorted(names)
        assert all(first <= whole.first < whole.stop <= stop for _, (first, stop) in behind)


def test_a_billion_pairs_open_files_a_few_hundred_thousand_times() -> None:
    """20,000 chunks of 50,000 pairs with 57 tokens each; without merges, 891 tasks would open 17.8 million files."""
    chunks, tokens = 20_000, 57 * 10**9
    passes, ranges = plan_passes(
        [f"{number}" for number in range(chunks)], 10_000, at_once=10_000 * 64 // 57_000, tokens=tokens
    )
    opens = sum(len(merge.files) for merges in passes for merge in merges)
    opens += sum(len(whole.files) * -(-(whole.stop - whole.first) // 11) for whole in ranges)
    assert len(passes) == 2
    assert opens < 400_000
    largest = max(len(merge.files) for merge in passes[0])
    assert largest * tokens / chunks / 10 <= 16_000_000
