"""Many cases of one format, drawn by Hypothesis from a seed."""

from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import hypothesis
import torch
from hypothesis import HealthCheck, Phase

from dist_transformer.base.files import sha256_of
from dist_transformer.config.settings import ModelConfig
from dist_transformer.data.vocabulary.byte_bpe import learn_byte_bpe
from dist_transformer.model.transformer import Transformer
from dist_transformer.model_folder import ModelInfo, write_model_folder
from tests.fuzz.formats import Format, Lab
from tests.fuzz.harness import READ, REFUSED, attempt

SEED = 1
_SHOWN = 5


@dataclass(kw_only=True, slots=True)
class Hunt:
    """The outcomes of the cases of one format."""

    counts: Counter[str] = field(default_factory=Counter)
    """Cases that were read, and cases that were refused."""
    found: dict[str, bytes] = field(default_factory=dict)
    """Problems, each with the first content that shows it."""

    @property
    def cases(self) -> int:
        return self.counts.total()

    @property
    def failed(self) -> int:
        return self.cases - self.counts[READ] - self.counts[REFUSED]


def hunt(kind: Format, lab: Lab, *, cases: int, seed: int = SEED) -> Hunt:
    """Damage the file of a format again and again, and let its readers read it."""
    file, result = lab.folder / kind.file, Hunt()
    sound = file.read_bytes()
    # What is loaded at its first use is loaded before children are made; a sound file is read.
    kind.read(lab, sound)
    lab.restore()

    def examine(content: bytes) -> None:
        file.write_bytes(content)
        try:
            outcome = attempt(lambda: kind.read(lab, content), isolated=kind.isolated)
        finally:
            file.write_bytes(sound)
            lab.restore()
        result.counts[outcome] += 1
        if outcome not in (READ, REFUSED) and len(result.found) < _SHOWN:
            result.found.setdefault(outcome, content)

    settings = hypothesis.settings(
        max_examples=cases,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    hypothesis.seed(seed)(settings(hypothesis.given(kind.damage(sound))(examine)))()
    return result


@cache
def sound_files(folder: Path) -> Lab:
    """Make the sound files of every format, once for each folder."""
    torch.set_num_threads(1)
    folder.mkdir()
    return Lab(folder, make_model(folder / "sound model"))


def make_model(path: Path) -> Path:
    """A model folder of a few kilobytes."""
    tokenizer = learn_byte_bpe(["a sentence"], vocab_size=262)
    file = path.with_name("tokenizer.json")
    tokenizer.save(file)
    model = Transformer(
        ModelConfig(
            width=8,
            heads=2,
            ffn_width=8,
            encoder_layers=1,
            decoder_layers=1,
            max_positions=16,
            vocab_size=tokenizer.vocab_size,
        )
    )
    info = ModelInfo(
        model=model.config,
        tokenizer_sha256=sha256_of(file),
        source_language="en",
        target_language="de",
        corpus="fuzz",
        synthetic=True,
        steps=(1,),
    )
    write_model_folder(path, info=info, weights=dict(model.state_dict()), tokenizer_json=file.read_bytes())
    return path
