"""A run folder made by hand, to be damaged in one place at a time."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_transformer.base.files import sha256_of
from dist_transformer.config.plain import to_plain
from dist_transformer.config.presets import PRESETS
from dist_transformer.config.settings import ModelConfig
from dist_transformer.data.loading.packing import LeftOut
from dist_transformer.model.transformer import Transformer
from dist_transformer.run.checkpoint.state import EMA, MOMENTS, ParameterState
from dist_transformer.run.checkpoint.writer import Retention
from dist_transformer.run.folder import describe_run, write_settings
from dist_transformer.run.ledger import Ledger, left_out_records, read_ledger
from dist_transformer.run.progress import Progress
from dist_transformer.run.verify import verify_run
from tests.run.saving import save_checkpoint

MODEL = ModelConfig(
    width=8, heads=2, ffn_width=8, encoder_layers=1, decoder_layers=1, max_positions=16, vocab_size=5, norm="pre"
)

NEWEST = "checkpoints/step-00000004"
LEFT_OUT = LeftOut(corpus=0, shard=1, epoch=0, window=0, packs=0)
PART, WEIGHTS = f"{NEWEST}/part-00000.safetensors", "weights/step-00000004.safetensors"


@pytest.fixture(scope="session")
def sound_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = tmp_path_factory.mktemp("data")
    return make_run(data.with_name("sound run"), data)


def make_run(path: Path, data: Path) -> Path:
    """Five steps, saved after two and four of them; the third went without a shard."""
    (data / "index.json").write_text("{}")
    (data / "tokenizer.json").write_text('{"pieces": []}')
    config = PRESETS["tiny"].changed(data=(str(data),), run_dir=path, model=MODEL)
    write_settings(path, describe_run(config, [data], {"zero_optimization": {"stage": 1}}), data / "tokenizer.json")
    ledger = Ledger(path / "ledger.jsonl")
    for step in range(1, 6):
        left_out = (LEFT_OUT,) if step == 3 else ()
        ledger.add(step, pair_hash=7 * step, target_tokens=100 + step, left_out=left_out)
        ledger.flush()
        if step % 2 == 0:
            progress = Progress(step=step, ledger_chain=ledger.chain, target_tokens=sum(range(101, 101 + step)))
            progress.left_out = left_out_records(read_ledger(ledger.path))
            save(path, progress)
    return path


@pytest.fixture
def run(sound_run: Path, tmp_path: Path) -> Path:
    """One to damage."""
    return Path(shutil.copytree(sound_run, tmp_path / "a run"))


def save(path: Path, progress: Progress, *, ema_decay: float = 0.0) -> None:
    torch.manual_seed(progress.step)
    kept = (*MOMENTS, EMA) if ema_decay > 0 else MOMENTS
    described = {
        "model": to_plain(MODEL),
        "tokenizer_sha256": hashlib.sha256(b'{"pieces": []}').hexdigest(),
        "ema_decay": ema_decay,
        "updates": progress.step,
    }
    save_checkpoint(
        path,
        [
            ParameterState(name=name, weight=parameter.data, moments=dict.fromkeys(kept, parameter.data * 0))
            for name, parameter in Transformer(MODEL).named_parameters()
        ],
        {**progress.to_json(), **described},
        retention=Retention(checkpoints=9, weights=9),
        weights_metadata={"step": json.dumps(progress.step), "tag": "a"},
    )


def failures(run: Path) -> dict[str, str]:
    return {check.name: check.found for check in verify_run(run) if not check.passed}


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def seal(checkpoint: Path) -> None:
    """State in the manifest what is there, as a faulty writer would."""
    files = {
        file.name: {"bytes": file.stat().st_size, "sha256": sha256_of(file)}
        for file in checkpoint.iterdir()
        if file.name != "manifest.json"
    }
    edit_json(checkpoint / "manifest.json", files=files)


def flip(path: Path, at: int = -1) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
