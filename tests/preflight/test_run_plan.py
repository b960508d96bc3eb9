"""A plan, and a run folder next to its plan; one that a real run wrote is read in tests/distributed/test_runs.py."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from dist_transformer.base.errors import UserError
from dist_transformer.config.plain import to_plain
from dist_transformer.config.presets import PRESETS
from dist_transformer.config.settings import EMBEDDED_CORPUS, TrainConfig
from dist_transformer.cost.hardware import Cluster
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.model.transformer import training_flops
from dist_transformer.preflight.run_plan import RunPlan, compare_run, plan_run, what_would_fit
from dist_transformer.training.engine.ds_config import load_ds_config
from tests.conftest import ROOT


def preset(name: str, **changes: Any) -> TrainConfig:
    return PRESETS[name].changed(data=EMBEDDED_CORPUS, **changes)


def plan(config: TrainConfig, ds_config: Path | None = None, **cluster: Any) -> RunPlan:
    return plan_run(config, Cluster(**cluster), load_ds_config(ds_config))


def with_batch(config: TrainConfig, **changes: Any) -> TrainConfig:
    return dataclasses.replace(config, batch=dataclasses.replace(config.batch, **changes))


def test_time_and_jobs_follow_from_the_step() -> None:
    found = plan(preset("big"), gpus=8, job_hours=1.0)
    assert found.step_time is not None
    hours = 300_000 * found.step_time.total / 3600
    assert found.hours == pytest.approx(hours)
    assert found.jobs == math.ceil(hours) > 1
    assert found.chosen.fits
    # Without a data folder.
    assert (found.work.vocab_sizes, found.work.source_budget, found.work.assumed) == ((37_000, 0), 392, True)
    # 64 packs of 392 target tokens, 99% full.
    assert found.target_tokens_per_second == pytest.approx(0.99 * 64 * 392 / found.step_time.total)


def test_rdrop_computes_every_token_twice() -> None:
    """Operations and activations are doubled, and a GPU takes half as many packs at once; communication stays."""
    plain = preset("big_large_batch")
    twice = plain.changed(optimizer=dataclasses.replace(plain.optimizer, rdrop_alpha=5.0))
    one, two = (plan(with_batch(config, packs_per_micro_batch=2), gpus=8) for config in (plain, twice))
    assert two.training_flops == 2 * one.training_flops
    assert two.chosen.memory.activations == 2 * one.chosen.memory.activations
    assert one.step_time is not None
    assert two.step_time is not None
    assert two.step_time.compute == pytest.approx(2 * one.step_time.compute)
    assert two.step_time.communication == one.step_time.communication
    assert two.target_tokens_per_step == one.target_tokens_per_step
    assert [plan(config, gpus=8).config.batch.packs_per_micro_batch for config in (plain, twice)] == [8, 4]


def test_disk_is_what_is_kept_and_one_more() -> None:
    """A run of 300 saves: 3 + 1 checkpoints of 12 bytes per parameter, 20 + 5 + 1 weight files of 4."""
    found = plan(preset("big"), gpus=8)
    assert found.disk_bytes == (4 * 12 + 26 * 4) * found.parameters
    few = plan(preset("big", max_steps=2000), gpus=8)
    assert few.disk_bytes == (3 * 12 + 3 * 4) * found.parameters


def test_a_moving_average_takes_four_bytes_more() -> None:
    """In memory, in each of 3 + 1 checkpoints, and as 3 + 1 files of its own."""
    plain, kept = plan(preset("big"), gpus=8), plan(preset("big", ema_decay=0.999), gpus=8)
    share = kept.chosen.memory.moments - plain.chosen.memory.moments
    assert share == pytest.approx(4 * kept.parameters / 8, rel=1e-6)
    assert kept.chosen.memory.resident - plain.chosen.memory.resident == share
    assert kept.disk_bytes == plain.disk_bytes + (4 * 4 + 4 * 4) * kept.parameters


def test_muon_has_one_moment_of_the_matrices() -> None:
    """`big` has 3·1024² + 1024² elements in each of 18 attentions, and 2 · 1024 · 4096 in each of 12 feed-forwards."""
    config = preset("big")
    muon = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, kind="muon"))
    adam, found, matrices = plan(config, gpus=8), plan(muon, gpus=8), 18 * 4 * 1024**2 + 12 * 8 * 1024**2
    assert adam.chosen.memory.moments - found.chosen.memory.moments == 4 * matrices / 8
    assert adam.disk_bytes - found.disk_bytes == 4 * 4 * matrices
    # DeepSpeed's CPU Adam would update them.
    assert any(stage.zero.offload_optimizer for stage in adam.stages)
    assert not any(stage.zero.offload_optimizer for stage in found.stages)
    with pytest.raises(UserError, match="offloads the optimizer to DeepSpeed's CPU Adam"):
        plan(muon, ROOT / "ds_configs/zero3_offload.json", gpus=8)


@pytest.mark.parametrize("machine", [{"gpu": "cpu", "gpus": 2}, {"ds_config": ROOT / "ds_configs/zero3_offload.json"}])
def test_a_cpu_and_offload_get_no_speed(machine: dict[str, Any]) -> None:
    found = plan(preset("base"), **machine)
    assert (found.step_time, found.target_tokens_per_second, found.hours, found.jobs) == (None, None, None, None)
    assert found.best is None
    assert all(stage.fits is None for stage in found.stages) == ("gpu" in machine)


def test_the_best_number_of_nodes_is_among_those_that_share_a_step() -> None:
    """64 packs: at most 8 nodes with 8 GPUs. One pack per GPU computes for 2 ms; the host needs 49 ms in any case."""
    found = plan(preset("big"), nodes=2, gpus=8).best
    assert found is not None
    assert (found.nodes, found.stage, max(found.seconds)) == (1, 2, 8)
    step = plan(preset("big"), nodes=2, gpus=8).step_time
    assert step is not None
    assert found.seconds[2] == step.total


def test_every_stage_is_there_once() -> None:
    names = ["ZeRO-0", "ZeRO-1", "ZeRO-2", "ZeRO-3", "ZeRO-3 offload"]
    for name in ("zero0", "zero1", "zero2", "zero3", "zero3_offload"):
        found = plan(preset("base"), ROOT / f"ds_configs/{name}.json")
        assert [stage.zero.name for stage in found.stages] == names
        assert found.chosen in found.stages
    assert plan(preset("base")).chosen.zero.stage == 1


def test_more_processes_than_packs_are_refused_with_the_remedy() -> None:
    with pytest.raises(UserError, match=r"packs_per_step is 64 but 128 processes were started: raise --batch"):
        plan(preset("big"), nodes=16, gpus=8)


def test_a_percentage_is_no_share() -> None:
    with pytest.raises(UserError, match=r"mfu is 40.0: it must be a share of the peak, above 0 and at most 1"):
        Cluster(mfu=40.0)


def big_with(**model: int) -> TrainConfig:
    return dataclasses.replace(preset("big"), model=dataclasses.replace(preset("big").model, head_width=64, **model))


FP32, V100 = preset("big", precision="fp32"), {"gpu": "v100-16"}
ZERO_0 = "--deepspeed-config ds_configs/zero0.json"


@pytest.mark.parametrize(
    ("config", "stage", "machine", "remedy"),
    [
        # States that fill a GPU alone, and not shared by eight: another stage.
        (big_with(width=2048, ffn_width=32_768), 0, {"gpu": "rtx3090", "gpus": 8}, ZERO_0.replace("0.", "1.")),
        # Then fewer packs at once.
        (
            with_batch(FP32, packs_per_micro_batch=64),
            1,
            V100,
            "--batch.packs-per-micro-batch 16 --batch.max-target-tokens 392 --batch.packs-per-step 64",
        ),
        # Then smaller packs, and as many tokens per step.
        (
            with_batch(FP32, max_target_tokens=32_768, packs_per_step=2),
            1,
            V100,
            f"--batch.packs-per-micro-batch 1 --batch.max-target-tokens 8192 --batch.packs-per-step 8 {ZERO_0}",
        ),
        (big_with(vocab_size=10_000_000, width=4096), 1, {"gpu": "rtx3090"}, None),
    ],
)
def test_the_smallest_change_that_fits_is_named(
    config: TrainConfig, stage: int, machine: dict[str, Any], remedy: str | None
) -> None:
    found = plan(config, ROOT / f"ds_configs/zero{stage}.json", **machine)
    assert found.chosen.fits is False
    assert what_would_fit(found) == remedy
    if remedy:
        flags = dict(zip(remedy.split()[::2], remedy.split()[1::2], strict=True))
        file = ROOT / flags.pop("--deepspeed-config", f"ds_configs/zero{stage}.json")
        batch = {name.removeprefix("--batch.").replace("-", "_"): int(value) for name, value in flags.items()}
        assert plan(with_batch(config, **batch), file, **machine).chosen.fits


def test_the_data_decides_vocabulary_budget_and_epochs(toy_data: DataFolder) -> None:
    config = PRESETS["tiny"].changed(data=(str(toy_data.path),))
    found = plan(config, gpu="cpu", gpus=2)
    index = toy_data.index
    ratio = index.train.source_tokens / index.train.target_tokens
    assert found.work.vocab_sizes == (index.vocab_size, 0)
    assert found.work.source_budget == math.ceil(1024 * ratio)
    assert 0.95 < found.work.fill <= 1
    assert found.epochs == pytest.approx(1000 * found.work.fill * 2 * 1024 / index.train.target_tokens)
    model = dataclasses.replace(config.model, vocab_size=index.vocab_size)
    source = round(found.work.fill * 2 * found.work.source_budget * 1000)
    target = round(found.work.fill * 2 * 1024 * 1000)
    assert found.training_flops == training_flops(model, source_tokens=source, target_tokens=target)


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
    (run_dir / "environment.json").write_text("[]")
    with pytest.raises(UserError, match="has not trained yet"):
        compared(run_dir)
    (run_dir / "metrics.jsonl").unlink()
    with pytest.raises(UserError, match=r"metrics.jsonl cannot be read"):
        compared(run_dir)
