"""Text with HTML tags: the text is translated, and the tags are set around what the words between them became.

Everything but text stays byte for byte, which parsers that build a tree do not promise, and the expression below takes
linear time, which Python's `html.parser` does not for comments and tags that never end.
"""

import html
import itertools
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from dist_transformer.data.text.alignments import Span
from dist_transformer.data.text.terms import TOKEN
from dist_transformer.inference.translation import Link, Translation, join_hypotheses

# As a browser reads it: what never ends takes the rest. Nothing is read twice, so hostile text takes no longer.
_ATTRIBUTES = r"""(?:[^>=]|=\s*+(?:"[^"]*+(?:"|\Z)|'[^']*+(?:'|\Z)|[^\s>]*+))*+(?:>|\Z)"""
_CODE = re.compile(
    rf"""
    <!--(?:-?>|.*?(?:--!?>|\Z))
    |<(?:[!?]|/(?![a-z]))[^>]*+(?:>|\Z)
    |<(script|style|iframe|noembed|noframes|xmp)(?=[\s/>]){_ATTRIBUTES}.*?(?:</\1(?=[\s/>])[^>]*+(?:>|\Z)|\Z)
    |<(?P<slash>/?)(?P<name>[a-z][^\s/>]*+)(?P<attributes>{_ATTRIBUTES})
    """,
    re.DOTALL | re.IGNORECASE | re.VERBOSE,
)
_ATTRIBUTE = re.compile(r"""([^\s=>/]+)(?:\s*=\s*("[^"]*|'[^']*|[^\s>]*)["']?)?""")
_QUOTES = "\"' "
Kind = Literal["start", "end", "shown", "other"]
"""Kind of a tag; "shown": a reader sees something, as of a picture or of what is not translated."""
# Python limits the digits of a number; no character needs so many.
_NO_CHARACTER = re.compile(r"&#[0-9]{8,};?")
# Elements at which a sentence ends. All others are a part of it.
_BLOCKS = re.compile(
    "address|article|aside|blockquote|body|br|button|caption|center|col|colgroup|dd|details|dialog|dir|div|dl|dt|"
    "fieldset|figcaption|figure|footer|form|frame|frameset|h[1-6]|head|header|hgroup|hr|html|legend|li|link|main|menu|"
    "meta|nav|ol|optgroup|option|p|pre|search|section|select|summary|table|tbody|td|template|textarea|tfoot|th|thead|"
    "title|tr|ul"
)
# Those whose end tag may be left out.
_OPEN_ENDED = re.compile("body|caption|colgroup|dd|dt|head|html|li|optgroup|option|p|tbody|td|tfoot|th|thead|tr")
_EMPTY = re.compile("area|base|br|col|embed|hr|img|input|link|meta|param|source|track|wbr")
_WHOLE = -1
"""Number of a segment as the parent of its elements, which have the numbers of their start tags."""


class Tag(NamedTuple):
    """Anything in a segment that is not text."""

    raw: str
    place: int
    """Characters of the segment's text before it."""
    kind: Kind
    name: str
    spaces: tuple[bool, bool]
    """Whether there is white space before it, and after it."""


class Segment:
    """Text that is translated as a whole, with its tags.

    Args:
        start: where it begins in the document.
    """

    def __init__(self, start: int) -> None:
        self.start, self.tags = start, list[Tag]()
        self.raw = ""
        """Part of the document, without white space at its ends."""
        self._pieces, self._length, self._in_space = list[str](), 0, True
        # Whether white space is directly before, and something that is shown between two texts.
        self._behind_space = self._behind_shown = False

    @property
    def text(self) -> str:
        return "".join(self._pieces).rstrip()

    def add_text(self, raw: str) -> None:
        piece = re.sub(r"\s+", " ", html.unescape(_NO_CHARACTER.sub("\ufffd", raw)))
        if self.tags and piece[:1] == " ":
            self.tags[-1] = self.tags[-1]._replace(spaces=(self.tags[-1].spaces[0], True))
        self._behind_space = piece[-1:] == " "
        piece = piece.lstrip() if self._in_space else piece
        if piece:
            if self._behind_shown and self._pieces and piece[0].isalnum() and self._pieces[-1][-1].isalnum():
                piece = f" {piece}"
            self._behind_shown = False
            self._pieces.append(piece)
            self._length += len(piece)
            self._in_space = piece[-1] == " "

    def add_tag(self, raw: str, kind: Kind, name: str) -> None:
        self.tags.append(Tag(raw, self._length, kind, name, (self._behind_space, False)))
        self._behind_space, self._behind_shown = False, self._behind_shown or kind == "shown"

    def partners(self) -> dict[int, int]:
        """Return the numbers of the end tags by those of their start tags; others have no partner."""
        found, started, counts = dict[int, int](), list[int](), Counter[str]()
        for number, tag in enumerate(self.tags):
            if tag.kind == "start":
                started.append(number)
                counts[tag.name] += 1
            elif tag.kind == "end" and counts[tag.name]:
                # Elements that began later cross this one.
                while self.tags[start := started.pop()].name != tag.name:
                    counts[self.tags[start].name] -= 1
                counts[tag.name] -= 1
                found[start] = number
        return found


def parse(document: str) -> Iterator[str | Segment]:
    """Split a document into what stays as it is and segments."""
    segment, end = Segment(0), 0
    hidden, depth, inner, begin = "", 0, 0, 0
    for code in _CODE.finditer(document):
        if not hidden:
            segment.add_text(document[end : code.start()])
            begin = code.start()
        end, name = code.end(), (code["name"] or "").lower()
        kind: Kind = "shown" if name == "img" else "other"
        if name and not _EMPTY.fullmatch(name) and not code[0].endswith("/>"):
            kind = "end" if code["slash"] else "start"
        step = (kind == "start") - (kind == "end")
        if _OPEN_ENDED.fullmatch(hidden):
            inner += step * bool(_BLOCKS.fullmatch(name) and not _OPEN_ENDED.fullmatch(name))
            if inner < 0 or (inner == 0 and (kind, name) == ("start", hidden)):
                # It ends before the next one of its kind, or with what it is in.
                yield from _whole(document, segment, begin)
                yield document[begin : code.start()]
                segment, hidden, depth, begin = Segment(code.start()), "", 0, code.start()
        if hidden or (kind == "start" and _is_kept(code["attributes"])):
            hidden, inner = hidden or name, inner * bool(hidden)
            depth += (name == hidden and not inner) * step
            if depth:
                continue
            hidden, kind = "", "shown"
        if _BLOCKS.fullmatch(name):
            yield from _whole(document, segment, begin)
            yield document[begin:end]
            segment = Segment(end)
        else:
            segment.add_tag(document[begin:end], kind, name)
    if hidden:
        segment.add_tag(document[begin:], "shown", hidden)
    else:
        segment.add_text(document[end:])
    yield from _whole(document, segment, len(document))


def _is_kept(attributes: str) -> bool:
    """Tell whether an element has the attribute translate="no"."""
    found = (f"{name}={value.strip(_QUOTES)}" for name, value in _ATTRIBUTE.findall(attributes))
    return any(each.lower() == "translate=no" for each in found)


def _whole(document: str, segment: Segment, end: int) -> Iterator[str | Segment]:
    """Give a segment with the white space around it, or what has no word to translate as it is."""
    raw = document[segment.start : end]
    if not any(map(str.isalpha, segment.text)):
        yield raw
        return
    yield raw[: len(raw) - len(raw.lstrip())]
    segment.raw = raw.strip()
    yield segment
    yield raw[len(raw.rstrip()) :]


class _Placement:
    """Places of a segment's tags in its translation.

    An element is around the run of words of which most are linked to it, among those that its parent has and none of
    its siblings. So elements never cross, and each tag comes once.

    Args:
        links: tokens of the segment's text and of the translation that belong together.
    """

    def __init__(self, segment: Segment, translation: str, links: Sequence[Link]) -> None:
        self.tags, self.text, self.partners = segment.tags, translation, segment.partners()
        self.words = _words(translation, links)
        source = segment.text
        starts, ends = [start for start, _ in self.words], [end for _, end in self.words]
        # What each word or sign is linked to; and by their order in the source, all links, and those of words, with the
        # first and the last word in the translation.
        self.linked: list[list[Span]] = [[] for _ in self.words]
        self.links, self.ends = list[tuple[Span, Span]](), list[tuple[Span, Span]]()
        for start, end, first, last in sorted(links):
            if _has_word(source[start:end]) != _has_word(translation[first:last]):
                # A full stop is no word's translation.
                continue
            words = range(bisect_right(ends, first), bisect_left(starts, last))
            for word in words:
                self.linked[word].append((start, end))
            if words:
                self.links.append(((start, end), (words[0], words[-1])))
                self.ends += self.links[-1:] * _has_word(translation[first:last])
        # Of each element by its start tag, and of the whole segment: its part of the source, and its run of words.
        self.spans, self.runs = {_WHOLE: (0, len(source))}, {_WHOLE: (0, len(self.words))}
        self.owners = [_WHOLE] * len(self.words)
        """Innermost element of each word."""
        self.around = set[int]()
        """Tags around words."""

    def render(self) -> str:
        """Write the translation with the tags."""
        if not self.words:
            return html.escape(self.text, quote=False) + "".join(tag.raw for tag in self.tags)
        sides = ([""] * len(self.words), [""] * len(self.words))
        for number, (tag, (side, word)) in enumerate(zip(self.tags, self._places(), strict=True)):
            # A tag alone keeps the space between it and the word.
            space = " " * (tag.spaces[1 - side] and number not in self.around)
            sides[side][word] += space * side + tag.raw + space * (1 - side)
        parts, last = list[str](), 0
        for before, (start, end), after in zip(sides[0], self.words, sides[1], strict=True):
            parts += [self.text[last:start], before, self.text[start:end], after]
            last = end
        parts.append(self.text[last:])
        return "".join(html.escape(part, quote=False) if place % 2 == 0 else part for place, part in enumerate(parts))

    def _places(self) -> list[tuple[int, int]]:
        """Return the side of a word, 0 for before, and the word, for each tag.

        Tags that are at one place are there in the order of the source.
        """
        places, parents = [(0, 0)] * len(self.tags), [_WHOLE]
        for number, tag in enumerate(self.tags):
            parent, partner = parents[-1], self.partners.get(number)
            if partner is not None:
                self.spans[number] = (tag.place, self.tags[partner].place)
                first, stop = self._run(self.spans[number], parent)
                places[number], places[partner] = (0, first), (1, stop - 1)
                if first == stop:
                    places[number] = places[partner] = self._beside(tag, parent, places)
                    word = places[number][1]
                    if tag.place < self.tags[partner].place and self.owners[word] == parent:
                        # Nothing is linked to its words, but a reader needs something to see or to click.
                        first, stop = word, word + 1
                        places[number], places[partner] = (0, word), (1, word)
                if first < stop:
                    self.around |= {number, partner}
                self.runs[number] = first, stop
                self.owners[first:stop] = [number] * (stop - first)
                parents.append(number)
            elif parent != _WHOLE and self.partners[parent] == number:
                parents.pop()
            else:
                places[number] = self._beside(tag, parent, places)
        return places

    def _run(self, span: Span, parent: int) -> Span:
        if span == self.spans[parent]:
            return self.runs[parent]
        # From the first to the last word that has a link to the element, so that many elements take linear time.
        inner = bisect_left(self.links, ((span[0], 0), (0, 0)))
        while inner and self.links[inner - 1][0][1] > span[0]:
            inner -= 1
        places = [
            word for _, words in self.links[inner : bisect_left(self.links, ((span[1], 0), (0, 0)))] for word in words
        ]
        begin, stop = self.runs[parent]
        best, found = 0, (0, 0)
        total, first = 0, 0
        for word in range(max(begin, min(places, default=stop)), min(stop, max(places, default=begin) + 1)):
            if total <= 0:
                total, first = 0, word
            inside = sum(start < span[1] and span[0] < end for start, end in self.linked[word])
            total += bool(self.linked[word]) * (1 if 2 * inside >= len(self.linked[word]) else -1)
            if self.owners[word] != parent:
                total = 0
            elif total > best:
                best, found = total, (first, word + 1)
        return found

    def _beside(self, tag: Tag, parent: int, places: Sequence[tuple[int, int]]) -> tuple[int, int]:
        """Find the place of a tag alone: before what the next word became, or behind what the last one did."""
        (first, stop), (begin, end) = self.runs[parent], self.spans[parent]
        if first == stop:
            return places[parent]
        if tag.place <= begin:
            return 0, first
        following = bisect_left(self.ends, ((tag.place, 0), (0, 0)))
        found = [(0, words[0]) for _, words in self.ends[following : following + 1]]
        found += [(1, words[1]) for _, words in self.ends[max(following - 1, 0) : following]]
        if tag.kind == "end" or (tag.kind != "start" and not tag.spaces[0]):
            found.reverse()
        fitting = [(side, word) for side, word in found if first <= word < stop and tag.place < end]
        return fitting[0] if fitting else (1, stop - 1)


def _words(text: str, links: Sequence[Link]) -> list[Span]:
    """Find the words of a translation. What one link holds is one word, such as a protected {name}."""
    words = [word.span() for word in TOKEN.finditer(text)]
    starts, ends = [start for start, _ in words], [end for _, end in words]
    parts = [(bisect_right(ends, link.target_start), bisect_left(starts, link.target_end)) for link in links]
    joined = {word for first, stop in parts for word in range(first + 1, stop)}
    firsts = [word for word in range(len(words)) if word not in joined]
    return [(starts[one], ends[other - 1]) for one, other in itertools.pairwise([*firsts, len(words)])]


def _has_word(text: str) -> bool:
    return any(map(str.isalnum, text))


def translate_documents(
    documents: Sequence[str], translate: Callable[[list[str]], list[Translation]]
) -> list[Translation]:
    """Translate the text of documents.

    Args:
        translate: returns a translation of each line, with alignments.

    Returns:
        a translation of each document, with one hypothesis.
    """
    parsed = [[*parse(document)] for document in documents]
    segments = [part for parts in parsed for part in parts if isinstance(part, Segment)]
    # A blank line is for documents without text.
    found = translate(["", *(segment.text for segment in segments)])
    nothing, following, results = found[0], iter(found[1:]), []
    for parts in parsed:
        own, text = list[Translation](), ""
        for part in parts:
            if isinstance(part, Segment):
                own.append(next(following))
                best = own[-1].hypotheses[0]
                links = best.alignment.links if best.alignment else ()
                # A text of spans alone is its own translation, which has no tokens.
                is_kept = best.text and not best.tokens
                text += part.raw if is_kept else _Placement(part, best.text, links).render()
            else:
                text += part
        own = own or [nothing]
        best = join_hypotheses([one.hypotheses[:1] for one in own])[0]
        results.append(
            replace(
                own[0],
                hypotheses=(replace(best, text=text),),
                split=next((one.split for one in own if one.split), None),
                beyond_training=any(one.beyond_training for one in own),
                terms=sum(one.terms for one in own),
            )
        )
    return results
