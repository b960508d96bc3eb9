"""Measures of a validation: their names, which of two values is better, and the command that computes one."""

import shlex
from typing import Literal, get_args

from dist_transformer.base.errors import UserError

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


def require_measurable(best_by: Measure, *, sentences: int, command: str | None) -> None:
    """Refuse settings of a validation that would not compute the measure that they compare.

    Args:
        sentences: number of sentences that a validation translates at most.

    Raises:
        UserError: the measure, or the command, needs another setting, or the command cannot be split into words.
    """
    if command is not None:
        words_of_command(command)
    if best_by == "command" and command is None:
        raise UserError(f"best_by is {best_by!r}: set validation_command, the program that computes it")
    if best_by != "nll" and sentences == 0:
        raise UserError(
            f"best_by is {best_by!r}, and {LABELS[best_by]} needs sentences: set validate_sentences above 0"
        )
    if command is not None and sentences == 0:
        raise UserError(f"validation_command is {command!r:.200} and needs sentences: set validate_sentences above 0")


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
