"""The DeepSpeed config: check the user's JSON, and add the keys that the project owns.

DeepSpeed ignores misspelt keys and reads "auto" as off; here both are errors. Batch sizes, accumulation, optimizer,
scheduler, clipping and precision are set in one place only: the run's own settings.
"""

from pathlib import Path
from typing import Any

from dist_transformer.base.errors import UserError
from dist_transformer.config.plain import read_json
from dist_transformer.config.settings import TrainConfig
from dist_transformer.training.engine import internals

DEFAULT_ZERO: dict[str, Any] = {
    "stage": 1,
    "overlap_comm": True,
    "contiguous_gradients": True,
    "reduce_scatter": True,
    "reduce_bucket_size": 25_000_000,
}

_OURS = {
    "train_batch_size": "--batch.packs-per-step",
    "train_micro_batch_size_per_gpu": "--batch.packs-per-micro-batch",
    "gradient_accumulation_steps": "--batch.packs-per-step",
    "optimizer": "--optimizer.*",
    "scheduler": "--optimizer.schedule",
    "gradient_clipping": "--optimizer.max-grad-norm",
    "gradient_allreduce_op": "the trainer, which sums gradients",
    "prescale_gradients": "the trainer, which sums gradients",
    "gradient_predivide_factor": "the trainer, which sums gradients",
    "bf16": "--precision",
    "fp16": "--precision",
    "amp": "--precision",
    "torch_autocast": "--precision",
    "data_types": "--precision",
    "communication_data_type": "the trainer, which sums gradients in fp32",
    "steps_per_print": "--log-every",
    "timers": "the trainer, which reports the speed itself",
    "tensorboard": "the run folder's tensorboard/, which is always written",
}
# Measurements of DeepSpeed's own. What would write a file is left out: a config may come from a stranger.
_MEASUREMENTS = {
    "comms_logger": {"enabled", "verbose", "prof_all", "prof_ops", "debug"},
    "flops_profiler": {
        "enabled",
        "recompute_fwd_factor",
        "profile_step",
        "module_depth",
        "top_modules",
        "detailed",
    },
    "aio": {"block_size", "queue_depth", "intra_op_parallelism", "single_submit", "overlap_events", "use_gds"},
}
_ALLOWED = {"zero_optimization", "wall_clock_breakdown", "memory_breakdown", *_MEASUREMENTS}


def load_ds_config(path: Path | None) -> dict[str, Any]:
    """Read and check the user's part of the DeepSpeed config.

    Args:
        path: a file, or the name of a shipped config: zero0, zero1, zero2, zero3, zero3_offload.

    Raises:
        UserError: a key that this project owns, an unknown key, or an "auto" value; the error names it and the file.
    """
    if path is None:
        return {"zero_optimization": dict(DEFAULT_ZERO)}
    path = _shipped().get(str(path), path)
    config = read_json(path)
    for key in config:
        if key in _OURS:
            raise UserError(f"{key!r} in {path} is set by {_OURS[key]}: remove it from this file")
        if key not in _ALLOWED:
            raise UserError(f"{path} has the unknown key {key!r:.60}: use one of {', '.join(sorted(_ALLOWED))}")
    _refuse_auto(config, path, "")
    for key, known in _MEASUREMENTS.items():
        if unknown := sorted(config.get(key, {}).keys() - known):
            name = f"{key}.{unknown[0]}"
            raise UserError(f"{path} has the unknown key {name!r:.80}: use one of {', '.join(sorted(known))}")
    _check_zero(config.setdefault("zero_optimization", {"stage": 0}), path)
    return config


def _shipped() -> dict[str, Path]:
    """Find the files of `ds_configs/` by name: in an installed package, or next to the package of a clone."""
    package = Path(__file__).resolve().parents[2]
    places = (package / "ds_configs", package.parent / "ds_configs")
    return {file.stem: file for place in places for file in place.glob("*.json")}


def _refuse_auto(value: Any, path: Path, where: str) -> None:
    if value == "auto":
        raise UserError(f'{where} in {path} is "auto", which DeepSpeed reads as off: write a value')
    if isinstance(value, dict):
        for key, inner in value.items():
            _refuse_auto(inner, path, f"{where}.{key}" if where else key)
    if isinstance(value, list):
        for index, inner in enumerate(value):
            _refuse_auto(inner, path, f"{where}[{index}]")


def _check_zero(zero: Any, path: Path) -> None:
    if not isinstance(zero, dict):
        raise UserError(f"zero_optimization in {path} must be an object such as {{'stage': 1}}")
    unknown = sorted(set(zero) - internals.zero_keys())
    if unknown:
        raise UserError(f"{path} has the unknown key 'zero_optimization.{unknown[0]}': see DeepSpeed's ZeRO options")
    if zero.get("compute_grad_norm") is False:
        raise UserError(
            f"zero_optimization.compute_grad_norm in {path} is false, "
            "but the norm shows whether a step is finite: remove it"
        )
    if zero.get("zenflow"):
        raise UserError(f"zero_optimization.zenflow in {path} does not sum gradients, as the trainer does: remove it")
    if problem := internals.zero_problem(zero):
        raise UserError(f"in {path}, zero_optimization.{problem}")


def require_fitting(user: dict[str, Any], config: TrainConfig) -> None:
    """Check that a config can do what the run's settings ask for.

    Raises:
        UserError: a moving average is wanted, but weights are on NVMe between steps, where it cannot be kept; or Muon,
            but DeepSpeed's CPU Adam would update the weights.
    """
    offload = user.get("zero_optimization", {}).get("offload_optimizer") or {}
    if config.optimizer.kind == "muon" and offload.get("device", "none") != "none":
        raise UserError(
            f"optimizer.kind is muon, but {config.deepspeed_config} offloads the optimizer to DeepSpeed's CPU Adam: "
            "use a DeepSpeed config without offload_optimizer, or --optimizer.kind adam"
        )
    if config.ema_decay > 0 and offload.get("device") == "nvme":
        raise UserError(
            f"ema_decay is {config.ema_decay}, but {config.deepspeed_config} offloads the optimizer to nvme: set "
            'offload_optimizer.device to "cpu", or ema_decay to 0'
        )


def complete_ds_config(user: dict[str, Any], config: TrainConfig, world_size: int) -> dict[str, Any]:
    """Add the keys that the project owns. Clipping is always written, because DeepSpeed's default is 1.0.

    Raises:
        UserError: as `require_fitting`.
    """
    require_fitting(user, config)
    accumulation = config.batch.accumulation_steps(world_size)
    stage = user.get("zero_optimization", {}).get("stage", 0)
    # At stage 0, `PlainAdam` handles bf16 and clipping: DeepSpeed sees a plain fp32 optimizer.
    bf16 = config.arithmetic == "bf16" and stage > 0
    zero = dict(user.get("zero_optimization", {}))
    if world_size == 1:
        # There is nothing to overlap with, and DeepSpeed would wait for the device at each reduction.
        zero["overlap_comm"] = False
    return {
        **user,
        "zero_optimization": zero,
        "train_batch_size": world_size * accumulation,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": config.optimizer.max_grad_norm if stage > 0 else 0.0,
        # The loss is divided by the tokens of all ranks. Stage 3 supports only the mean, which `Engine` undoes.
        "gradient_allreduce_op": "mean" if stage == 3 else "sum",
        # Stage 1 adds each gradient to its fp32 sum at once, so that no second copy of all gradients stays.
        "bf16": {"enabled": bf16, "immediate_grad_update": True},
        # Otherwise DeepSpeed sums over micro-batches and ranks in bf16: up to 1.6% off at 128 micro-batches.
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "steps_per_print": None,
        # DeepSpeed's throughput timer waits for the device twice per micro-batch.
        "timers": {"throughput": {"enabled": False}},
    }
