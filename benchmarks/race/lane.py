"""A lane of a race, which is one training of one toolkit: its recipe, and its text.

The text is the ids of a data folder as words, so that every toolkit trains on the same segments.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from dist_transformer.base.files import write_file
from dist_transformer.config.settings import BatchConfig, ModelConfig, OptimizerConfig, TrainConfig
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.data.vocabulary.tokenizer import SPECIALS
from dist_transformer.evaluation.bleu import corpus_bleu

Kind = Literal["adam", "muon"]
SIZES = {
    "tiny": ModelConfig(width=128, heads=4, ffn_width=512, encoder_layers=2, decoder_layers=2, dropout=0.1),
    "base_width": ModelConfig(width=512, heads=8, ffn_width=2048, encoder_layers=2, decoder_layers=2, dropout=0.1),
    "trial": ModelConfig(width=16, heads=1, ffn_width=16, encoder_layers=1, decoder_layers=1, dropout=0.1),
}
"""Networks: the paper's, with few layers; `trial` only counts tokens."""
LARGEST = 200
"""Longest sentence in tokens, for toolkits that leave longer ones out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Settings of a training; Adam has the paper's constants, and label smoothing is 0.1."""

    size: str
    peak_lr: float
    warmup_steps: int
    """Steps of a linear rise; after it the rate falls with the inverse square root of the step."""
    seed: int
    steps: int
    every: int
    """Steps between weights that are scored."""
    kind: Kind = "adam"
    """Optimizer."""
    momentum: float = 0.95
    """Decay of Muon's mean of gradients."""
    packs: int = 2
    """Packs per step, of 1,024 target tokens."""
    dropout: float = 0.1

    @property
    def name(self) -> str:
        """Name it by its rate, seed and steps, and by what is not the default."""
        others = [each for each in dataclasses.fields(self) if each.default is not dataclasses.MISSING]
        changed = [each.name for each in others if getattr(self, each.name) != each.default]
        words = (self.peak_lr, self.warmup_steps, self.seed, self.steps)
        return "-".join([*(f"{word:g}" for word in words), *(f"{name}-{getattr(self, name)}" for name in changed)])

    def model(self, vocab_size: int) -> ModelConfig:
        return dataclasses.replace(SIZES[self.size], vocab_size=vocab_size, dropout=self.dropout)

    def config(self, data: Path, run_dir: Path) -> TrainConfig:
        """Return the settings of our training."""
        return TrainConfig.of(
            data=(str(data),),
            run_dir=run_dir,
            model=self.model(0),
            batch=BatchConfig(max_target_tokens=1024, packs_per_step=self.packs),
            optimizer=OptimizerConfig(
                kind=self.kind,
                momentum=self.momentum,
                schedule="inverse_sqrt",
                peak_lr=self.peak_lr,
                warmup_steps=self.warmup_steps,
            ),
            seed=self.seed,
            max_steps=self.steps,
            save_every=self.every,
            keep_checkpoints=1,
            keep_weights=self.steps,
            validate_every=0,
        )


@dataclass(frozen=True, slots=True)
class RaceText:
    """Files of words, with a word for each entry of the vocabulary that is no special token."""

    data: DataFolder
    folder: Path

    @property
    def train(self) -> tuple[Path, Path]:
        return self.folder / "train.source", self.folder / "train.target"

    @property
    def valid(self) -> Path:
        return self.folder / "valid.source"

    @property
    def pairs(self) -> int:
        return self.data.train.info.pairs

    def words(self) -> list[str]:
        return [_word(token) for token in range(len(SPECIALS), self.data.index.vocab_size)]

    def write(self) -> None:
        """Write the training text, in an order that is drawn once, and the validation sources."""
        self.folder.mkdir(parents=True, exist_ok=True)
        split = self.data.train
        order = np.random.default_rng(1).permutation(self.pairs)
        source, source_lengths, target, target_lengths = split.tokens(order)
        for path, ids, lengths in zip(self.train, (source, target), (source_lengths, target_lengths), strict=True):
            write_file(path, _lines(part.tolist() for part in np.split(ids, np.cumsum(lengths)[:-1])))
        write_file(self.valid, _lines(self.data.tokenizer().source.encode_batch(self.data.valid_text()[0])))

    def texts_of(self, lines: Sequence[str]) -> list[str]:
        """Return the texts of lines of words; words that are no entries, such as `<unk>`, are left out."""
        target, known = self.data.tokenizer().target, set(self.words())
        return [target.decode([int(word[1:]) for word in line.split() if word in known]) for line in lines]

    def bleu(self, translations: Sequence[str], references: Sequence[str] | None = None) -> float:
        """Score translations of the validation sources, or of those of other references."""
        if references is None:
            _, references = self.data.valid_text()
        index = self.data.index
        language = index.target_language
        return corpus_bleu(translations, references, target_language=language, lowercase=index.lowercase).value


def _word(token: int) -> str:
    return f"p{token}"


def _lines(sentences: Iterable[Sequence[int]]) -> str:
    return "".join(" ".join(map(_word, sentence)) + "\n" for sentence in sentences)
