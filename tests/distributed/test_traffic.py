"""The planner's traffic of a step, compared with the collectives that DeepSpeed calls on two ranks."""

import dataclasses
import json
from pathlib import Path

import pytest

from dist_transformer.config.presets import PRESETS
from dist_transformer.cost.memory import ZeroSettings, model_sizes
from dist_transformer.cost.speed import traffic
from tests.conftest import run_ranks
from tests.distributed.worker_memory import VOCAB_SIZE
from tests.distributed.worker_traffic import CASES, MICRO_BATCHES

pytestmark = pytest.mark.slice(name="worlds")


def test_the_plan_counts_the_calls_and_bytes_of_real_ranks(tmp_path: Path) -> None:
    run_ranks(2, Path(__file__).with_name("worker_traffic.py"), tmp_path / "found")
    found = json.loads((tmp_path / "found").read_text())
    # One all-reduce and one all-gather; three passes around the ring.
    assert (found["stage 1"]["calls"], found["stage 1"]["passes"]) == (2, 3)
    # A save takes weights and both moments from both ranks, at stage 3 for each parameter.
    saves = {name: each["calls_of_a_save"] for name, each in found.items()}
    assert (saves["stage 0"], saves["stage 1"], saves["stage 1, fp32"], saves["stage 2"]) == (0, 6, 6, 6)
    assert saves["stage 3"] == 3 * found["stage 3"]["parameters"] > 3 * 50
    model = dataclasses.replace(PRESETS["tiny"].model, vocab_size=VOCAB_SIZE)
    for name, (precision, keys) in CASES.items():
        zero = ZeroSettings.from_ds_config({"zero_optimization": keys})
        planned = traffic(zero, model_sizes(model, zero), precision=precision, accumulation=MICRO_BATCHES)
        if name != "stage 3, few live":
            # There, the limit leaves room for smaller pieces only.
            assert planned.passes == found[name]["passes"], (name, planned, found[name])
        # Beside the plan: the norm, one number.
        assert planned.bytes == pytest.approx(found[name]["bytes"], abs=16), (name, planned, found[name])
