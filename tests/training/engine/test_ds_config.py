import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from dist_transformer.base.errors import UserError
from dist_transformer.config.presets import PRESETS
from dist_transformer.config.settings import BatchConfig, OptimizerConfig
from dist_transformer.training.engine.ds_config import DEFAULT_ZERO, complete_ds_config, load_ds_config
from tests.conftest import ROOT

SHIPPED = ROOT / "ds_configs"
STAGES = {"zero0": 0, "zero1": 1, "zero2": 2, "zero3": 3, "zero3_offload": 3}

# Each key of ours and the flag that sets it.
OURS = {
    "train_batch_size": (16, "--batch.packs-per-step"),
    "train_micro_batch_size_per_gpu": (1, "--batch.packs-per-micro-batch"),
    "gradient_accumulation_steps": (2, "--batch.packs-per-step"),
    "optimizer": ({"type": "Adam"}, "--optimizer."),
    "scheduler": ({"type": "WarmupLR"}, "--optimizer.schedule"),
    "gradient_clipping": (1.0, "--optimizer.max-grad-norm"),
    "gradient_allreduce_op": ("mean", "the trainer"),
    "prescale_gradients": (True, "the trainer"),
    "gradient_predivide_factor": (2.0, "the trainer"),
    "bf16": ({"enabled": True}, "--precision"),
    "fp16": ({"enabled": True}, "--precision"),
    "amp": ({"enabled": True}, "--precision"),
    "torch_autocast": ({"enabled": True}, "--precision"),
    "data_types": ({"grad_accum_dtype": "fp32"}, "--precision"),
    "communication_data_type": ("bf16", "the trainer"),
    "steps_per_print": (10, "--log-every"),
    "timers": ({"throughput": {"enabled": True}}, "the trainer"),
    "tensorboard": ({"enabled": True}, "the run folder's tensorboard/"),
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "ds.json"


def load(file: Path, values: object) -> dict[str, Any]:
    file.write_text(json.dumps(values))
    return load_ds_config(file)


def test_every_shipped_config_loads() -> None:
    loaded = {path.stem: load_ds_config(path) for path in SHIPPED.glob("*.json")}
    assert {name: config["zero_optimization"]["stage"] for name, config in loaded.items()} == STAGES
    for name, config in loaded.items():
        assert config == json.loads((SHIPPED / f"{name}.json").read_text())
    devices = loaded["zero3_offload"]["zero_optimization"]
    assert devices["offload_optimizer"]["device"] == devices["offload_param"]["device"] == "cpu"


def test_the_default_is_the_shipped_stage_1() -> None:
    assert load_ds_config(Path("zero3")) == json.loads((SHIPPED / "zero3.json").read_text())
    assert load_ds_config(None) == load_ds_config(SHIPPED / "zero1.json") == {"zero_optimization": DEFAULT_ZERO}
    # A caller that changes its copy does not change the default.
    load_ds_config(None)["zero_optimization"]["stage"] = 3
    assert DEFAULT_ZERO["stage"] == 1


@pytest.mark.parametrize("key", OURS)
def test_a_key_of_ours_is_refused_with_its_flag(key: str, file: Path) -> None:
    value, flag = OURS[key]
    with pytest.raises(UserError) as refused:
        load(file, {"zero_optimization": {"stage": 1}, key: value})
    message = str(refused.value)
    assert str(file) in message
    assert f"'{key}' in {file} is set by {flag}" in message
    assert "remove it" in message


@pytest.mark.parametrize("key", ["zero_optimisation", "gradient_cliping", "train_batch_sizes", ""])
def test_an_unknown_key_is_refused_by_name(key: str, file: Path) -> None:
    with pytest.raises(UserError, match=f"unknown key '{key}': use one of .*zero_optimization"):
        load(file, {key: 1})


@pytest.mark.parametrize("key", ["stages", "overlap_com", "cpu_offload_everything"])
def test_an_unknown_key_of_zero_is_refused_by_name(key: str, file: Path) -> None:
    with pytest.raises(UserError, match=f"unknown key 'zero_optimization.{key}'"):
        load(file, {"zero_optimization": {"stage": 1, key: True}})


@pytest.mark.parametrize(
    ("values", "where"),
    [
        ({"zero_optimization": "auto"}, "zero_optimization"),
        ({"zero_optimization": {"stage": "auto"}}, r"zero_optimization\.stage"),
        ({"zero_optimization": {"stage": 1, "reduce_bucket_size": "auto"}}, r"zero_optimization\.reduce_bucket_size"),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "auto"}}},
            r"zero_optimization\.offload_param\.device",
        ),
        ({"memory_breakdown": "auto"}, "memory_breakdown"),
        ({"comms_logger": {"enabled": True, "prof_ops": ["all_reduce", "auto"]}}, r"comms_logger\.prof_ops"),
    ],
)
def test_auto_is_refused_with_its_path(values: dict[str, Any], where: str, file: Path) -> None:
    with pytest.raises(UserError, match=rf'^{where}\S* in \S*ds\.json is "auto".*write a value'):
        load(file, values)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        # It would replace that file.
        (
            {"flops_profiler": {"enabled": True, "output_file": "/etc/passwd"}},
            "FILE has the unknown key 'flops_profiler.output_file': use one of ",
        ),
        ({"comms_logger": {"log_file": "x"}}, "FILE has the unknown key 'comms_logger.log_file': use one of "),
    ],
)
def test_only_known_measurements_are_taken(values: dict[str, Any], said: str, file: Path) -> None:
    with pytest.raises(UserError) as refused:
        load(file, values)
    assert str(refused.value).startswith(said.replace("FILE", str(file)))


def test_measurements_are_passed_on(file: Path) -> None:
    given = {
        "comms_logger": {"enabled": True, "prof_ops": ["all_reduce"]},
        "flops_profiler": {"enabled": True, "recompute_fwd_factor": 0, "module_depth": 2},
        "wall_clock_breakdown": True,
    }
    assert load(file, given) == {**given, "zero_optimization": {"stage": 0}}


@pytest.mark.parametrize(
    ("zero", "where"),
    [
        ({"stage": "two"}, "stage"),
        ({"stage": 4}, "stage"),
        ({"stage": 1, "overlap_comm": "perhaps"}, "overlap_comm"),
        ({"stage": 1, "reduce_bucket_size": -5}, "reduce_bucket_size"),
        ({"stage": 1, "reduce_bucket_size": [1]}, "reduce_bucket_size"),
        ({"stage": 3, "offload_param": {"device": "moon"}}, r"offload_param\.device"),
    ],
)
def test_a_wrong_value_is_refused_with_its_path(zero: dict[str, Any], where: str, file: Path) -> None:
    with pytest.raises(UserError, match=rf"^in \S*ds\.json, zero_optimization\.{where}: "):
        load(file, {"zero_optimization": zero})


@pytest.mark.parametrize("zero", [1, [], "1", None])
def test_zero_optimization_must_be_an_object(zero: object, file: Path) -> None:
    with pytest.raises(UserError, match=r"^zero_optimization in \S*ds\.json must be an object such as"):
        load(file, {"zero_optimization": zero})


def test_no_zero_section_is_stage_0(file: Path) -> None:
    assert load(file, {"wall_clock_breakdown": True}) == {
        "wall_clock_breakdown": True,
        "zero_optimization": {"stage": 0},
    }


def test_a_missing_or_broken_file_is_named(file: Path) -> None:
    with pytest.raises(UserError, match=r"ds\.json does not exist"):
        load_ds_config(file)
    with pytest.raises(UserError, match=r"ds\.json must hold a JSON object"):
        load(file, [])


def test_deepspeeds_aliases_are_known(file: Path) -> None:
    zero = {"stage": 3, "stage3_prefetch_bucket_size": 5, "stage3_param_persistence_threshold": 7}
    assert load(file, {"zero_optimization": zero})["zero_optimization"] == zero


def test_our_keys_are_added_by_hand() -> None:
    config = dataclasses.replace(PRESETS["tiny"], batch=BatchConfig(packs_per_step=8, packs_per_micro_batch=2))
    user = {"zero_optimization": {"stage": 2}, "wall_clock_breakdown": True}
    assert complete_ds_config(user, config, 2) == {
        "zero_optimization": {"stage": 2},
        "wall_clock_breakdown": True,
        # DeepSpeed counts micro-batches: 2 ranks, each ceil(8 / (2 · 2)).
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.0,
        "gradient_allreduce_op": "sum",
        "bf16": {"enabled": True, "immediate_grad_update": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "steps_per_print": None,
        "timers": {"throughput": {"enabled": False}},
    }
    assert user == {"zero_optimization": {"stage": 2}, "wall_clock_breakdown": True}


@pytest.mark.parametrize(("name", "value"), [("compute_grad_norm", False), ("zenflow", {"topk_ratio": 0.1})])
def test_zero_without_a_norm_or_a_sum_is_refused(name: str, value: object, file: Path) -> None:
    """Without the norm, a step that is not finite would be taken."""
    with pytest.raises(UserError, match=rf"^zero_optimization\.{name} in \S*ds\.json .*: remove it"):
        load(file, {"zero_optimization": {"stage": 1, name: value}})


@pytest.mark.parametrize(("ranks", "overlaps"), [(1, False), (2, True)])
def test_one_rank_has_nothing_to_overlap_with(ranks: int, overlaps: bool) -> None:
    assert complete_ds_config(load_ds_config(None), PRESETS["base"], ranks)["zero_optimization"] == {
        **DEFAULT_ZERO,
        "overlap_comm": overlaps,
    }


def test_stage_3_averages_for_it_does_not_sum() -> None:
    completed = complete_ds_config({"zero_optimization": {"stage": 3}}, PRESETS["tiny"], 1)
    assert completed["gradient_allreduce_op"] == "mean"


@pytest.mark.parametrize("preset", PRESETS)
def test_clipping_is_always_written(preset: str) -> None:
    """DeepSpeed's own default is 1.0; the paper has none."""
    completed = complete_ds_config(load_ds_config(None), PRESETS[preset], 1)
    assert completed["gradient_clipping"] == (1.0 if preset == "finetune" else 0.0)
    clipped = dataclasses.replace(PRESETS[preset], optimizer=OptimizerConfig(max_grad_norm=0.5))
    assert complete_ds_config(load_ds_config(None), clipped, 1)["gradient_clipping"] == 0.5
    # `PlainAdam` clips at stage 0: DeepSpeed's own clipping would hide the norm.
    assert complete_ds_config({"zero_optimization": {"stage": 0}}, clipped, 1)["gradient_clipping"] == 0.0


def test_precision_is_written() -> None:
    fp32 = dataclasses.replace(PRESETS["tiny"], precision="fp32")
    for stage in range(4):
        user = {"zero_optimization": {"stage": stage}}
        assert not complete_ds_config(user, fp32, 1)["bf16"]["enabled"]
        # At stage 0 DeepSpeed would sum in bf16: the trainer's own optimizer rounds the weights.
        assert complete_ds_config(user, PRESETS["tiny"], 1)["bf16"]["enabled"] == (stage > 0)


def test_every_key_of_ours_is_refused_in_a_users_file(file: Path) -> None:
    """Otherwise `complete_ds_config` would overwrite a user's value without a message."""
    # The user's ZeRO options are completed, not replaced.
    written = set(complete_ds_config({}, PRESETS["tiny"], 1)) - {"zero_optimization"}
    assert written <= set(OURS)


def test_an_average_needs_weights_in_memory() -> None:
    user = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/scratch"}}}
    config = dataclasses.replace(PRESETS["tiny"], deepspeed_config=Path("nvme.json"), ema_decay=0.999)
    with pytest.raises(UserError, match=r"^ema_decay is 0.999, but nvme.json offloads .* or ema_decay to 0$"):
        complete_ds_config(user, config, 1)
    assert complete_ds_config(user, dataclasses.replace(config, ema_decay=0.0), 1)["zero_optimization"]["stage"] == 3
