"""Preparation with several segmentations of each sentence, and the epochs that train on them."""

import itertools
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dist_transformer.config.settings import BatchConfig, DataConfig
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.data.loading.loader import open_training_data
from dist_transformer.data.loading.plan import Position
from dist_transformer.data.prepare import pipeline
from dist_transformer.data.vocabulary.tokenizer import Tokenizer
from tests.conftest import run_command
from tests.data.prepare.preparing import corpus, files_of, run, with_validation

PAIRS = corpus(60)
SEVERAL: dict[str, Any] = {"segmentations": 3, "segmentation_dropout": 0.3, "pairs_per_shard": 20}


def rows_of(data: DataFolder, pair_ids: np.ndarray) -> list[list[list[int]]]:
    """Ids of sources and of targets."""
    source, source_lengths, target, target_lengths = data.train.tokens(pair_ids)
    sides = ((source, source_lengths), (target, target_lengths))
    return [[row.tolist() for row in np.split(ids, np.cumsum(lengths)[:-1])] for ids, lengths in sides]


def texts_of(tokenizer: Tokenizer, sides: list[list[list[int]]]) -> list[tuple[str, ...]]:
    return list(zip(*(map(tokenizer.decode, rows) for rows in sides), strict=True))


def test_every_segmentation_has_the_same_pairs(tmp_path: Path) -> None:
    valid = with_validation(tmp_path, [("another word here", "ein anderes Wort da")])
    index, report = run(tmp_path, PAIRS, **SEVERAL, **valid)
    data = DataFolder.open(tmp_path / "out")
    data.verify()
    info, tokenizer = index.train, data.tokenizer().source
    assert (info.segmentations, info.pairs, info.rows) == (3, 60, 180)
    assert sum(shard.target_tokens for shard in info.shards) // 3 == info.target_tokens
    variants = [rows_of(data, np.arange(60) + 60 * number) for number in range(3)]
    texts = [texts_of(tokenizer, sides) for sides in variants]
    assert texts[0] == texts[1] == texts[2]
    assert {*texts[0]} == {*PAIRS}
    best = [[tokenizer.encode(pair[side]) for pair in texts[0]] for side in (0, 1)]
    for one, other in itertools.combinations([*variants, best], 2):
        for side in (0, 1):
            assert sum(a != b for a, b in zip(one[side], other[side], strict=True)) > 40
    # Validation has the best segmentation.
    ids, _, _, _ = data.valid.tokens(np.arange(1))
    assert ids.tolist() == tokenizer.encode("another word here")
    assert sum(line.startswith("variants: 3 of each training pair, with segmentations of its own") for line in report)
    shown = run_command(sys.executable, "-m", "dist_transformer", "inspect", tmp_path / "out")
    assert "train: 60 pairs in 9 shard(s), 3 variants of each;" in shown


def test_the_result_does_not_depend_on_chunks_and_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path, PAIRS, "first", **SEVERAL)
    monkeypatch.setattr(pipeline, "CHUNK_PAIRS", 7)
    run(tmp_path, PAIRS, "second", **SEVERAL, workers=2)
    assert files_of(tmp_path / "first") == files_of(tmp_path / "second")
    run(tmp_path, PAIRS, "other", **SEVERAL, seed=2)
    assert files_of(tmp_path / "first") != files_of(tmp_path / "other")


def test_a_chunk_may_have_no_pair_to_draw_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "CHUNK_PAIRS", 4)
    index, _ = run(tmp_path, [*PAIRS[:8], *[("", "leer")] * 4, *PAIRS[8:]], **SEVERAL)
    assert index.dropped["empty"] == 4
    assert index.train.pairs + index.valid_text.pairs == 60


def test_one_side_alone(tmp_path: Path) -> None:
    run(tmp_path, PAIRS, **SEVERAL, segmented_side="source")
    data = DataFolder.open(tmp_path / "out")
    pairs = data.train.info.pairs
    variants = [rows_of(data, np.arange(pairs) + pairs * number) for number in range(3)]
    target = data.tokenizer().target
    assert all(sides[1] == [target.encode(target.decode(row)) for row in sides[1]] for sides in variants)
    assert variants[0][0] != variants[1][0] != variants[2][0]


def test_a_pair_too_long_in_a_segmentation_is_dropped(tmp_path: Path) -> None:
    whole, _ = run(tmp_path, PAIRS, "whole", **SEVERAL)
    most = max(whole.train.max_source_tokens, whole.train.max_target_tokens) - 1
    index, _ = run(tmp_path, PAIRS, "cut", **SEVERAL, max_tokens=most)
    assert 0 < index.dropped["too_long"] < 60
    assert index.train.pairs == 60 - index.valid_text.pairs - index.dropped["too_long"]
    assert max(index.train.max_source_tokens, index.train.max_target_tokens) <= most


def test_epochs_take_one_segmentation_after_the_other(tmp_path: Path) -> None:
    run(tmp_path, PAIRS, **SEVERAL)
    data = DataFolder.open(tmp_path / "out")
    batch = BatchConfig(max_target_tokens=64, packs_per_step=2, window_shards=2)
    training = open_training_data(DataConfig(data=(str(data.path),)), batch, seed=1)
    pairs = data.train.info.pairs
    steps = list(itertools.takewhile(lambda step: step.epoch < 5, training.plan.steps(Position(), 2)))
    for epoch in range(5):
        found = [
            i for step in steps if step.epoch == epoch for pack in step.packs if pack for i in pack.pair_ids.tolist()
        ]
        assert sorted(found) == [epoch % 3 * pairs + i for i in range(pairs)]
    # From the middle of an epoch, by a new plan.
    middle = next(i for i, step in enumerate(steps) if step.epoch == 1 and step.position.packs_consumed) + 1
    position = Position.from_json(steps[middle].position.to_json())
    again = open_training_data(DataConfig(data=(str(data.path),)), batch, seed=1).plan.steps(position, 2)
    for one, other in zip(steps[middle + 1 :], again, strict=False):
        assert one.packs.pair_ids.tolist() == other.packs.pair_ids.tolist()
