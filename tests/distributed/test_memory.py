"""The planner's memory of states, against the tensors of real engines on one rank and two."""

import json
from pathlib import Path
from typing import Any

import pytest

from dist_transformer.cost.memory import ZeroSettings, model_sizes, predict_memory
from dist_transformer.training.engine.ds_config import load_ds_config
from tests.conftest import ROOT, run_ranks
from tests.distributed.worker_memory import cases, config_of

pytestmark = pytest.mark.slice(name="worlds")

WORLDS = (1, 2)
CASES = [(world, *case) for world in WORLDS for case in cases(world)]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    worker, out = Path(__file__).with_name("worker_memory.py"), tmp_path_factory.mktemp("memory")
    for world in WORLDS:
        run_ranks(world, worker, out / str(world))
    return {world: json.loads((out / str(world)).read_text()) for world in WORLDS}


@pytest.mark.parametrize(("world", "preset", "precision", "stage", "part"), CASES)
def test_states_are_predicted_to_a_tenth_and_are_all_there_is(
    measured: dict[int, dict[str, Any]], world: int, preset: str, precision: str, stage: int, part: str
) -> None:
    found = measured[world][f"{preset}-{precision}-{stage}-{part}"]
    zero = ZeroSettings.from_ds_config(load_ds_config(ROOT / "ds_configs" / f"zero{stage}.json"))
    config = config_of(preset, precision, stage, part, world)
    memory = predict_memory(config, zero, world_size=world, source_budget=config.batch.max_target_tokens)
    assert memory.resident == pytest.approx(found["between"], rel=0.1)
    stay = stage == 3 or (stage == 1 and precision == "bf16")
    gradients = 0 if stay else memory.gradients
    assert memory.resident + gradients == pytest.approx(found["before_update"], rel=0.1)
    # Below stage 3 the copies are gone before Adam runs: stage 0 has sent them, the others keep one of the two.
    update = memory.update if stage == 3 else 0
    assert memory.resident + gradients + update == pytest.approx(found["during_update"], rel=0.1)
    # All tensors of the process, found by the interpreter; the host has a copy of what is frozen, in fp32.
    sizes = model_sizes(config.model, zero, config.freeze)
    assert found["between"] + 4 * (sizes.parameters - sizes.trained) == pytest.approx(found["everything"], rel=0.01)
