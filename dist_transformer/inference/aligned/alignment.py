"""Alignments: which tokens of a line became which tokens of its translation, as characters of both texts.

A translation that was found is read once more, so this works with every search: the decoder's step that has just read a
token, and so knows it (Chen et al. 2020, "Accurate Word Alignment Induction from Neural Machine Translation"), attends
to the tokens of the source, and the one that gets most is linked. The attention is that of the head which training on
alignments guided (Garg et al. 2019), or else the mean of the heads of the same layer.
"""

import codecs
import difflib
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from dist_transformer.data.vocabulary.tokenizer import BOS_ID, EOS_ID, UNK_ID, Tokenizer
from dist_transformer.inference.batches import pack_sentences
from dist_transformer.inference.ensemble import DecodingModel, Ensemble
from dist_transformer.inference.scoring import IdPair, make_batches
from dist_transformer.model.attention import AttentionLayout, MultiHeadAttention
from dist_transformer.model.transformer import Transformer

if TYPE_CHECKING:
    from dist_transformer.inference.translator import ScoredText, Sources, Translation, Translator

_BATCH_TOKENS = {"cpu": 4096, "cuda": 32768}
_WORD = re.compile(r"\S+")
_UNKNOWN = "\ufffd".encode()

Span = tuple[int, int]
"""Start and end of a part of a text, in characters."""


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


def add_alignments(
    translator: "Translator",
    lines: Sequence[str],
    sources: "Sources",
    decoded: "dict[int, tuple[ScoredText, ...]]",
    translations: "Sequence[Translation]",
) -> "list[Translation]":
    """Align every hypothesis of the translations of lines.

    Args:
        decoded: hypotheses of each source.
    """
    model, vocabulary, front = translator.model, translator.tokenizer, len(translator.tag_ids)
    keys = [(i, rank) for i, found in decoded.items() for rank in range(len(found))]
    pairs = [(sources.ids[i], [*decoded[i][rank].tokens]) for i, rank in keys]
    linked = dict(zip(keys, link_tokens(model, pairs, front=front), strict=True))
    guided = all(each.is_guided for each in _models(model))
    aligned = []
    for line, places, protected, translation in zip(lines, sources.places, sources.lines, translations, strict=True):
        marks = {translator.placeholders[mark]: span for mark, (span, *_) in protected.spans.items()}
        ids = [token for i in places for token in sources.ids[i][front:]]
        of_source, hypotheses = token_spans(vocabulary.source, ids, line, marks), []
        for rank, one in enumerate(translation.hypotheses):
            of_target, start, found = token_spans(vocabulary.target, one.tokens, one.text, marks), 0, list[int]()
            for i in places:
                found += [start + place for place in linked[i, rank]]
                start += len(sources.ids[i]) - front
            ends = [(*of_source[place], *span) for place, span in zip(found, of_target, strict=True)]
            links = tuple(Link(*each) for each in ends if each[0] < each[1] and each[2] < each[3])
            words = word_pairs(links, line, one.text)
            hypotheses.append(replace(one, alignment=Alignment(links, words, guided)))
        aligned.append(replace(translation, hypotheses=tuple(hypotheses)))
    return aligned


def word_pairs(links: Sequence[Link], source: str, target: str) -> str:
    """Return the pairs of words that links connect, in Pharaoh's format."""
    words = [[word.span() for word in _WORD.finditer(text)] for text in (source, target)]
    found = {
        (i, j)
        for link in links
        for i in _touched(words[0], link.source_start, link.source_end)
        for j in _touched(words[1], link.target_start, link.target_end)
    }
    return " ".join(f"{i}-{j}" for i, j in sorted(found))


def _touched(words: Sequence[Span], start: int, end: int) -> list[int]:
    return [number for number, word in enumerate(words) if start < word[1] and word[0] < end]


def token_spans(tokenizer: Tokenizer, ids: Sequence[int], text: str, marks: dict[int, str]) -> list[Span]:
    """Find the part of a text that each of its tokens stands for; start and end are equal if there is none.

    Args:
        text: what the tokens were made from or became. Normalization, protection and splitting may have changed
            something: parts belong together by their characters without case, accents' forms and white space.
        marks: protected texts by the ids of their placeholders.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    own, parts = "", []
    for token in ids:
        if token in marks:
            piece = marks[token].encode()
        elif token < tokenizer.first_piece:
            piece = _UNKNOWN if token == UNK_ID else b""
        else:
            piece = tokenizer.piece_bytes(token)
        start = len(own)
        own += decoder.decode(piece)
        # A piece may end within a character.
        parts.append(slice(start, len(own) + bool(decoder.getstate()[0])))
    places = _places(own, text)
    found = [[*filter(None, places[part])] for part in parts]
    return [(min(found)[0], max(end for _, end in found)) if found else (0, 0) for found in found]


def _places(own: str, text: str) -> list[Span | None]:
    """Find the part of `text` that each character of `own` corresponds to."""
    ours, theirs = _folded(own), _folded(text)
    one, other = ("".join(character for character, _ in side) for side in (ours, theirs))
    blocks = [("equal", 0, len(one), 0, len(other))]
    if one != other:
        blocks = difflib.SequenceMatcher(None, one, other, autojunk=False).get_opcodes()
    found: list[Span | None] = [None] * len(own)
    for kind, first, stop, begin, end in blocks:
        for i in range(first, stop if begin < end else first):
            at = begin + i - first
            start, last = (at, at) if kind == "equal" else (begin, end - 1)
            span, before = (theirs[start][1], theirs[last][1] + 1), found[ours[i][1]]
            found[ours[i][1]] = (min(span[0], before[0]), max(span[1], before[1])) if before else span
    return found


def _folded(text: str) -> list[tuple[str, int]]:
    """Return the characters of a text that comparisons see, each with the place of what it is a part of."""
    folded = ((unicodedata.normalize("NFKD", each.casefold()), place) for place, each in enumerate(text))
    return [(character, place) for characters, place in folded for character in characters if not character.isspace()]


@torch.no_grad()
def link_tokens(
    model: DecodingModel, pairs: Sequence[IdPair], *, front: int, batch_tokens: int | None = None
) -> list[list[int]]:
    """Link each token of the targets to one of its source; return their places behind the first `front` ones.

    Args:
        pairs: ids without special tokens.
        front: tags in front of each source, to which no token is linked.
    """
    found: list[list[int]] = [[]] * len(pairs)
    for places in make_batches(pairs, batch_tokens or _BATCH_TOKENS[model.device.type]):
        source = pack_sentences([[*pairs[i][0], EOS_ID] for i in places], model.device)
        target = pack_sentences([[BOS_ID, *pairs[i][1]] for i in places], model.device)
        sums: list[torch.Tensor | int] = [0] * len(places)
        for each in _models(model):
            inputs: list[tuple[torch.Tensor, torch.Tensor, AttentionLayout]] = []
            attention = each.guided_attention
            hook = attention.register_forward_pre_hook(lambda _, given, kept=inputs: kept.append(given))
            try:
                each.decode(target, each.encode(source), source)
            finally:
                hook.remove()
            x_TD, memory_SD, _ = inputs[0]
            sides = zip(x_TD.split(target.lengths.tolist()), memory_SD.split(source.lengths.tolist()), strict=True)
            for number, (x, memory) in enumerate(sides):
                sums[number] = sums[number] + _weights(attention, x, memory, guided=each.is_guided)
        for i, weights_TS in zip(places, sums, strict=True):
            # The step that has read a token is one behind that which made it; the source ends with </s>.
            found[i] = weights_TS[1:, front:-1].argmax(1).tolist()
    return found


def _weights(
    attention: MultiHeadAttention, x_TD: torch.Tensor, memory_SD: torch.Tensor, *, guided: bool
) -> torch.Tensor:
    weights_HTS = attention.weights(x_TD, memory_SD)
    return weights_HTS[0] if guided else weights_HTS.mean(0)


def _models(model: DecodingModel) -> list[Transformer]:
    return model.each if isinstance(model, Ensemble) else [model]
