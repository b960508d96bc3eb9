"""The model of a step on a GPU, by hand."""

from pathlib import Path

import pytest

from benchmarks.training.cost_model import (
    ATTENTION,
    ELEMENTWISE,
    LAUNCH_SECONDS,
    PRODUCTS,
    UPDATE,
    Counted,
    cost_model_table,
    predict,
)
from dist_transformer.base.errors import UserError

COUNTED = Counted(launches=1_000, bytes_a_logit=4.0)


def test_big_on_an_h100_by_hand() -> None:
    found = predict("big", "h100", tokens=10_000, micro_batches=1, counted=COUNTED)
    # 1.289 GFLOP a pair of tokens; 18 attentions of 24 · 1,024 bytes; 214 million parameters, of 48 bytes each.
    # Elementwise: 6 · (36,864 + 40,960 + 18,432) + 6 · (55,296 + 40,960 + 18,432 + 4,096), and 4 · 37,000 for logits.
    expected = {
        "matrix products": 12.89e12 / (989e12 * PRODUCTS),
        "attention": 18 * 24 * 1024 * 1e4 / (3.35e12 * ATTENTION),
        "elementwise work": (6 * 96_256 + 6 * 118_784 + 148_000) * 1e4 / (3.35e12 * ELEMENTWISE),
        "gradients and update": 214.2e6 * 48 / (3.35e12 * UPDATE),
    }
    assert found["milliseconds"] == pytest.approx({name: 1e3 * value for name, value in expected.items()}, rel=0.01)
    assert found["host_milliseconds"] == pytest.approx(1e6 * LAUNCH_SECONDS)
    slower = max(sum(expected.values()), 1e3 * LAUNCH_SECONDS)
    assert found["target_tokens_per_second"] == pytest.approx(1e4 / slower, rel=0.01)


def test_small_micro_batches_wait_for_the_host() -> None:
    eight = predict("base", "h200", tokens=25_088, micro_batches=8, counted=COUNTED)
    assert eight["target_tokens_per_second"] == pytest.approx(25_088 / (8_000 * LAUNCH_SECONDS))
    table = cost_model_table({"steps": [eight], "launches": 1_000})
    assert table.startswith("a model, not a measurement")
    assert "base on one h200, 8 micro-batch(es): 69,689" in table


def test_what_cannot_be_modelled_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^null-gpu.json does not exist: count launches with make null-gpu first$"):
        Counted.read(tmp_path / "null-gpu.json")
    with pytest.raises(UserError, match="--device cpu is measured, not modelled: leave --device out"):
        predict("base", "cpu", tokens=1, micro_batches=1, counted=COUNTED)
    with pytest.raises(UserError, match="h300 is unknown"):
        predict("base", "h300", tokens=1, micro_batches=1, counted=COUNTED)
