"""A run folder next to its plan; one that a real run wrote is read in tests/distributed/test_doctor.py."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from dist_transformer.base.errors import UserError
from dist_transformer.config.plain import to_plain
from dist_transformer.config.presets import PRESETS
from dist_transformer.cost.hardware import Cluster
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.preflight.run_plan import RunPlan, compare_run


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Big on two nodes of eight H100, 100 steps of 0.5 s, as its three files tell."""
    config = PRESETS["big"].changed(data=("gone",))
    batch = dataclasses.replace(config.batch, packs_per_step=16)
    config = dataclasses.replace(config, batch=batch, model=dataclasses.replace(config.model, vocab_size=37_000))
    settings = {**to_plain(config), "data_sha256": ["0"], "deepspeed": {"zero_optimization": {"stage": 1}}}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    start = {"step": 0, "gpus": ["NVIDIA H100 80GB HBM3, 79 GiB"] * 8, "hosts": 2, "world_size": 16}
    (tmp_path / "environment.json").write_text(json.dumps([{**start, "state_bytes": 2**30}]))
    records = [
        {
            "kind": "train",
            "step": step,
            "train_seconds": step / 2,
            "target_tokens_per_second": 100_000 + step,
            "fill": 0.98,
            "training_flops": step * 10**12,
            "peak_memory_bytes": 4 * 2**30,
        }
        for step in (50, 100)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    checkpoint = tmp_path / "checkpoints" / "step-00000100"
    checkpoint.mkdir(parents=True)
    (checkpoint / "part-00000.safetensors").write_bytes(bytes(2**20))
    return tmp_path


def compared(run_dir: Path) -> tuple[RunPlan, dict[str, tuple[float | None, float | None]]]:
    """The plan, and what is predicted and measured."""
    plan, rows = compare_run(run_dir)
    return plan, {row.what: (row.predicted, row.measured) for row in rows}


def start_with(run_dir: Path, **start: Any) -> None:
    (run_dir / "environment.json").write_text(json.dumps([{"step": 0, "hosts": 1, **start}]))


def test_what_was_measured_is_next_to_what_is_predicted(run_dir: Path) -> None:
    plan, rows = compared(run_dir)
    assert plan.cluster == Cluster(nodes=2, gpus=8, gpu="h100")
    assert (plan.work.assumed, plan.work.fill) == (True, 0.98)
    assert {what: measured for what, (_, measured) in rows.items()} == {
        "states between steps, per rank": 1024,
        "peak memory, per rank": 4096,
        "checkpoint": 1,
        "target tokens per second": 100_100,
        "step time": 500,
        "training FLOPs per step": 1000,
        # 300,000 steps of half a second.
        "all 300,000 steps": pytest.approx(300_000 / 7200),
    }
    assert plan.step_time is not None
    assert {what: predicted for what, (predicted, _) in rows.items()} == {
        "states between steps, per rank": plan.chosen.memory.resident / 2**20,
        "peak memory, per rank": plan.chosen.memory.peak / 2**20,
        "checkpoint": plan.checkpoint_bytes / 2**20,
        "target tokens per second": plan.target_tokens_per_second,
        "step time": 1000 * plan.step_time.total,
        "training FLOPs per step": plan.training_flops / 300_000 / 1e9,
        "all 300,000 steps": plan.hours,
    }


def test_on_a_cpu_no_speed_is_predicted(run_dir: Path) -> None:
    start_with(run_dir, gpus=[], world_size=2)
    _, rows = compared(run_dir)
    assert rows["target tokens per second"] == (None, 100_100)
    assert rows["peak memory, per rank (with libraries)"] == (None, 4096)
    # A run of an earlier version did not record it.
    assert rows["states between steps, per rank"][1] is None


def test_data_that_is_still_there_is_looked_at(run_dir: Path, toy_data: DataFolder) -> None:
    settings = json.loads((run_dir / "config.json").read_text())
    (run_dir / "config.json").write_text(json.dumps({**settings, "data": [str(toy_data.path)]}))
    work = compared(run_dir)[0].work
    assert not work.assumed
    assert work.corpus_target_tokens == toy_data.index.train.target_tokens


def test_folders_without_measurements_are_refused(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nothing/config.json does not exist"):
        compared(tmp_path / "nothing")
    start_with(run_dir, gpus=["Tesla T4, 15 GiB"], world_size=1)
    with pytest.raises(UserError, match="was trained on 'Tesla T4, 15 GiB', which is not in the GPU table"):
        compared(run_dir)
    for lost in ("metrics.jsonl", "environment.json"):
        (run_dir / lost).rename(run_dir / "lost")
        with pytest.raises(UserError, match="has not trained yet"):
            compared(run_dir)
        (run_dir / "lost").rename(run_dir / lost)
