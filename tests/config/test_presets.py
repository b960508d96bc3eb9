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
        (10_000, False, "multi30k"),
        (5_000_000, False, "multi30k"),
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
    demo = json.loads((results / "demo.json").read_text("utf-8"))["figures"]
    assert (demo["steps"], demo["world_size"]) == (PRESETS["tiny"].max_steps, 2)
    minutes = f"about {round(demo['train_seconds'] / 60)} minutes"
    hours = round(json.loads((results / "multi30k.json").read_text("utf-8"))["wall_seconds"] / 3600)
    assert preset_for(1, on_gpu=False)[1].endswith(f", {minutes} on two CPU cores")
    assert preset_for(10_000, on_gpu=False)[1] == (
        f"takes about {hours} hours on two CPU cores; for a first try, tiny takes {minutes}"
    )
    assert "CPU" not in preset_for(1, on_gpu=True)[1] + preset_for(10_000, on_gpu=True)[1]
