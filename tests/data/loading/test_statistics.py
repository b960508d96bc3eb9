import sys
from pathlib import Path

import numpy as np
import pytest

from dist_transformer.data.folder.format import TokenLists, write_shard, write_split
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.data.folder.split import Split
from dist_transformer.data.loading import statistics
from dist_transformer.data.loading.plan import Budgets
from dist_transformer.data.loading.statistics import (
    Lengths,
    count_lengths,
    first_epoch,
    histogram_edges,
    length_histograms,
    random_examples,
)
from tests.conftest import run_command


def make_split(folder: Path, lengths: list[tuple[int, int]]) -> Split:
    """Pairs of the given lengths, the special tokens included; two to a shard."""
    shards = []
    for first in range(0, len(lengths), 2):
        sides = zip(*lengths[first : first + 2], strict=True)
        lists = [TokenLists.from_lists([[9] * (length - 1) for length in side], np.uint16) for side in sides]
        shards.append(write_shard(folder / f"train-{first}.arrow", *lists))
    return Split(folder, write_split(folder, shards))


def test_lengths_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "_CHUNK_PAIRS", 2)
    source, target = count_lengths(make_split(tmp_path, [(3, 2), (1, 7), (3, 2), (5, 2), (3, 4)]))
    assert source.counts.tolist() == [0, 1, 0, 3, 0, 1]
    assert target.counts.tolist() == [0, 0, 3, 0, 1, 0, 0, 1]
    assert (source.sentences, source.tokens, source.mean, source.longest) == (5, 15, 3.0, 5)
    assert (target.sentences, target.tokens, target.mean, target.longest) == (5, 17, 3.4, 7)


@pytest.mark.parametrize(("share", "length"), [(0.01, 1), (0.2, 1), (0.21, 3), (0.8, 3), (0.81, 5), (1.0, 5)])
def test_a_quantile_is_the_shortest_length_that_covers_the_share(share: float, length: int) -> None:
    assert Lengths(counts=np.array([0, 1, 0, 3, 0, 1])).quantile(share) == length


def test_fill_by_hand(tmp_path: Path) -> None:
    """Four pairs of 5 + 4 tokens go two to a pack; one of 11 source tokens fits none."""
    split = make_split(tmp_path, [(5, 4), (5, 4), (11, 4), (5, 4), (5, 4)])
    budgets = Budgets(max_source_tokens=10, max_target_tokens=16, max_sentences=3)
    epoch = first_epoch(split, budgets, window_shards=1, seed=1)
    assert (epoch.totals.packs, epoch.totals.pairs, epoch.unfit_pairs, epoch.left_out_pairs) == (2, 4, 1, 0)
    assert (epoch.source_fill, epoch.target_fill, epoch.fill) == (1.0, 0.5, 36 / 52)


def test_a_histogram_by_hand() -> None:
    """Source: half the sentences have 1 token, half 2; target: all have 2 tokens."""
    sides = [Lengths(counts=np.array([0, 4, 4])), Lengths(counts=np.array([0, 0, 3]))]
    assert length_histograms(sides, ["en", "de"]).splitlines() == [
        "tokens  en                             de",
        "     1   50.0%  ##########               0.0%",
        "     2   50.0%  ##########             100.0%  #####################",
        "  3 up    0.0%                           0.0%",
    ]


def test_the_last_row_holds_the_longest_half_percent() -> None:
    """996 sentences of 1 token, 3 of 2 and 1 of 90."""
    side = Lengths(counts=np.bincount([1] * 996 + [2] * 3 + [90]))
    rows = length_histograms([side], ["en"]).splitlines()[1:]
    assert [row.split() for row in rows] == [["1", "99.6%", "#" * 21], ["2", "up", "0.4%"]]


@pytest.mark.parametrize(
    ("longest", "row"), [(1, 1), (2, 1), (15, 1), (16, 2), (76, 10), (300, 20), (4000, 500), (90_000, 5970)]
)
def test_rows_cover_all_lengths_and_fit_a_terminal(longest: int, row: int) -> None:
    counts = np.zeros(longest + 1, dtype=np.int64)
    counts[1:] = 1
    sides = [Lengths(counts=counts)] * 2
    edges = histogram_edges(sides)
    assert edges[:2] == [1, 1 + row]
    assert len(edges) <= 17
    assert edges[-1] > 0.99 * longest
    lines = length_histograms(sides, ["source, " + "x" * 90, "target, en"]).splitlines()
    assert max(map(len, lines)) <= 80
    shares = [[float(word[:-1]) for word in line.split() if word.endswith("%")] for line in lines[1:]]
    np.testing.assert_allclose(np.sum(shares, axis=0), 100, atol=0.05 * len(shares))


def test_examples_are_pairs_of_the_corpus_without_repetition(toy_data: DataFolder) -> None:
    tokenizer = toy_data.tokenizer()
    text = [(toy_data.path / f"text/train.{language}").read_text().splitlines() for language in ("en", "de")]
    corpus = set(zip(*text, strict=True))
    examples = random_examples(toy_data.train, tokenizer, 30, seed=1)
    assert len(examples) == 30
    assert set(examples) <= corpus
    assert examples == random_examples(toy_data.train, tokenizer, 30, seed=1)
    assert examples != random_examples(toy_data.train, tokenizer, 30, seed=2)
    everything = random_examples(toy_data.valid, tokenizer, 10**6, seed=1)
    assert sorted(everything) == sorted(zip(*toy_data.valid_text(), strict=True))


@pytest.mark.system
def test_the_tool_prints_and_draws(toy_data: DataFolder, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dist_transformer", "inspect", toy_data.path]
    budgets = ["--max-target-tokens", 512, "--max-source-tokens", 500, "--max-sentences", 9]
    output = run_command(*command, *budgets, "--examples", 3, "--png", tmp_path / "a.png", "--verify")
    info = toy_data.train.info
    assert output.startswith("hashes: every file matches the index\n")
    assert f"train: {info.pairs:,} pairs in {len(info.shards)} shard(s); dropped: 0 empty" in output
    assert f"{info.source_tokens:,} source and {info.target_tokens:,} target tokens" in output
    assert "at most 500 source tokens, 512 target tokens,\n          9 pairs;" in output
    assert output.count(" ||| ") == 3
    assert max(len(line) for line in output.splitlines() if "|||" not in line) <= 100
    content = (tmp_path / "a.png").read_bytes()
    assert content.startswith(b"\x89PNG")
    assert len(content) > 10_000


@pytest.mark.system
def test_the_tools_errors_name_what_is_wrong(toy_data: DataFolder, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dist_transformer", "inspect"]
    output = run_command(*command, toy_data.path, "--max-target-tokens", 0, status=1)
    assert output.startswith("error: --max-target-tokens is 0: ")
    output = run_command(*command, toy_data.path, "--png", tmp_path / "no/a.png", status=1)
    assert "a.png cannot be written (No such file or directory): choose another place" in output
