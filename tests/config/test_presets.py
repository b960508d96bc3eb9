"""The preset that a preparation suggests."""

import json

import pytest

from dist_transformer.config.presets import PRESETS, preset_for
from tests.conftest import ROOT


@pytest.mark.parametrize(
    ("pairs", "on_gpu", "preset"),
    [
        (1, False, "tiny"),
        (9_999, False, "tiny"),
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


def test_the_stated_times_are_measured() -> None:
    results = ROOT / "results"
    demo = json.loads((results / "speed/demo.json").read_text("utf-8"))["figures"]
    assert (demo["steps"], demo["world_size"]) == (PRESETS["tiny"].max_steps, 2)
    minutes = f"about {round(demo['train_seconds'] / 60)} minutes"
    hours = round(json.loads((results / "quality/multi30k.json").read_text("utf-8"))["wall_seconds"] / 3600)
    for pairs, better in ((9_999, ""), (10_000, f"; multi30k translates better, and takes about {hours} hours")):
        assert preset_for(pairs, on_gpu=False)[1] == f"takes {minutes} on two CPU cores{better}"
    assert "CPU" not in preset_for(1, on_gpu=True)[1] + preset_for(10_000, on_gpu=True)[1]
