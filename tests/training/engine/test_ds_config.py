import dataclasses
import json
import re
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


def test_a_key_of_ours_is_refused_with_its_flag(file: Path) -> None:
    """Also each that `complete_ds_config` writes: it would replace a user's value without a message."""
    # The user's ZeRO options are completed, not replaced.
    written = complete_ds_config({}, PRESETS["tiny"], 1).keys() - {"zero_optimization"}
    for key in written | {"optimizer", "scheduler", "fp16", "amp", "tensorboard", "prescale_gradients"}:
        with pytest.raises(UserError, match=rf"^'{key}' in \S*ds\.json is set by .*: remove it from this file$"):
            load(file, {"zero_optimization": {"stage": 1}, key: 1})
    for key, flag in (("train_batch_size", "--batch.packs-per-step"), ("bf16", "--precision")):
        with pytest.raises(UserError, match=f" is set by {flag}: "):
            load(file, {key: 1})


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"gradient_cliping": 1}, "FILE has the unknown key 'gradient_cliping': use one of .*zero_optimization"),
        ({"zero_optimization": {"stages": 1}}, "FILE has the unknown key 'zero_optimization.stages'"),
        # It would replace that file.
        (
            {"flops_profiler": {"enabled": True, "output_file": "/etc/passwd"}},
            "FILE has the unknown key 'flops_profiler.output_file': use one of ",
        ),
        ({"zero_optimization": "auto"}, 'zero_optimization in FILE is "auto".*write a value'),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "auto"}}},
            r'zero_optimization\.offload_param\.device in FILE is "auto"',
        ),
        (
            {"comms_logger": {"enabled": True, "prof_ops": ["all_reduce", "auto"]}},
            r"comms_logger\.prof_ops\[1\] in FILE",
        ),
        ({"zero_optimization": {"stage": 4}}, "in FILE, zero_optimization.stage: "),
        ({"zero_optimization": {"stage": 1, "overlap_comm": "perhaps"}}, "in FILE, zero_optimization.overlap_comm: "),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "moon"}}},
            r"in FILE, zero_optimization\.offload_param\.device: ",
        ),
        ({"zero_optimization": [1]}, "zero_optimization in FILE must be an object such as"),
        # Without the norm, a step that is not finite would be taken.
        (
            {"zero_optimization": {"stage": 1, "compute_grad_norm": False}},
            "zero_optimization.compute_grad_norm in FILE .*: remove it",
        ),
        (
            {"zero_optimization": {"stage": 1, "zenflow": {"topk_ratio": 0.1}}},
            "zero_optimization.zenflow in FILE .*: remove it",
        ),
        ([], "FILE must hold a JSON object"),
    ],
)
def test_what_is_wrong_is_named_with_its_path(values: object, said: str, file: Path) -> None:
    with pytest.raises(UserError, match="^" + said.replace("FILE", re.escape(str(file)))):
        load(file, values)


def test_a_name_twice_is_refused(file: Path) -> None:
    file.write_text('{"zero_optimization": {"stage": 3}, "zero_optimization": {"stage": 1}}')
    with pytest.raises(UserError, match=r"an object has the name 'zero_optimization' twice"):
        load_ds_config(file)


def test_measurements_are_passed_on(file: Path) -> None:
    given = {
        "comms_logger": {"enabled": True, "prof_ops": ["all_reduce"]},
        "flops_profiler": {"enabled": True, "recompute_fwd_factor": 0, "module_depth": 2},
        "wall_clock_breakdown": True,
    }
    assert load(file, given) == {**given, "zero_optimization": {"stage": 0}}


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


def test_an_average_needs_weights_in_memory() -> None:
    user = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/scratch"}}}
    config = dataclasses.replace(PRESETS["tiny"], deepspeed_config=Path("nvme.json"), ema_decay=0.999)
    with pytest.raises(UserError, match=r"^ema_decay is 0.999, but nvme.json offloads .* or ema_decay to 0$"):
        complete_ds_config(user, config, 1)
    assert complete_ds_config(user, dataclasses.replace(config, ema_decay=0.0), 1)["zero_optimization"]["stage"] == 3
