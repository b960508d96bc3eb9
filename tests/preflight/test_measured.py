"""A run folder beside its plan; one that a real run wrote is read in tests/distributed/test_doctor.py."""

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
from dist_transformer.preflight.measured import Comparison, compare, read_run
from dist_transformer.preflight.plan import plan_run


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


def compared(run_dir: Path, **assumptions: Any) -> dict[str, Comparison]:
    run = read_run(run_dir)
    plan = plan_run(run.config, run.cluster(Cluster(**assumptions)), run.ds_config, run.workload())
    return {row.what: row for row in compare(plan, run)}


def test_what_was_measured_is_beside_what_is_predicted(run_dir: Path) -> None:
    rows = compared(run_dir)
    measured = {what: row.measured for what, row in rows.items()}
    assert measured == {
        "states between steps, per rank": 1024,
        "peak memory, per rank": 4096,
        "checkpoint": 1,
        "target tokens per second": 100_100,
        "step time": 500,
        "training FLOPs per step": 1000,
        # 300,000 steps of half a second.
        "all 300,000 steps": pytest.approx(300_000 / 7200),
    }
    assert all(row.predicted is not None and row.predicted > 0 for row in rows.values())


def test_the_assumptions_are_the_callers(run_dir: Path) -> None:
    slow, fast = (compared(run_dir, mfu=mfu)["target tokens per second"].predicted for mfu in (1e-4, 0.4))
    assert slow is not None
    assert fast is not None
    assert slow < fast


def test_the_cluster_is_the_runs(run_dir: Path) -> None:
    run = read_run(run_dir)
    cluster = run.cluster(Cluster(nodes=7, gpu="a10", job_hours=3.0))
    assert cluster == Cluster(nodes=2, gpus=8, gpu="h100", job_hours=3.0)
    assert run.workload().assumed
    assert run.workload().fill == 0.98


def test_on_a_cpu_no_speed_is_predicted(run_dir: Path) -> None:
    start = {"step": 0, "gpus": [], "hosts": 1, "world_size": 2, "processor": "CPU"}
    (run_dir / "environment.json").write_text(json.dumps([start]))
    rows = compared(run_dir)
    assert rows["target tokens per second"] == Comparison(
        what="target tokens per second", unit="", predicted=None, measured=100_100
    )
    assert rows["peak memory, per rank (with libraries)"].predicted is None
    # A run of an earlier version did not record it.
    assert rows["states between steps, per rank"].measured is None


def test_data_that_is_still_there_is_looked_at(run_dir: Path, toy_data: DataFolder) -> None:
    settings = json.loads((run_dir / "config.json").read_text())
    (run_dir / "config.json").write_text(json.dumps({**settings, "data": [str(toy_data.path)]}))
    work = read_run(run_dir).workload()
    assert not work.assumed
    assert work.corpus_target_tokens == toy_data.index.train.target_tokens


def test_folders_that_say_nothing_are_refused(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nothing/config.json does not exist"):
        read_run(tmp_path / "nothing")
    (run_dir / "environment.json").write_text("[]")
    with pytest.raises(UserError, match="has not trained yet"):
        read_run(run_dir)
    (run_dir / "metrics.jsonl").unlink()
    with pytest.raises(UserError, match=r"metrics.jsonl cannot be read"):
        read_run(run_dir)


def test_a_gpu_without_figures_is_refused(run_dir: Path) -> None:
    start = {"step": 0, "gpus": ["Tesla T4, 15 GiB"], "hosts": 1, "world_size": 1}
    (run_dir / "environment.json").write_text(json.dumps([start]))
    with pytest.raises(UserError, match="was trained on 'Tesla T4, 15 GiB', which is not in the GPU table"):
        read_run(run_dir)
