import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from dist_transformer.base.errors import UserError
from dist_transformer.config.presets import PRESETS
from dist_transformer.config.settings import EMBEDDED_CORPUS, TrainConfig
from dist_transformer.cost.hardware import Cluster
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.model.transformer import training_flops
from dist_transformer.preflight.run_plan import RunPlan, plan_run, what_would_fit
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


def test_a_cpu_gets_no_speed() -> None:
    found = plan(preset("base"), gpu="cpu", gpus=2)
    assert (found.step_time, found.target_tokens_per_second, found.hours, found.jobs) == (None, None, None, None)
    assert all(stage.fits is None for stage in found.stages)


def test_offload_gets_no_speed() -> None:
    found = plan(preset("base"), ROOT / "ds_configs/zero3_offload.json")
    assert found.chosen.zero.offload_optimizer
    assert found.step_time is None


def test_the_best_number_of_nodes_is_among_those_that_share_a_step() -> None:
    """64 packs: at most 8 nodes with 8 GPUs. One pack per GPU computes for 2 ms; the host needs 49 ms in any case."""
    found = plan(preset("big"), nodes=2, gpus=8).best
    assert found is not None
    assert (found.nodes, found.stage, max(found.seconds)) == (1, 2, 8)
    step = plan(preset("big"), nodes=2, gpus=8).step_time
    assert step is not None
    assert found.seconds[2] == step.total
    assert plan(preset("base"), gpu="cpu").best is None
    assert plan(preset("base"), ROOT / "ds_configs/zero3_offload.json").best is None


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


def test_wrong_numbers_are_refused_by_name() -> None:
    with pytest.raises(UserError, match="nodes is 0: it must be above 0"):
        Cluster(nodes=0)
    with pytest.raises(UserError, match=r"mfu is 40.0: it must be a share of the peak, above 0 and at most 1"):
        Cluster(mfu=40.0)


def test_another_stage_is_named_first() -> None:
    """A model whose states fill a GPU alone, and not shared by eight."""
    config = preset("big")
    config = dataclasses.replace(
        config, model=dataclasses.replace(config.model, width=2048, ffn_width=32_768, head_width=64)
    )
    found = plan(config, ROOT / "ds_configs/zero0.json", gpu="rtx3090", gpus=8)
    assert found.chosen.fits is False
    assert what_would_fit(found) == "--deepspeed-config ds_configs/zero1.json"


def test_then_fewer_packs_at_once() -> None:
    config = with_batch(preset("big", precision="fp32"), packs_per_micro_batch=64)
    found = plan(config, gpu="v100-16")
    assert found.chosen.fits is False
    assert what_would_fit(found) == (
        "--batch.packs-per-micro-batch 16 --batch.max-target-tokens 392 --batch.packs-per-step 64"
    )
    assert plan(with_batch(config, packs_per_micro_batch=16), gpu="v100-16").chosen.fits


def test_then_smaller_packs_and_as_many_tokens_a_step() -> None:
    config = with_batch(preset("big", precision="fp32"), max_target_tokens=32_768, packs_per_step=2)
    found = plan(config, gpu="v100-16")
    flags = what_would_fit(found)
    assert flags == (
        "--batch.packs-per-micro-batch 1 --batch.max-target-tokens 8192 --batch.packs-per-step 8 "
        "--deepspeed-config ds_configs/zero0.json"
    )
    smaller = with_batch(config, max_target_tokens=8192, packs_per_step=8)
    assert plan(smaller, ROOT / "ds_configs/zero0.json", gpu="v100-16").chosen.fits


def test_when_nothing_helps_nothing_is_named() -> None:
    config = preset("big")
    config = dataclasses.replace(
        config, model=dataclasses.replace(config.model, vocab_size=10_000_000, width=4096, head_width=64)
    )
    found = plan(config, gpu="rtx3090")
    assert found.chosen.fits is False
    assert what_would_fit(found) is None


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
