"""Changes of training pairs that make a model robust: capitals, spelling errors, punctuation, copied text.

The names, and the kinds of errors, are those of OpusTrainer's modifiers (Bogoychev et al. 2023). Each change is a
function of the pair and its random numbers.
"""

import itertools
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from random import Random

import numpy as np

from dist_transformer.base.errors import UserError
from dist_transformer.data.text.sentences import COMBINING, EAST_ASIAN, STOPS, UNSPACED_CHARACTER
from dist_transformer.data.text.terms import Terms

# A word, or an East Asian letter, which may be one.
_LETTER = rf"(?:(?!{EAST_ASIAN})\w[{COMBINING}]*)"
_WORD = re.compile(rf"(?!\W){EAST_ASIAN}|{_LETTER}+(?:['’-]{_LETTER}+)*")
# Not that of "s" in "it's", or behind a vowel sign.
_INITIAL = re.compile(rf"(?<![\w'’{COMBINING}])[^\W\d_]")
_END = re.compile(rf"[{STOPS}]+$")
# One error for so many words.
_WORDS_PER_ERROR = 8
# Dice coefficient of two words, and pairs that have both, from which on they count as translations of each other.
_LEAST_DICE, _LEAST_PAIRS = 0.1, 3

Texts = tuple[str, str]
Place = tuple[int, bool]
"""Index of a character, and whether a word begins there rather than ends."""


def upper(source: str, target: str, random: Random) -> Texts:
    return source.upper(), target.upper()


def title(source: str, target: str, random: Random) -> Texts:
    one, other = (_INITIAL.sub(lambda letter: letter[0].upper(), text) for text in (source, target))
    return one, other


def typos(source: str, target: str, random: Random) -> Texts:
    """Make errors of spelling and white space in the source."""
    for _ in range(1 + len(source.split()) // _WORDS_PER_ERROR):
        places = [place for place, pair in enumerate(itertools.pairwise(source)) if "".join(pair).isalpha()]
        spaces = [place for place, character in enumerate(source) if character == " "]
        if places:
            at = random.choice(places)
            one, other = source[at], source[at + 1]
            new = random.choice((other + one, one, other, one + one + other, f"{one} {other}"))
            if spaces and random.random() < 1 / 6:
                at, one, other, new = random.choice(spaces), " ", "", random.choice(("", "  "))
            source = source[:at] + new + source[at + len(one + other) :]
    return source, target


def punctuation(source: str, target: str, random: Random) -> Texts:
    """Remove the punctuation at the end, if both texts have some."""
    if _END.search(source) and _END.search(target):
        return _END.sub("", source), _END.sub("", target)
    return source, target


class Neighbours:
    """Words that translate each other, found by how often they come together (Dice 1945).

    Args:
        pairs: sample of the text.
    """

    def __init__(self, pairs: Sequence[Texts]) -> None:
        numbers: tuple[dict[str, int], dict[str, int]] = ({}, {})
        counts: tuple[Counter[int], Counter[int]] = (Counter(), Counter())
        together = []
        for pair in pairs:
            sides = []
            for side, text in enumerate(pair):
                words = {word.lower() for word in _WORD.findall(text)}
                sides.append([numbers[side].setdefault(word, len(numbers[side])) for word in sorted(words)])
                counts[side].update(sides[-1])
            ids = [np.array(side, dtype=np.int64) for side in sides]
            together.append((ids[0][:, None] << 32 | ids[1]).ravel())
        codes, found = np.unique(np.concatenate([*together, np.empty(0, np.int64)]), return_counts=True)
        kept = found >= _LEAST_PAIRS
        spelled = [list(side) for side in numbers]
        self._dice: dict[Texts, float] = {}
        for code, count in zip(codes[kept].tolist(), found[kept].tolist(), strict=True):
            source, target = code >> 32, code & 0xFFFFFFFF
            dice = 2 * count / (counts[0][source] + counts[1][target])
            if dice >= _LEAST_DICE:
                self._dice[spelled[0][source], spelled[1][target]] = dice

    def places(self, source: str, target: str) -> list[tuple[Place, Place]]:
        """Return where a mark may be in the source, each with its place in the target.

        A mark before a word is before the word's translation, or else behind that of the word before it.
        """
        sides = [[(word[0].lower(), word.span()) for word in _WORD.finditer(text)] for text in (source, target)]
        ones, others = sides
        dice = np.array([[self._dice.get((one, other), 0.0) for other, _ in others] for one, _ in ones])
        if not dice.size:
            return []
        # Of equal words, those at about the same place translate each other.
        dice *= 1 - abs(np.arange(len(ones))[:, None] / len(ones) - np.arange(len(others)) / len(others))
        best = {i: j for i, j in enumerate(dice.argmax(1).tolist()) if dice[i, j] > 0}
        found = []
        for i in range(len(ones) + 1):
            place = (ones[i][1][0], True) if i < len(ones) else (ones[-1][1][1], False)
            if i in best:
                found.append((place, (others[best[i]][1][0], True)))
            elif i - 1 in best:
                found.append((place, (others[best[i - 1]][1][1], False)))
        return found


def copy(source: str, target: str, random: Random, neighbours: Neighbours, marks: Sequence[str]) -> Texts:
    """Insert marks of placeholders into both texts, in the order of the source, in which a translation numbers spans.

    Each mark but the first has half the probability of the one before, so most pairs have few.
    """
    places = neighbours.places(source, target) or [((0, True), (0, True)), ((len(source), False), (len(target), False))]
    count = 1
    while count < min(len(marks), len(places)) and random.random() < 0.5:
        count += 1
    chosen = sorted(random.sample(places, count))
    texts = [source, target]
    for side, cuts in enumerate(zip(*chosen, strict=True)):
        # From the end, so that the other places stay.
        for (at, is_before), mark in sorted(zip(cuts, marks, strict=False), reverse=True):
            text = texts[side]
            space = " " * (UNSPACED_CHARACTER.match(text, at if is_before else at - 1) is None)
            texts[side] = text[:at] + (f"{mark}{space}" if is_before else f"{space}{mark}") + text[at:]
    return texts[0], texts[1]


def terms(source: str, target: str, random: Random, glossary: Terms) -> Texts:
    """Write the target terms that the pair has behind their source terms."""
    return glossary.annotate(source, target)[0], target


MODIFIERS: Mapping[str, Callable[..., Texts]] = {
    "upper": upper,
    "title": title,
    "typos": typos,
    "punctuation": punctuation,
    "copy": copy,
    "terms": terms,
}


def parse_rates(values: Sequence[str]) -> dict[str, float]:
    """Parse shares of the pairs to change, such as `upper:0.05`.

    Raises:
        UserError: a name is unknown or appears twice, a share is no number from 0 to 1, or they exceed 1 together.
    """
    rates: dict[str, float] = {}
    for value in values:
        name, _, share = value.partition(":")
        if name not in MODIFIERS or name in rates:
            raise UserError(f"augment {value}: it must be one of {', '.join(MODIFIERS)}, each once, such as upper:0.05")
        try:
            rates[name] = float(share)
        except ValueError:
            remedy = f"it needs a share of the pairs, such as {name}:0.05, and a space before the next change"
            raise UserError(f"augment {value}: {remedy}") from None
    if not all(0 < rate <= 1 for rate in rates.values()) or sum(rates.values()) > 1:
        raise UserError(f"augment {' '.join(values)}: shares must be above 0, and at most 1 together")
    return rates
