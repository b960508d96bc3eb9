"""A small hand-made run: weight files and checkpoints of chosen numbers, its metrics, model folders."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dist_transformer.base.files import sha256_of
from dist_transformer.config.plain import to_plain
from dist_transformer.config.settings import ModelConfig
from dist_transformer.data.vocabulary.byte_bpe import learn_byte_bpe
from dist_transformer.data.vocabulary.tokenizer import Tokenizer
from dist_transformer.model.transformer import Transformer
from dist_transformer.model_folder import ModelInfo, write_model_folder
from dist_transformer.run.checkpoint.reader import weight_hashes
from dist_transformer.run.checkpoint.state import MOMENTS, ParameterState
from dist_transformer.run.checkpoint.writer import Retention
from dist_transformer.run.folder import run_identity
from dist_transformer.run.layout import WEIGHT_HASHES, step_name
from tests.run.saving import save_checkpoint
from tests.support.tiny import tiny_config

TOKENIZER = learn_byte_bpe(["a b"], vocab_size=300)
MODEL = tiny_config(width=8, ffn_width=16, max_positions=16, vocab_size=TOKENIZER.vocab_size)
Weights = dict[str, torch.Tensor]


def random_weights(step: int, model: ModelConfig = MODEL) -> Weights:
    torch.manual_seed(step)
    # Weights of different sizes, so that an error in the mean is not hidden by rounding.
    return {name: torch.randn_like(t) * 10 ** (step % 3) for name, t in Transformer(model).state_dict().items()}


def describe(step: int, model: ModelConfig = MODEL, tokenizer: Tokenizer = TOKENIZER, **other: Any) -> dict[str, Any]:
    described = {
        "step": step,
        "model": to_plain(model),
        "tokenizer_sha256": tokenizer.sha256,
        "source_language": "en",
        "target_language": "de",
        "corpus": "hand-written",
        "synthetic": False,
        # That of a config.json without the settings that identify a run.
        "run": run_identity({}),
        "train_seconds": 60.0 * step,
        **other,
    }
    return {key: value for key, value in described.items() if value is not None}


def save(folder: Path, step: int, weights: Weights | None = None, **other: Any) -> Path:
    """A weight file."""
    (folder / "weights").mkdir(parents=True, exist_ok=True)
    other.get("tokenizer", TOKENIZER).save(folder / "tokenizer.json")
    file = folder / "weights" / f"{step_name(step)}.safetensors"
    weights = weights if weights is not None else random_weights(step, other.get("model", MODEL))
    save_file(weights, file, metadata={key: json.dumps(value) for key, value in describe(step, **other).items()})
    record_hash(file)
    return file


def record_hash(file: Path) -> None:
    """State the hash of a weight file as training does."""
    hashes = weight_hashes(file.parent) | {file.name: sha256_of(file)}
    (file.parent / WEIGHT_HASHES).write_text("".join(f"{value}  {name}\n" for name, value in hashes.items()))


def save_both(run: Path, step: int, weights: Weights | None = None) -> tuple[Path, Path]:
    """A weight file and a checkpoint, as training writes them."""
    run.mkdir(parents=True, exist_ok=True)
    TOKENIZER.save(run / "tokenizer.json")
    states = [
        ParameterState(name=name, weight=weight, moments={key: torch.full_like(weight, 7.0) for key in MOMENTS})
        for name, weight in (weights or random_weights(step)).items()
    ]
    described = describe(step)
    checkpoint = save_checkpoint(
        run,
        states,
        described,
        retention=Retention(checkpoints=9, weights=99),
        weights_metadata={key: json.dumps(value) for key, value in described.items()},
    )
    return run / "weights" / f"{step_name(step)}.safetensors", checkpoint


def save_model(path: Path, weights: Weights, steps: tuple[int, ...]) -> Path:
    described = describe(0)
    for name in ("step", "model", "train_seconds"):
        del described[name]
    info = ModelInfo(model=MODEL, steps=steps, **described)
    TOKENIZER.save(path.parent / "t.json")
    write_model_folder(path, info=info, weights=weights, tokenizer_json=(path.parent / "t.json").read_bytes())
    return path


def validate(run: Path, *records: dict[str, Any], best_by: str = "nll") -> None:
    """The run's metrics: these validations, among records of other kinds; and the run's own measure."""
    run.mkdir(exist_ok=True)
    (run / "config.json").write_text(json.dumps({"best_by": best_by}), encoding="utf-8")
    kinds = [{"kind": "train", "step": 1, "nll": 0.0, "bleu": 100.0}, *({"kind": "valid", **r} for r in records)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in kinds), encoding="utf-8")


def validated(run: Path, nlls: dict[int, float | None], bleus: dict[int, float] | None = None) -> None:
    bleus = bleus or {}
    validate(run, *({"step": s, "nll": nll, **({"bleu": bleus[s]} if s in bleus else {})} for s, nll in nlls.items()))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def mixed(run: Path, tmp_path: Path) -> list[Path]:
    """A weight file, a checkpoint and a model folder, of steps 1, 2 and 3."""
    file, _ = save_both(run, 1)
    _, checkpoint = save_both(run, 2)
    return [file, checkpoint, save_model(tmp_path / "third", random_weights(3), (3,))]
