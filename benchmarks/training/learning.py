"""Training of a model for some minutes, so that the benchmark of decoding has weights with a meaningful BLEU score.

It trains like the benchmark of training, without checkpoints and validation: under DeepSpeed, or under plain torch if
DeepSpeed is not installed.
"""

import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import who_can_run
from benchmarks.training.contenders import PackedContender
from benchmarks.training.field import LABELS, NEEDS, Report, open_field
from dist_transformer.config.settings import TrainConfig
from dist_transformer.data.folder.format import TOKENIZER_FILE
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.model_folder import ModelInfo, refuse_other_content, write_model_folder
from dist_transformer.runtime.world import World

# Steps between two readings of the clock.
_STEPS = 5


def learn(config: TrainConfig, *, minutes: float, out: Path, device: torch.device, report: Report) -> dict[str, Any]:
    """Train for `minutes` in one process, and write the weights as the model folder `out`.

    Returns:
        figures: steps, target tokens, seconds, loss per token before and after.
    """
    refuse_other_content(out)
    field = open_field(config, World(), device)
    able = who_can_run({LABELS["ours"]: NEEDS["ours"]}, report)
    name = "ours" if able else "plain"
    contender = field.make(name)
    assert isinstance(contender, PackedContender)
    before, started, steps, tokens = contender.nll(field.valid), time.monotonic(), 0, 0
    while (seconds := time.monotonic() - started) < 60 * minutes:
        timing = contender.train(_STEPS)
        steps, tokens = steps + timing.steps, tokens + timing.target_tokens
    after = contender.nll(field.valid)
    folder = DataFolder.open(Path(config.corpora.data[0]))
    index = folder.index
    info = ModelInfo(
        model=field.config.model,
        tokenizer_sha256=index.tokenizer_sha256,
        source_language=index.source_language,
        target_language=index.target_language,
        corpus=index.corpus,
        synthetic=index.synthetic,
        steps=(steps,),
    )
    write_model_folder(
        out,
        info=info,
        weights=dict(contender.driver.full_weights()),
        tokenizer_json=(folder.path / TOKENIZER_FILE).read_bytes(),
        notes=[f"Trained for {seconds:.0f} s for a benchmark"],
    )
    report(f"{steps:,} steps in {seconds:.0f} s, loss {before:.2f} → {after:.2f} per token: {out}")
    return {
        "trained_by": LABELS[name],
        "steps": steps,
        "target_tokens": tokens,
        "seconds": seconds,
        "nll_before": before,
        "nll_after": after,
    }
