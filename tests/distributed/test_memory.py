"""The planner's memory of states, against the tensors of real engines on one rank and two."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from dist_transformer.config.presets import PRESETS
from dist_transformer.config.settings import BatchConfig
from dist_transformer.cost.memory import ZeroSettings, model_sizes, predict_memory
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.run.layout import read_records
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
    assert memory.saving == pytest.approx(found["at_a_save"], rel=0.1)
    # All tensors of the process, found by the interpreter; the host has a copy of what is frozen, in fp32.
    sizes = model_sizes(config.model, zero, config.freeze)
    assert found["between"] + 4 * (sizes.parameters - sizes.trained) == pytest.approx(found["everything"], rel=0.01)


def test_the_first_step_on_a_cpu_takes_what_the_plan_says(toy_data: DataFolder, tmp_path: Path) -> None:
    """The peak of the process, from its start on: 18 bytes per parameter of `base`."""
    places = ("--preset", "base", "--data", toy_data.path, "--run-dir", tmp_path / "run", "--precision", "bf16")
    batch = ("--batch.max-target-tokens", 128, "--batch.packs-per-step", 1, "--ema-decay", 0)
    brief = ("--max-steps", 1, "--log-every", 1, "--validate-every", 0)
    run_ranks(1, "-m", "dist_transformer.train", *places, *batch, *brief)
    (record,) = read_records(tmp_path / "run", "train")
    config = PRESETS["base"].changed(
        model=dataclasses.replace(PRESETS["base"].model, vocab_size=toy_data.index.vocab_size),
        batch=BatchConfig(max_target_tokens=128, packs_per_step=1),
        precision="bf16",
        ema_decay=0.0,
    )
    plan = predict_memory(config, ZeroSettings(stage=1), world_size=1, source_budget=128, on_cpu=True)
    assert record["peak_memory_bytes"] == pytest.approx(plan.needed, rel=0.1)
