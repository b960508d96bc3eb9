"""Text with HTML tags: what is translated, and where the tags go, with translations made by hand."""

import re
import time
from collections.abc import Sequence
from html.parser import HTMLParser
from random import Random

import pytest
import torch

from dist_transformer.base.errors import UserError
from dist_transformer.config.settings import ModelConfig
from dist_transformer.data.vocabulary.byte_bpe import learn_byte_bpe
from dist_transformer.data.vocabulary.placeholders import TERM_MARKS, TERM_TAGS, encode_all, placeholder_tags
from dist_transformer.data.vocabulary.tokenizer import Tokenizer
from dist_transformer.inference import translator as module
from dist_transformer.inference.aligned.alignment import align
from dist_transformer.inference.aligned.markup import Segment, parse, translate_documents
from dist_transformer.inference.beam import Hypothesis
from dist_transformer.inference.decoding import Decoding
from dist_transformer.inference.translation import Alignment, Link, ScoredText, Translation
from dist_transformer.inference.translator import Translator
from dist_transformer.model.transformer import Transformer


def rendered(document: str, order: Sequence[int] | None = None, words: dict[str, str] | None = None) -> str:
    """Translate a document word by word.

    Args:
        order: places of the source words in the translation; None: as in the source.
        words: translations; others are the words themselves, and a word that becomes nothing is left out.
    """

    def translate(lines: list[str]) -> list[Translation]:
        found = []
        for line in lines:
            spans = [word.span() for word in re.finditer(r"[\w\u093a-\u094d]+|[^\w\s]", line)]
            text, links = "", []
            for start, end in [spans[i] for i in order] if order and line else spans:
                word = (words or {}).get(line[start:end], line[start:end])
                # As in the source, but between words that moved there is a space.
                text += " " * bool(text and word and (order or line[start - 1 : start] == " "))
                links += [Link(start, end, len(text), len(text) + len(word))] * bool(word)
                text += word
            best = ScoredText(text=text, score=-1.0, tokens=(1,), alignment=Alignment(tuple(links), "", False))
            found.append(Translation(hypotheses=(best,), terms=1))
        return found

    (one,) = translate_documents([document], translate)
    return one.text


SAME = """<!doctype html><html><head><title>Two dogs</title><style>p > b {}</style></head>
<body class='a>b' data-x=1/2><!-- a <b>dog</b> -->
<p  id=x>A <b class="x">black</b> dog, <i>and <u>a</u> cat</i>.<br/>Two &amp; <img alt="a dog"> three</P >
<script>if (a<b) { "</p>" }</script><pre translate="no">a  dog <b>runs</b> &lt;</pre>
<ul><li>One<li>Two <span translate=no>dog<span>s</span></span> here</ul><![CDATA[a dog]]> 12 &nbsp; <?php dog ?>
</body></html>
"""


def test_everything_but_words_stays_byte_for_byte() -> None:
    assert rendered(SAME) == SAME
    texts = [part.text for part in parse(SAME) if isinstance(part, Segment)]
    assert texts == ["Two dogs", "A black dog, and a cat.", "Two & three", "One", "Two here"]


@pytest.mark.parametrize(
    ("document", "order", "output"),
    [
        ("A <b>black</b> dog", (2, 1, 0), "dog <b>black</b> A"),
        # Not around what came in between.
        ("<b>black dog</b> runs fast", (0, 2, 3, 1), "<b>black</b> runs fast dog"),
        ("<i>a <b>black</b> dog</i> runs", (3, 1, 0, 2), "runs <i><b>black</b> a dog</i>"),
        ("<b>a</b> <i>dog</i> runs", (2, 1, 0), "runs <i>dog</i> <b>a</b>"),
        # All of the text, with what nothing is linked to.
        ("<b>A dog</b>", (1, 0), "<b>dog A</b>"),
        ("see <img> dogs", (1, 0), "<img> dogs see"),
        ("see<img>. dogs", (2, 0, 1), "dogs see<img> ."),
        ("<img>a dog<!-- x -->", (1, 0), "<img>dog a<!-- x -->"),
        # What is shown is no comment: words around it stay two.
        ("a<b><i translate=no>5</i></b>dog", (1, 0), "<b><i translate=no>5</i></b>dog a"),
        ("a<img>dog", (1, 0), "dog a<img>"),
        ("a<!-- x -->b", (0,), "ab<!-- x -->"),
        ("a&nbsp;<img>&#32;dog", (1, 0), "<img> dog a"),
    ],
)
def test_tags_go_with_their_words(document: str, order: Sequence[int], output: str) -> None:
    assert rendered(document, order) == output


def test_an_element_without_a_word_takes_that_of_a_neighbour() -> None:
    assert rendered("in front <a>of</a> it", None, {"of": "", "front": "vor"}) == "in vor <a>it</a>"
    assert rendered("in <a></a> it") == "in <a></a> it"


def test_a_tag_is_never_within_a_link() -> None:
    def translate(lines: list[str]) -> list[Translation]:
        links = (Link(0, 3, 0, 4), Link(6, 12, 5, 11))
        best = ScoredText(text="Hund {name}", score=-1.0, tokens=(1,), alignment=Alignment(links, "", False))
        return [Translation(hypotheses=(best,)) for _ in lines]

    (one,) = translate_documents(["dog <sup>2</sup> {name}"], translate)
    assert one.text == "Hund <sup>{name}</sup>"


def test_a_full_stop_is_no_word() -> None:
    assert rendered("a <b>dog</b>.", None, {"dog": "!"}) == "<b>a</b> !."


@pytest.mark.parametrize(
    ("document", "output"),
    [
        ("<b>a <i>dog</b> runs</i>", "<b>a <i>dog</b> runs</i>"),
        ("a</b> dog <i>runs", "a</b> dog <i>runs"),
        ("<b>a<p>dog</b>", "<b>a<p>dog</b>"),
        ("a dog <b", "a dog <b"),
        ("a < dog & 3 > 2 &lt;b&gt; &x", "a &lt; dog &amp; 3 &gt; 2 &lt;b&gt; &amp;x"),
        ("a &eacute;&#233;&#99999999999;", "a éé\ufffd"),
        ("a <!-- <b> dog", "a <!-- <b> dog"),
        ('a <b x="dog>', 'a <b x="dog>'),
        ("<b></b>", "<b></b>"),
        ("", ""),
    ],
)
def test_damaged_markup_loses_nothing(document: str, output: str) -> None:
    assert rendered(document) == output


def test_an_attribute_decides_what_is_not_translated() -> None:
    kept = ['<p TRANSLATE="no">a</p>', "<p class=b translate = 'no' id>a</p>", "<p translate=no>a</p>"]
    read = ['<p title="translate = no">a</p>', "<p translate='no-op'>a</p>", "<p translate>a</p>", "<p x=y/>a</p>"]
    assert not [part for document in kept for part in parse(document) if isinstance(part, Segment)]
    assert [part.text for document in read for part in parse(document) if isinstance(part, Segment)] == ["a"] * 4


@pytest.mark.parametrize(
    ("document", "texts"),
    [
        ("<ul><li translate=no>a<li>dog</ul><p>cat", ["dog", "cat"]),
        ("<div><p translate=no>a</div>dog", ["dog"]),
        ("<div><p translate=no>a</div><li translate=no>b<li>dog", ["dog"]),
        ("<li translate=no>a<ul><li>b<li>c</ul>d</li>dog", ["dog"]),
        ("<p translate=no>a</b>b<table><tr><td>c<td>d</table>e</p>dog", ["dog"]),
        ("<p translate=no>a<p translate=no>b<p>dog", ["dog"]),
    ],
)
def test_an_end_tag_may_be_left_out(document: str, texts: list[str]) -> None:
    parts = [*parse(document)]
    assert [part.text for part in parts if isinstance(part, Segment)] == texts
    assert "".join(part if isinstance(part, str) else part.raw for part in parts) == document


def test_a_vowel_sign_stays_in_its_word() -> None:
    assert rendered("<b>हिन्दी</b> भाषा", (1, 0)) == "भाषा <b>हिन्दी</b>"


@pytest.mark.parametrize("code", ["<!-- <b>", "<b x='>", "<script> <b>", "<i translate=no> <b>"])
def test_what_never_ends_takes_the_rest(code: str) -> None:
    assert [part.text for part in parse(f"a {code} dog") if isinstance(part, Segment)] == ["a"]


class Balance(HTMLParser):
    """Python's own parser, which checks that elements do not cross."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.open, self.tags, self.crosses = list[str](), list[str](), False
        self.feed(document)
        self.close()

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.open.append(tag)
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        self.crosses |= self.open.pop() != tag
        self.tags.append(f"/{tag}")


def test_elements_never_cross_whatever_the_order_of_words() -> None:
    def drawn(words: list[str], random: Random) -> list[str]:
        """Put elements around parts of the words."""
        if not words or random.random() < 0.2:
            return words
        first, last = sorted(random.choices(range(len(words) + 1), k=2))
        name = random.choice("abisu")
        inner = drawn(words[first:last], random)
        return [*drawn(words[:first], random), f"<{name}>", *inner, f"</{name}>", *drawn(words[last:], random)]

    for seed in range(300):
        random = Random(seed)
        words = [f"word{number}" for number in range(8)]
        document = " ".join(drawn(words, random))
        output = rendered(document, random.sample(range(8), 8), {"word3": "", "word4": ""})
        before, after = Balance(document), Balance(output)
        assert not after.crosses
        assert not after.open
        assert sorted(after.tags) == sorted(before.tags)


MANY = 10_000
HOSTILE = {
    "open": "<b>x " * 3 * MANY,
    "nested": "<b>" * MANY + "x" + "</b>" * MANY,
    "siblings": "<b>x</b> " * MANY,
    "crossing": "<b>x<i>y</b>z</i>" * MANY,
    "comments": "<!--" * MANY,
    "declarations": "<![CDATA[" * MANY,
    "entities": "x&#" * MANY + "9" * MANY,
    "quotes": '<a b="' * MANY,
    "attributes": "<a" + " =" * MANY,
    "scripts": "<script></scrip" * MANY,
    "spaces": "x" + " " * 10 * MANY + "<b>",
    "brackets": "<" * 10 * MANY,
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_markup_takes_no_time(kind: str) -> None:
    started = time.process_time()
    rendered(HOSTILE[kind])
    assert time.process_time() - started < 1


def a_model(tokenizer: Tokenizer) -> Transformer:
    shape = {"width": 8, "heads": 2, "ffn_width": 8, "encoder_layers": 1, "decoder_layers": 1, "max_positions": 64}
    return Transformer(ModelConfig(**shape, vocab_size=tokenizer.vocab_size))  # type: ignore[arg-type]


def test_a_copied_term_is_linked_to_its_source_term() -> None:
    before, after = TERM_MARKS
    tokenizer = learn_byte_bpe(["the dog Hund"] * 5, vocab_size=300, tags=TERM_TAGS)
    (source,) = encode_all(tokenizer, [f"the dog {before} Hund {after}"])
    target = tokenizer.encode("Hund")
    found = align(a_model(tokenizer), tokenizer, ("the dog", "Hund"), (source, target), [len(source) - 2] * len(target))
    assert {link[:2] for link in found.links} == {(4, 7)}
    assert found.words == "1-0"


def test_documents_on_their_way_through_a_translator(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["See the house, and the dog."]
    tokenizer = learn_byte_bpe(texts * 5, vocab_size=300, tags=placeholder_tags(4))

    def translator_of(settings: Decoding) -> Translator:
        return Translator(a_model(tokenizer), tokenizer, torch.device("cpu"), settings)

    def echo(_, sources, **how):  # type: ignore[no-untyped-def]
        return [[Hypothesis(tokens=source, score=-1.0, log_probability=-1.0)] for source in sources]

    monkeypatch.setattr(module, "beam_search", echo)
    translator = translator_of(Decoding(markup="html"))
    lines = ["<p>See <b>the</b> house.</p>", "<p> &nbsp; </p>", "", "<b>the dog</b>"]
    found = [one.text for one in translator.translate(lines)]
    assert [re.sub("</?b>", "", text) for text in found] == [re.sub("</?b>", "", line) for line in lines]
    assert (found[0].count("<b>"), found[3]) == (1, lines[3])
    # A segment of spans alone is its own translation, and its tags stay where they are.
    protecting = Decoding(markup="html", protect=("emails", "urls", "placeholders"))
    spans = "<li><a>a@b.example</a>, <b>{name}</b></li> <i>https://c.example/a</i> <img>{name}"
    assert translator_of(protecting).translate([spans])[0].text == spans
    with pytest.raises(UserError, match="prefixes are for text without markup"):
        translator.translate(lines, prefixes=lines)
