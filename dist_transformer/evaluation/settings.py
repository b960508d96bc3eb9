"""Settings of an evaluation, for flags, files and Python."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from dist_transformer.base.errors import UserError
from dist_transformer.config.schema import FLAT, FlagRules, settings_of
from dist_transformer.inference.decoding import RULES, Loading, SearchOrMbr


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodingAsPublished(SearchOrMbr):
    """Decoding of a model."""

    split_over: int | Literal["no"] | None = "no"
    """Split lines of several sentences with more tokens than this; no: only lines that are too long for the model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateSettings:
    """Text and its scores."""

    model: tuple[Path, ...] = ()
    """Model folder; several are an ensemble: the mean of their probabilities, with shares such as A:2 B:1."""
    src: Path | None = None
    """Source text for the model, one sentence per line."""
    test_set: str | None = None
    """Test set of sacreBLEU, such as wmt14/full, instead of src and ref; it is downloaded once."""
    hypotheses: tuple[Path, ...] = ()
    """Files of translations, line by line, instead of a model."""
    tgt_lang: str = ""
    """Language of the hypotheses such as de, for the tokenisation."""
    ref: tuple[Path, ...] = ()
    """Raw reference text, line by line; several files if each line has several references."""
    json: Path | None = None
    """File for the scores as JSON; a model's hypotheses are written to the same folder."""
    lowercase: bool = False
    """Ignore case; it is always ignored if the model does."""
    loading: Annotated[Loading, FLAT]
    decoding: Annotated[DecodingAsPublished, FLAT]

    def __post_init__(self) -> None:
        if not (self.model or self.hypotheses):
            raise UserError("model and hypotheses are missing: pass one of them")
        if not (self.ref or (self.model and self.test_set)):
            raise UserError("ref is missing: pass it, or test_set")
        if self.model and not (self.src or self.test_set):
            raise UserError("model needs a text to translate: pass src, too, or test_set")
        if self.hypotheses and not self.tgt_lang:
            raise UserError("hypotheses do not state their language: pass tgt_lang, such as de")


_OF_A_MODEL = " ".join(each.flag for kind in (Loading, DecodingAsPublished) for each in settings_of(kind))
EVALUATE_RULES = FlagRules(
    needs={"--utility --epsilon --seed with --model": "--mbr"},
    conflicts={
        (f"--model --src --test-set {_OF_A_MODEL}", "--hypotheses"): "which are translations already",
        ("--src --ref", "--test-set"): "which has both",
        ("--tgt-lang", "--model"): "which has its own",
        **RULES.conflicts,
    },
)
"""When the flags of an evaluation have an effect."""
