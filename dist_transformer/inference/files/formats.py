"""Translations as lines of a file: plain text, or the n best of each line in one of three formats.

moses   NUMBER ||| TEXT ||| SCORE, one line per translation, best first
tsv     NUMBER, RANK, SCORE and TEXT separated by tabs, one line per translation; a tab in a text becomes a space
jsonl   {"line": NUMBER, "translations": [{"text": TEXT, "score": SCORE}, ...]}, one line per input line; a translation
        that was cut at the maximum length has also "cut": true

With alignments, each translation also has its Pharaoh pairs, in a further field, or as "alignment" in JSON.

Numbers count input lines, and ranks a line's translations, from 0.
"""

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

# Torch costs seconds, and the flags need the names of the formats.
if TYPE_CHECKING:
    from dist_transformer.inference.translation import ScoredText, Translation

Format = Literal["moses", "tsv", "jsonl"]


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputFormat:
    """Output format of the translations of a line."""

    nbest: Format | None = None
    """Format of several translations; None: the best one as plain text."""
    noise_seed: int | None = None
    """Seed of the noise that is added to the plain text; None: no noise."""

    def text_of(self, number: int, translation: "Translation") -> str:
        """Return the output of one input line.

        Args:
            number: number of the input line, from 0.
        """
        match self.nbest:
            case None if self.noise_seed is not None:
                return f"{add_noise(translation.text, seed=self.noise_seed, line=number)}\n"
            case None:
                return f"{translation.text}\n"
            case "jsonl":
                found = [
                    {
                        "text": one.text,
                        "score": round(one.score, 6),
                        **({"cut": True} if one.is_cut else {}),
                        **({"alignment": one.alignment.words} if one.alignment else {}),
                    }
                    for one in translation.hypotheses
                ]
                return json.dumps({"line": number, "translations": found}, ensure_ascii=False) + "\n"
            case "tsv":
                return "".join(_tsv(number, rank, one) for rank, one in enumerate(translation.hypotheses))
            case _:
                return "".join(
                    f"{number} ||| {one.text} ||| {one.score:.6f}{_words(' ||| ', one)}\n"
                    for one in translation.hypotheses
                )


def _tsv(number: int, rank: int, one: "ScoredText") -> str:
    text = one.text.replace("\t", " ")
    return f"{number}\t{rank}\t{one.score:.6f}\t{text}{_words(chr(9), one)}\n"


def _words(separator: str, one: "ScoredText") -> str:
    return "" if one.alignment is None else separator + one.alignment.words


BLANK = "<BLANK>"
"""Replacement of a word."""
_DROPPED, _BLANKED, _DISTANCE = 0.1, 0.1, 3


def add_noise(text: str, *, seed: int, line: int) -> str:
    """Add noise to a text. The noise is a pure function of the text, the seed and the line number.

    White space separates words, so a text without spaces is one word. At least one word of a text remains.
    """
    words = text.split()
    if not words:
        return text
    chance = np.random.default_rng([seed, line])
    kept = chance.random(len(words)) >= _DROPPED
    if not kept.any():
        kept[chance.integers(len(words))] = True
    left = [word for word, is_kept in zip(words, kept, strict=True) if is_kept]
    blank = chance.random(len(left)) < _BLANKED
    left = [BLANK if is_blank else word for word, is_blank in zip(left, blank, strict=True)]
    places = np.arange(len(left)) + chance.random(len(left)) * (_DISTANCE + 1)
    return " ".join(left[i] for i in places.argsort(kind="stable"))
