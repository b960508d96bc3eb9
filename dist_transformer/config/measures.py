"""Validation: its settings, the names of its measures, which of two values is better, and the command for one."""

import shlex
from dataclasses import dataclass
from typing import Literal, get_args

from dist_transformer.base.errors import UserError
from dist_transformer.config.plain import OMIT_DEFAULT
from dist_transformer.config.schema import require, require_not_negative, require_positive, setting

Measure = Literal["nll", "bleu", "chrf", "ter", "command"]
"""Measure of a validation: -log p per target token, three scores of its translations, or that of a program."""
MEASURES: tuple[Measure, ...] = get_args(Measure)
LABELS: dict[Measure, str] = {"nll": "nll", "bleu": "BLEU", "chrf": "chrF", "ter": "TER", "command": "command"}

SOURCE, HYPOTHESIS, REFERENCE = "{source}", "{hypothesis}", "{reference}"
"""Placeholders of a command for its files, whose line i is about sentence i."""

_LOWER_IS_BETTER = ("nll", "ter")


def badness(measure: Measure, value: float) -> float:
    """Return a number that is lower for a better value of a measure."""
    return value if measure in _LOWER_IS_BETTER else -value


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidationConfig:
    """Validation: when it runs, and when it stops training."""

    validate_every: int = 1000
    """Steps between validations; 0: never."""
    validate_sentences: int = 1500
    """Most sentences per direction that a validation translates for BLEU, chrF, TER and samples: all of a smaller set,
    otherwise the same ones each time, spread evenly over it; 0: loss only."""
    best_by: Measure = "nll"
    """Score that patience and keep_best compare: nll (loss per token, unsmoothed) and ter are better if lower; bleu,
    chrf and command (the number of validation_command) if higher. The mean over directions."""
    validation_command: str | None = setting(None, **OMIT_DEFAULT, program=True)
    """Program that scores the translations, with {source}, {hypothesis} and {reference} for its files; its score is the
    last word that it prints. Rank 0 runs it, without a shell."""
    validation_command_minutes: float = setting(30.0, **OMIT_DEFAULT)
    """End validation_command after this time; the validation then has no score of it."""
    patience: int = 0
    """Stop after this many validations without a new best score; 0: never."""

    def __post_init__(self) -> None:
        require_not_negative(self, "validate_every", "validate_sentences", "patience")
        require_positive(self, "validation_command_minutes")
        best_by, command, sentences = self.best_by, self.validation_command, self.validate_sentences
        if command is not None:
            words_of_command(command)
        if best_by == "command" and command is None:
            raise UserError(f"best_by is {best_by!r}: set validation_command, the program that computes it")
        if best_by != "nll" and sentences == 0:
            raise UserError(
                f"best_by is {best_by!r}, and {LABELS[best_by]} needs sentences: set validate_sentences above 0"
            )
        if command is not None and sentences == 0:
            raise UserError(
                f"validation_command is {command!r:.200} and needs sentences: set validate_sentences above 0"
            )
        require(self.patience == 0 or self.validate_every > 0, "patience", self.patience, "set validate_every above 0")


def words_of_command(command: str) -> list[str]:
    """Split a command into its words, as a shell quotes them.

    Raises:
        UserError: a quote is not closed, or the command does not use the hypotheses.
    """
    where = f"validation_command is {command!r:.200}"
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UserError(f"{where}, which cannot be split into words ({error}): close its quotes") from None
    if not any(HYPOTHESIS in word for word in words[1:]):
        raise UserError(
            f"{where} and has no word with {HYPOTHESIS}: write {HYPOTHESIS} where its file of hypotheses goes"
        )
    return words
