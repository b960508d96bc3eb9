"""A run folder: its settings, and what a resumed run may not change."""

import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dist_transformer.config import TrainConfig, read_json, to_plain
from dist_transformer.data.shards import INDEX_FILE
from dist_transformer.errors import UserError
from dist_transformer.files import sha256_of

# Another value of one of these makes another run; everything else may change on resume and is reported.
_FIXED = ("model", "batch", "seed", "data_sha256", "data_weights", "data_temperature", "init_from")


def describe_run(config: TrainConfig, folders: Sequence[Path], ds_config: dict[str, Any]) -> dict[str, Any]:
    """What `config.json` holds: the resolved settings and the identity of the data.

    Args:
        folders: the data folders on local disk.
    """
    return {
        **to_plain(config),
        "data_sha256": [sha256_of(folder / INDEX_FILE) for folder in folders],
        "init_from_sha256": None,
        "deepspeed": ds_config,
    }


def run_identity(described: dict[str, Any]) -> str:
    """Equal for two runs whose settings would let one resume the other: 16 hexadecimal digits."""
    fixed = json.dumps({name: described[name] for name in _FIXED}, sort_keys=True)
    return hashlib.sha256(fixed.encode()).hexdigest()[:16]


def check_settings(run_dir: Path, wanted: dict[str, Any]) -> list[str]:
    """Compare with the settings that the run began with.

    Returns:
        one line for each setting that changed and may.

    Raises:
        UserError: a setting that must not change, by name.
    """
    before = _flatten(read_json(run_dir / "config.json"))
    now = _flatten(wanted)
    changed = []
    for name in sorted(before.keys() | now.keys()):
        old, new = before.get(name), now.get(name)
        if old == new:
            continue
        if name.split(".")[0] in _FIXED:
            raise UserError(
                f"{run_dir} was trained with {name} = {old!r}, not {new!r}: use the old value, or another --run-dir"
            )
        changed.append(f"{name}: {old!r} -> {new!r}")
    return changed


def average_notes(state: dict[str, Any], ema_decay: float) -> list[str]:
    """What becomes of the moving average of the weights where a checkpoint's run did otherwise.

    Args:
        state: of the checkpoint.
    """
    kept = state.get("ema_decay", 0.0) > 0
    if ema_decay > 0 and not kept:
        return [f"the moving average of the weights begins with those of step {state['step']}"]
    if kept and ema_decay == 0:
        return ["the moving average of the weights is given up; its files in weights/ stay"]
    return []


def _flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat.update(_flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def write_settings(run_dir: Path, described: dict[str, Any], tokenizer: Path) -> None:
    run_dir.mkdir(parents=True, exist_ok=True)
    temporary = run_dir / "config.json.tmp"
    temporary.write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")
    temporary.replace(run_dir / "config.json")
    shutil.copyfile(tokenizer, run_dir / "tokenizer.json")


def next_command(run_dir: Path) -> str:
    """What a user does with a run that has ended, as two lines."""
    weights = min(5, len(list((run_dir / "weights").glob("step-*.safetensors"))))
    return (
        f"weights: {run_dir / 'weights'}\n"
        f"next:    python tools/average_checkpoints.py --run-dir {run_dir} --last {weights} --out {run_dir / 'model'}"
    )


def remove_newer(run_dir: Path, step: int) -> None:
    """Remove weight files and samples after `step`: what a run that goes on from there computes anew."""
    for file in (*run_dir.glob("weights/step-*"), *run_dir.glob("weights/ema-*"), *run_dir.glob("samples/step-*")):
        if int(file.stem.rpartition("-")[2]) > step:
            file.unlink()
