"""Translations of lines, what their readers need to know, and the parts of lines that are too long for a model."""

import itertools
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from dist_transformer.data.text.sentences import EAST_ASIAN_CHARACTER, split_sentences
from dist_transformer.data.vocabulary.placeholders import TERM_MARKS
from dist_transformer.data.vocabulary.tokenizer import Tokenizer

_JOINERS = "\u200c\u200d"
_VISIBLE = re.compile(r"\S")
# Characters per token in the first look ahead into a long sentence; the look-ahead doubles until it is enough.
_LOOK_AHEAD = 2


class Link(NamedTuple):
    """A token of the translation and the token of the source that it is linked to, as characters of both texts.

    The source is the line as it was given, and the target the text as it is written. A token has no white space around.
    """

    source_start: int
    source_end: int
    target_start: int
    target_end: int


@dataclass(frozen=True, slots=True)
class Alignment:
    """Links of a line and its translation."""

    links: tuple[Link, ...]
    """At most one for each token of the translation, in the order of the translation."""
    words: str
    """Pharaoh pairs `0-0 1-2` of the words between white space that the links connect."""
    is_guided: bool
    """Whether the model was trained on alignments."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredText:
    text: str
    """One line: line breaks are spaces."""
    score: float
    tokens: tuple[int, ...]
    """Ids without special tokens, a tag of the target first; for a split line, those of all parts."""
    is_cut: bool = False
    """Whether it, or a part of it, reached the maximum length and would have continued."""
    alignment: Alignment | None = None
    missing_spans: int = 0
    """Protected spans that the model left out."""
    terms_kept: int = 0
    """Terms that it has of those that it should have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """Note about a line that was not translated as a whole."""

    limit: int
    """Maximum tokens of a source that is translated as a whole; 0: every line is split at its sentences."""
    parts: int
    """Number of parts that were translated one by one and joined."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Translation:
    """Translation of one line; a blank line has one empty hypothesis."""

    hypotheses: tuple[ScoredText, ...]
    """At least one hypothesis: the best first, or samples in the order in which they were drawn. For a split line, the
    k-th joins the k-th of each part; its score is their mean."""
    split: Split | None = None
    beyond_training: bool = False
    """Whether the line, or a part of it, is longer than anything that the model was trained on."""
    whole_for_prefix: bool = False
    """Whether a line that would be split was translated as a whole, because its prefix has several sentences."""
    max_extra_tokens: int = 0
    """Tokens that the longest output has more than its source."""
    terms: int = 0
    """Terms that the translation should have."""

    @property
    def text(self) -> str:
        return self.hypotheses[0].text

    @property
    def notes(self) -> Iterator[str]:
        """Facts that a reader of the translation needs: ends of sentences that begin with a number of lines."""
        if self.split is not None and self.split.limit == 0:
            yield "of several sentences: translated sentence by sentence, as the model was trained"
        elif self.split is not None:
            yield f"of more than {self.split.limit:,} tokens: translated in parts, cut between sentences if possible"
        if self.beyond_training:
            yield "with a sentence that is longer than any in the training: check the translation"
        if self.whole_for_prefix:
            yield "translated as a whole for a prefix of several sentences: check that no sentence is missing"
        if self.hypotheses[0].missing_spans:
            yield "without a place for protected text in the translation: look for it at the end, or add it"
        if any(one.alignment is not None and not one.alignment.is_guided for one in self.hypotheses):
            yield "aligned by attention that no alignments guided: train with --guided-attention for better ones"
        if any(one.is_cut for one in self.hypotheses):
            yield (
                f"with a translation that was cut at the limit of source + {self.max_extra_tokens} tokens, or of the "
                "model's positions: check the line, raise max_extra_tokens, or train the model longer"
            )


_TERMS, _TERMS_KEPT = "terms", "terms that came out"


def count_notes(translations: Iterable[Translation]) -> Counter[str]:
    """Count the lines of each note, and the terms."""
    notes = Counter[str]()
    for one in translations:
        notes.update(one.notes)
        notes.update({_TERMS: one.terms, _TERMS_KEPT: one.hypotheses[0].terms_kept})
    return notes


def noted(notes: Counter[str]) -> list[str]:
    """Write one sentence for each note; the last one counts the terms, unless there are none."""
    lines = {note: count for note, count in sorted(notes.items()) if note not in (_TERMS, _TERMS_KEPT)}
    terms = [f"{notes[_TERMS_KEPT]:,} of {notes[_TERMS]:,} terms are in the translations"] * bool(notes[_TERMS])
    return [f"{count:,} {'line' if count == 1 else 'lines'} {note}" for note, count in lines.items()] + terms


def split_text(text: str, tokenizer: Tokenizer, limit: int) -> list[str]:
    """Cut a text into its sentences, and sentences of more than `limit` tokens into smaller parts.

    The parts hold all of the text in order, except white space between them, and joiners at a cut within a word. A long
    sentence is cut at the last white space within the limit. Without white space, it is cut between two characters, if
    possible not before a combining mark.

    Args:
        limit: maximum tokens per part, at least 4: the most bytes of a character in UTF-8, and so the most tokens.

    Returns:
        Parts of at most `limit` tokens, none of them blank; a part of a long sentence is normalised.
    """
    sentences = split_sentences(text)
    parts: list[str] = []
    for sentence, ids in zip(sentences, tokenizer.encode_batch(sentences), strict=True):
        parts += [sentence] if len(ids) <= limit else _cut(tokenizer.normalize(sentence), tokenizer, limit)
    return parts


def join_texts(texts: Sequence[str]) -> str:
    """Join translations with a space, or without one next to a Chinese or Japanese character."""
    texts = [text for text in texts if text]
    joined = texts[:1]
    for before, after in itertools.pairwise(texts):
        unspaced = EAST_ASIAN_CHARACTER.match(before[-1]) or EAST_ASIAN_CHARACTER.match(after[0])
        joined += ["" if unspaced else " ", after]
    return "".join(joined)


def join_hypotheses(parts: Sequence[tuple[ScoredText, ...]]) -> tuple[ScoredText, ...]:
    """Join the best hypotheses of all parts, the second best, and so on, as many as every part has."""
    if len(parts) == 1:
        return parts[0]
    return tuple(
        replace(
            alike[0],
            text=join_texts([one.text for one in alike]),
            score=sum(one.score for one in alike) / len(alike),
            tokens=tuple(token for one in alike for token in one.tokens),
            is_cut=any(one.is_cut for one in alike),
            missing_spans=sum(one.missing_spans for one in alike),
            terms_kept=sum(one.terms_kept for one in alike),
        )
        for alike in zip(*parts, strict=False)
    )


def _cut(text: str, tokenizer: Tokenizer, limit: int) -> Iterator[str]:
    """Cut a normalised sentence from its beginning, each part as long as possible."""
    start = 0
    while (visible := _VISIBLE.search(text, start)) is not None:
        start = visible.start()
        end = start + _part_length(text, start, tokenizer, limit)
        yield text[start:end].rstrip()
        start = end


def _part_length(text: str, start: int, tokenizer: Tokenizer, limit: int) -> int:
    """Count the characters of the part that begins at `start`."""
    size = _LOOK_AHEAD * limit
    # Not the whole rest of the text: a long one would be encoded once per part.
    while len(token_starts := tokenizer.token_starts(text[start : start + size])) <= limit:
        if start + size >= len(text):
            return len(text) - start
        size *= 2
    ahead = text[start : start + size]
    length = _best_place(ahead, token_starts[limit])
    # A cut word may have other pieces, and more of them.
    for tokens in range(limit - 1, 0, -1):
        if len(tokenizer.encode(ahead[:length].rstrip())) <= limit:
            break
        length = _best_place(ahead, token_starts[tokens])
    return length


def _best_place(text: str, longest: int) -> int:
    """Find the last white space up to `longest`, otherwise the last character that is not a mark; at least 1."""
    places = range(longest, 0, -1)
    spaces = (place for place in places if text[place].isspace() and not _is_in_term(text, place))
    others = (place for place in places if not (unicodedata.category(text[place])[0] == "M" or text[place] in _JOINERS))
    return next(itertools.chain(spaces, others), max(1, longest))


def _is_in_term(text: str, place: int) -> bool:
    """Tell whether a place is between a source term and the end of its translation."""
    before, after = TERM_MARKS
    return text.rfind(before, 0, place + 2) > text.rfind(after, 0, place)
