"""Translations as lines of a file: plain text, or the best few of each line in one of three formats.

moses   NUMBER ||| TEXT ||| SCORE, a line for each translation, best first
tsv     NUMBER, RANK, SCORE and TEXT between tabs, a line for each translation; a tab in a text is a space
jsonl   {"line": NUMBER, "translations": [{"text": TEXT, "score": SCORE}, ...]}, a line for each input line

Numbers count input lines, and ranks a line's translations, from 0.
"""

import json
from dataclasses import dataclass

from dist_transformer.errors import UserError
from dist_transformer.inference.noise import add_noise
from dist_transformer.inference.translator import ScoredText, Translation

FORMATS = ("moses", "tsv", "jsonl")


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputFormat:
    """How the translations of a line are written."""

    nbest: str | None = None
    """One of `FORMATS`; the best translation as plain text when not given."""
    noise_seed: int | None = None
    """Add noise to the plain text, by this seed."""

    def __post_init__(self) -> None:
        if self.nbest not in (None, *FORMATS):
            raise UserError(f"the format is {self.nbest}: give one of {', '.join(FORMATS)}")
        if self.nbest is not None and self.noise_seed is not None:
            raise UserError("noise is added to the best translation alone: leave out --nbest or --noise")

    def text_of(self, number: int, translation: Translation) -> str:
        """Give the lines of one input line.

        Args:
            number: of the input line, from 0.
        """
        match self.nbest:
            case None if self.noise_seed is not None:
                return f"{add_noise(translation.text, seed=self.noise_seed, line=number)}\n"
            case None:
                return f"{translation.text}\n"
            case "jsonl":
                found = [{"text": one.text, "score": round(one.score, 6)} for one in translation.hypotheses]
                return json.dumps({"line": number, "translations": found}, ensure_ascii=False) + "\n"
            case "tsv":
                return "".join(_tsv(number, rank, one) for rank, one in enumerate(translation.hypotheses))
            case _:
                return "".join(f"{number} ||| {one.text} ||| {one.score:.6f}\n" for one in translation.hypotheses)


def _tsv(number: int, rank: int, one: ScoredText) -> str:
    text = one.text.replace("\t", " ")
    return f"{number}\t{rank}\t{one.score:.6f}\t{text}\n"
