"""tools/batch_order.py: the three orders, and the figures on a made-up curve."""

import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.studies.batch_order import Curve, cut_by_length, explain, orders, settings_of
from dist_transformer.config.plain import read_json
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.data.loading.packing import Budgets
from tests.conftest import run_command

pytestmark = pytest.mark.slice(name="benchmarks")


def test_packs_are_cut_where_a_budget_is_full() -> None:
    """Computed by hand: budgets of 10 source and 8 target tokens, 3 pairs."""
    lengths = np.array([(2, 5), (9, 3), (1, 1), (3, 2), (2, 2), (1, 1), (1, 9), (11, 1)])
    packs = cut_by_length(lengths, Budgets(max_source_tokens=10, max_target_tokens=8, max_sentences=3))
    # Sorted by target, then source: 2 and 5 (1, 1), 4 (2, 2), 3 (3, 2), 1 (9, 3), 0 (2, 5). Pairs 6 and 7 fit nothing.
    assert [pack.pair_ids.tolist() for pack in packs] == [[2, 5, 4], [3], [1], [0]]
    assert [(pack.source_tokens, pack.target_tokens) for pack in packs] == [(4, 4), (3, 2), (9, 3), (2, 5)]


@pytest.mark.parametrize("name", ["sorted", "random", "buckets"])
def test_every_order_visits_every_pair_once_an_epoch(name: str, toy_data: DataFolder) -> None:
    config, budgets = settings_of(toy_data, "tiny", seed=1, precision="bf16")
    order = orders(toy_data.train, budgets, config)[name]
    epochs = [[pack.pair_ids for step in order(epoch) for pack in step.packs if pack] for epoch in (0, 1)]
    for packs in epochs:
        assert sorted(np.concatenate(packs).tolist()) == list(range(toy_data.index.train.pairs))
    same = [a.tolist() == b.tolist() for a, b in zip(*epochs, strict=False)]
    assert all(same) if name == "sorted" else not all(same)
    members = [{frozenset(pack.tolist()) for pack in packs} for packs in epochs]
    assert (members[0] == members[1]) == (name != "random")


def test_figures_of_a_sawtooth() -> None:
    lengths = np.tile([10.0, 20.0, 30.0, 40.0, 50.0], 6)
    epoch = np.repeat(np.arange(6), 5)
    sawtooth = explain(Curve(epoch=epoch, loss=5 + 0.1 * lengths, pair_tokens=lengths))
    assert sawtooth["steps_per_epoch"] == 5
    assert sawtooth["correlation_of_loss_and_length"] == pytest.approx(1)
    assert sawtooth["jump_between_epochs"] == pytest.approx(-4)
    # Steps 2 to 27: two epochs are seen in part, 3 values each (-0, 1, 2 and -2, -1, 0), the others whole.
    assert sawtooth["within_epoch_range"] == pytest.approx((4 * 4 + 2 * 2) / 6)
    # Of the sawtooth's steps 4 of 5 rise by one and one falls by 4, without a mean: their deviation ÷ √2.
    assert sawtooth["neighbour_std"] == pytest.approx(2**0.5, rel=0.05)


def test_the_tool_writes_figures_and_picture(tmp_path: Path) -> None:
    data = tmp_path / "data"
    run_command(sys.executable, "tools/prepare_data.py", "--toy", 250, "--vocab-size", 400, "--out", data)
    command = [sys.executable, "tools/batch_order.py", "--data", data, "--out", tmp_path / "out"]
    run_command(*command, "--preset", "tiny", "--epochs", 2)
    result = read_json(tmp_path / "out" / "batch_order.json")
    assert list(result["curves"]) == list(result["figures"]) == ["sorted", "random", "buckets"]
    assert (tmp_path / "out" / "batch_order.png").stat().st_size > 10_000
    output = run_command(*command, "--epochs", 1, status=1)
    assert output.startswith("error: --epochs is 1: it must be 2 or more")
