"""A rule for text as the table of SentencePiece, which replaces the longest known characters at each place.

A table knows no more of the surroundings of a character than its key has, so it follows the rule with two exceptions:
U+200C and U+200D stay after a letter of a script that uses them whatever comes next, and marks keep their order.
"""

import functools
import itertools
import sys
import unicodedata
from collections.abc import Iterable, Iterator

from dist_transformer.data.vocabulary.normalization import Normalization, normalizer_of

# A character for private use, which no rule joins with its neighbours.
_BETWEEN = "\ue000"
_JOINERS = "\u200c\u200d"
_VARIATION = "\ufe0f"
# A letter of a script with joiners, and a picture: what a joiner stands before.
_AFTER = ("\u06a9", "\u2764")
# SentencePiece writes spaces with this character.
_SPACE = "\u2581"


@functools.lru_cache(maxsize=1)
def normalization_table(normalization: Normalization, *, lowercase: bool) -> str:
    """Return the lines of `normalization_rule_tsv`: code points, a tab, and the code points that replace them."""
    normalizer = normalizer_of(normalization, lowercase=lowercase)

    def apply(texts: Iterable[str]) -> dict[str, str]:
        keys = list(texts)
        return dict(zip(keys, normalizer.normalize_str(_BETWEEN.join(keys)).split(_BETWEEN), strict=True))

    values = apply(dict.fromkeys((*_characters(), *_decompositions())))
    table = {key: value for key, value in values.items() if key != value} | {_SPACE: " "}
    # Without a rule for joiners there is nothing to keep.
    for joiner, after in itertools.product(filter(table.__contains__, _JOINERS), _AFTER):
        for key, value in apply(key + joiner + after for key in values).items():
            if (kept := value[: -len(after)]).endswith(joiner):
                table |= {key[:-1]: kept, f"{key[:-2]}{_VARIATION}{joiner}": kept}
    return "".join(f"{_points(key)}\t{_points(value)}\n" for key, value in sorted(table.items()))


def _characters() -> Iterator[str]:
    """Yield all characters that are assigned, and those that Unicode reserves for marks that nobody sees; no NUL."""
    for point in range(1, sys.maxunicode + 1):
        character = chr(point)
        category = unicodedata.category(character)
        if category not in ("Cn", "Co", "Cs") or 0xE0000 <= point < 0xE1000:
            yield character


def _decompositions() -> Iterator[str]:
    """Yield what a normalization form may compose to a character."""
    for character in _characters():
        for form in ("NFD", "NFKD"):
            if len(parts := unicodedata.normalize(form, character)) > 1:
                yield parts
        parts = unicodedata.decomposition(character)
        if parts and not parts.startswith("<"):
            yield "".join(chr(int(part, 16)) for part in parts.split())


def _points(text: str) -> str:
    return " ".join(f"{ord(character):04X}" for character in text)
