"""Training of a model for some minutes, so that the benchmark of decoding has weights with a meaningful BLEU score.

It trains like the benchmark of training, without checkpoints and validation: under DeepSpeed, or under plain torch if
DeepSpeed is not installed.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure import Measured, TrainingPart, missing_packages, say
from benchmarks.training.contenders import PackedContender
from benchmarks.training.field import LABELS, NEEDS, Field, open_field
from dist_transformer.data.folder.format import TOKENIZER_FILE
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.model_folder import ModelInfo, refuse_other_content, write_model_folder
from dist_transformer.runtime.process_group import process_group
from dist_transformer.runtime.world import World

# Steps between two readings of the clock.
_STEPS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnBenchmark(TrainingPart):
    """A model trained for some minutes, for the benchmark of decoding."""

    minutes: float = 5.0
    """Minutes of training."""
    out: Path
    """Model folder."""

    def measure(self) -> Measured:
        refuse_other_content(self.out)
        config = self.config()
        with process_group(World(), single=True) as device:
            figures = learn(self, open_field(config, World(), device))
        return Measured(
            what="a model after some minutes of training",
            figures=figures,
            text=DataFolder.open(Path(self.data)).index,
            seeds=[config.seed],
        )


def learn(settings: LearnBenchmark, field: Field) -> dict[str, Any]:
    """Train, write the weights as a model folder, and return steps, target tokens, seconds, and losses per token."""
    name = "plain" if missing_packages(NEEDS["ours"]) else "ours"
    contender = field.make(name)
    assert isinstance(contender, PackedContender)
    before, started, steps, tokens = contender.nll(field.valid), time.monotonic(), 0, 0
    while (seconds := time.monotonic() - started) < 60 * settings.minutes:
        timing = contender.train(_STEPS)
        steps, tokens = steps + timing.steps, tokens + timing.target_tokens
    after = contender.nll(field.valid)
    folder = DataFolder.open(Path(settings.data))
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
        settings.out,
        info=info,
        weights=dict(contender.driver.full_weights()),
        tokenizer_json=(folder.path / TOKENIZER_FILE).read_bytes(),
        notes=[f"Trained for {seconds:.0f} s for a benchmark"],
    )
    say(f"{steps:,} steps in {seconds:.0f} s, loss {before:.2f} → {after:.2f} per token: {settings.out}")
    return {
        "trained_by": LABELS[name],
        "steps": steps,
        "target_tokens": tokens,
        "seconds": seconds,
        "nll_before": before,
        "nll_after": after,
    }
