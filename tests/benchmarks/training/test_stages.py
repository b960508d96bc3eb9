"""ZeRO stages compared: what is sent is what the planner says, and the table shows it."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks.training.stages import StagesBenchmark, counted_collectives, stages_table
from dist_transformer.base.errors import UserError
from dist_transformer.config.presets import PRESETS
from dist_transformer.config.settings import TrainConfig
from dist_transformer.cost.memory import ZeroSettings, model_sizes
from dist_transformer.cost.speed import traffic
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.runtime.process_group import process_group
from dist_transformer.runtime.world import World
from tests.conftest import ROOT, run_command


def test_bytes_of_collectives_by_hand() -> None:
    """An all-reduce goes round twice, a gather and a scatter once; the larger tensor counts."""
    with process_group(World(), single=True):
        ten, whole = torch.ones(10), torch.empty(10)
        with counted_collectives() as sent:
            dist.all_reduce(ten)
            assert sent == [80]
            dist.all_gather_into_tensor(output_tensor=whole, input_tensor=ten)
            assert sent == [120]
        dist.all_reduce(ten)
        assert sent == [120]


def test_settings_that_cannot_be_measured() -> None:
    settings = StagesBenchmark(
        config=TrainConfig.of(data=("unused",), run_dir=Path("unused")),
        ds_configs=ROOT / "ds_configs",
        ranks=2,
        micro_batches=(1,),
        steps=1,
        rounds=1,
    )
    with pytest.raises(UserError, match="--ranks is 1: give 2 or more"):
        dataclasses.replace(settings, ranks=1)
    with pytest.raises(UserError, match="--micro-batches has 0: give numbers above 0"):
        dataclasses.replace(settings, micro_batches=(1, 0))


@pytest.mark.slice(name="benchmarks")
def test_real_stages_send_what_the_planner_counts(toy_data: DataFolder, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "tools/benchmark.py",
        "stages",
        "--data",
        toy_data.path,
        "--steps",
        "1",
        "--rounds",
        "1",
        "--micro-batches",
        "1",
        "3",
        "--json",
        tmp_path / "s.json",
        "--",
        "--model.width",
        "32",
        "--model.heads",
        "2",
        "--batch.max-target-tokens",
        "256",
    ]
    output = run_command(*command)
    figures = json.loads((tmp_path / "s.json").read_text())["figures"]
    vocab_size = toy_data.index.vocab_size
    model = dataclasses.replace(PRESETS["tiny"].model, width=32, heads=2, vocab_size=vocab_size)
    for micro_batches in (1, 3):
        for stage in range(4):
            zero = ZeroSettings(stage=stage)
            sizes = model_sizes(model, zero)
            wanted = traffic(zero, sizes, precision="bf16", accumulation=micro_batches, backend="nccl").bytes
            # Partitions are padded, and the norm is summed.
            found = figures["cases"][f"{micro_batches}/{stage}"]["sent"]
            assert found == pytest.approx(wanted / sizes.parameters, rel=0.01)
    # Stage 0 keeps 4 + 8 bytes of masters and moments, stage 1 half of them; constants count in both.
    states = [figures["cases"][f"3/{stage}"]["state"] for stage in (0, 1)]
    assert states[0] - states[1] == pytest.approx(6, rel=0.1)
    assert stages_table(figures) in output
