"""The preset that a preparation suggests."""

import json

import pytest

from dist_transformer.config.presets import PRESETS, preset_for
from tests.conftest import ROOT


@pytest.mark.parametrize(
    ("pairs", "on_gpu", "preset"),
    [
        (1, False, "tiny"),
        (29_000, False, "tiny"),
        (5_000_000, False, "tiny"),
        (9_999, True, "tiny"),
        (10_000, True, "multi30k"),
        (999_999, True, "multi30k"),
        (1_000_000, True, "base"),
        (5_000_000, True, "base"),
    ],
)
def test_the_preset_follows_the_pairs_and_the_machine(pairs: int, on_gpu: bool, preset: str) -> None:
    assert preset_for(pairs, on_gpu=on_gpu)[0] == preset
    assert preset in PRESETS


def test_a_larger_preset_is_named_where_the_text_is_enough_for_it() -> None:
    assert "multi30k" in preset_for(10_000, on_gpu=False)[1]
    assert "multi30k" not in preset_for(9_999, on_gpu=False)[1]


def test_the_stated_minutes_are_measured() -> None:
    demo = json.loads((ROOT / "results" / "demo.json").read_text("utf-8"))
    figures = demo["figures"]
    assert (figures["steps"], figures["world_size"]) == (PRESETS["tiny"].max_steps, 2)
    minutes = round(figures["train_seconds"] / 60)
    assert f"about {minutes} minutes on two CPU cores" in preset_for(1, on_gpu=False)[1]
