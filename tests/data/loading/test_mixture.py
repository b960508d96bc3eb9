"""Corpora mixed: shares by hand, each corpus its own exact epochs, positions that resume."""

import itertools
import json
import shutil
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from dist_transformer.base.errors import UserError
from dist_transformer.base.files import sha256_of
from dist_transformer.config.presets import PRESETS
from dist_transformer.config.settings import TrainConfig
from dist_transformer.data.folder.format import TokenLists, write_shard, write_split
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.data.folder.split import Split
from dist_transformer.data.loading.loader import open_training_data
from dist_transformer.data.loading.mixture import Corpora, Mixture, position_from_json, temperature_shares
from dist_transformer.data.loading.packing import Budgets
from dist_transformer.data.loading.plan import Plan, Step
from dist_transformer.data.prepare.pipeline import prepare
from dist_transformer.data.prepare.settings import PrepareSettings
from dist_transformer.data.text.pairs import line_files

BUDGETS = Budgets(max_source_tokens=40, max_target_tokens=40, max_sentences=9)


def mixture(sizes: list[int], shares: list[float]) -> Mixture:
    """Corpora of pairs of 2 to 9 tokens, shards of 30 pairs."""
    plans, first_id = [], 0
    for number, size in enumerate(sizes):
        lengths = np.random.default_rng(number).integers(2, 10, size=(size, 2)).astype(np.uint16)
        starts = np.array([*range(0, size, 30), size])
        plans.append(Plan(lengths, starts, budgets=BUDGETS, window_shards=2, seed=7, first_id=first_id))
        first_id += size
    return Mixture(plans, shares)


def contents(step: Step) -> list[list[int]]:
    return [pack.pair_ids.tolist() for pack in step.packs if pack is not None]


def test_temperatures_by_hand() -> None:
    assert temperature_shares([100, 300], 1) == pytest.approx((0.25, 0.75))
    # Square roots: 10 and 20.
    assert temperature_shares([100, 400], 2) == pytest.approx((1 / 3, 2 / 3))
    assert temperature_shares([5, 10**12], 1e9) == pytest.approx((0.5, 0.5))
    assert temperature_shares([7], 5) == (1.0,)


@settings(max_examples=20, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 150), min_size=2, max_size=4),
    weights=st.lists(st.integers(1, 9), min_size=4, max_size=4),
    packs_per_step=st.integers(1, 4),
)
def test_every_corpus_keeps_its_epochs_and_its_share(sizes: list[int], weights: list[int], packs_per_step: int) -> None:
    shares = [weight / sum(weights[: len(sizes)]) for weight in weights[: len(sizes)]]
    mixed = mixture(sizes, shares)
    steps = list(itertools.islice(mixed.steps(mixed.start(), packs_per_step), 80))
    ids = np.array([pair for step in steps for pack in contents(step) for pair in pack])
    firsts = np.cumsum([0, *sizes])
    for number, size in enumerate(sizes):
        own = ids[(ids >= firsts[number]) & (ids < firsts[number + 1])] - firsts[number]
        for epoch in range(len(own) // size):
            assert sorted(own[epoch * size : (epoch + 1) * size].tolist()) == list(range(size))
    assert all(len(contents(step)) == packs_per_step for step in steps)
    end = steps[-1].position
    total = sum(end.target_tokens)
    assert total == sum(step.target_tokens for step in steps)
    # No corpus is ever more than a pack away from its share.
    for share, tokens in zip(shares, end.target_tokens, strict=True):
        assert abs(tokens - share * total) <= len(sizes) * BUDGETS.max_target_tokens


def test_a_position_continues_with_the_next_steps() -> None:
    mixed = mixture([100, 37, 1], [0.5, 0.4, 0.1])
    through = list(itertools.islice(mixed.steps(mixed.start(), 3), 60))
    for done in (1, 7, 20, 41):
        place = position_from_json(json.loads(json.dumps(through[done - 1].position.to_json())))
        assert place == through[done - 1].position
        following = itertools.islice(mixture([100, 37, 1], [0.5, 0.4, 0.1]).steps(place, 3), 10)
        assert [contents(step) for step in following] == [contents(step) for step in through[done : done + 10]]


def test_tokens_come_from_the_right_corpus(tmp_path: Path) -> None:
    """Pair i of corpus k is [100 k + i]."""
    splits = []
    for corpus, size in enumerate((3, 2)):
        folder = tmp_path / str(corpus)
        folder.mkdir()
        rows = TokenLists.from_lists([[100 * corpus + i] for i in range(size)], np.uint16)
        longer = TokenLists.from_lists([[100 * corpus + i] * 2 for i in range(size)], np.uint16)
        splits.append(Split(folder, write_split(folder, [write_shard(folder / "train-00000.arrow", rows, longer)])))
    corpora = Corpora(splits)
    assert corpora.longest == (2, 3)
    assert corpora.sizes(np.array([4, 0])).tolist() == [[2, 2], [3, 3]]
    source, target = np.zeros(3, dtype=np.int64), np.zeros(6, dtype=np.int64)
    corpora.copy_tokens(np.array([4, 0, 3]), source, target, np.array([[0, 2, 1], [0, 2, 4]]))
    assert source.tolist() == [101, 100, 0]
    assert target.tolist() == [101, 101, 0, 0, 100, 100]


@pytest.fixture
def config(toy_data: DataFolder, tmp_path: Path) -> TrainConfig:
    return PRESETS["tiny"].changed(data=(str(toy_data.path),), run_dir=tmp_path / "run")


def test_folders_of_one_vocabulary_are_mixed_by_size(config: TrainConfig, toy_data: DataFolder) -> None:
    data = open_training_data(config.changed(data=config.corpora.data * 2).corpora, config.batch, seed=config.seed)
    first = next(data.plan.steps(data.plan.start(), 4))
    corpora = [int(pack.pair_ids[0] >= toy_data.train.info.pairs) for pack in first.packs if pack is not None]
    assert sorted(corpora) == [0, 0, 1, 1]
    batch = data.collator.build(first.packs[:1])
    assert int((batch.labels_T >= 0).sum()) == next(iter(first.packs)).target_tokens  # type: ignore[union-attr]


def test_weights_and_vocabularies_that_do_not_fit_are_refused(config: TrainConfig, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data_weights .* pass one weight above 0 for each folder of --data"):
        config.changed(data_weights=(1.0, 2.0))
    with pytest.raises(UserError, match="--data is empty"):
        open_training_data(config.changed(data=()).corpora, config.batch, seed=config.seed)
    first = Path(config.corpora.data[0])
    other = tmp_path / "other"
    settings = PrepareSettings(
        out=other, vocab_size=300, sources=tuple(line_files([first / "text/valid.en"], [first / "text/valid.de"]))
    )
    prepare(settings, lambda _: None)
    with pytest.raises(UserError, match=f"{other} has another vocabulary than {first}: prepare it again with --tok"):
        open_training_data(config.changed(data=(str(first), str(other))).corpora, config.batch, seed=config.seed)


def test_a_folder_without_pairs_is_refused(config: TrainConfig, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    shutil.copytree(config.corpora.data[0], empty)
    index = json.loads((empty / "index.json").read_text())
    index["train"]["shards"] = []
    np.save(empty / "lengths.npy", np.zeros((0, 2), dtype=np.uint16))
    index["train"]["lengths_sha256"] = sha256_of(empty / "lengths.npy")
    (empty / "index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=f"{empty} has no training pairs: prepare it again"):
        open_training_data(config.changed(data=(str(empty),)).corpora, config.batch, seed=config.seed)
