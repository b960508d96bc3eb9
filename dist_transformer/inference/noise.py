"""Noise on translations, which makes back-translated text more useful for training (Edunov et al. 2018, section 3).

Each word is dropped with probability 0.1. Each remaining word becomes a blank with probability 0.1. Then words move by
at most 3 places: word i is sorted by i + u, with u uniform from 0 to 4 (Lample et al. 2018), so that a word passes only
words that are at most 3 places away.
"""

import numpy as np

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
