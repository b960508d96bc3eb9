"""Ids that are looked up word by word against those of the tokenizers library, line by line."""

import itertools
from collections.abc import Sequence
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_transformer.data.prepare import words
from dist_transformer.data.prepare.words import WordIds
from dist_transformer.data.vocabulary.byte_bpe import learn_byte_bpe
from dist_transformer.data.vocabulary.normalization import Normalization
from dist_transformer.data.vocabulary.tokenizer import Tokenizer

TEXTS = (
    "the cat's   hat isn't  here",
    " leading and trailing ",
    "  two  at  both  ends  ",
    "tab\there, no-break\u00a0space, ideographic\u3000space \u00a0 alone",
    "a\u0301 \u0301b \u200d c\u200d diaeresis \u00a8 and \u00a8x",
    "½ ﬁne ＦＵＬＬ １２３ 4,000.50 </s> <2de> <pad>",
    "你是谁？ 我不知道。 한국어 ไทย हिन्दी",
    "x" * 200 + " " + "y" * 63 + " " + "-" * 70,
    "", " ", "  ", "   ", "\u00a0", "line\u2028separator\x85next \x0c feed",
    "\ufeffThe cat \u200b \u200c here\u200e", "the hy\u00adphen \u202a\u00a0 x", "\u200b\u00ad\u2060",
    "می\u200cخواهم کتاب\u200cها می\u200cخواهم",
)  # fmt: skip
CHARACTERS = "ab'sĲİß \u00a0\u3000\t\u0301\u0308\u200d\u00a8½ﬁ12.-,你가\u1100\u1161🙂\x85\u2028"
CHARACTERS += "\u200b\u200c\ufeff\u00ad\ufe0f\x00\x1fक"


@pytest.fixture(scope="module", params=itertools.product(get_args(Normalization), (False, True)))
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    normalization: Normalization
    normalization, lowercase = request.param
    texts = [*TEXTS, "the cat and the hat are here", "a b a b c's isn't"] * 3
    return learn_byte_bpe(texts, vocab_size=400, lowercase=lowercase, normalization=normalization, tags=("<2de>",))


def rows(found: words.TokenLists) -> list[list[int]]:
    return [row.tolist() for row in np.split(found.values, found.offsets[1:-1])] if len(found.offsets) > 1 else []


def test_ids_are_those_of_whole_lines(tokenizer: Tokenizer) -> None:
    word_ids = WordIds(tokenizer, np.uint16)
    for texts in (TEXTS, TEXTS[::-1], TEXTS[:1], ()):
        assert rows(word_ids.encode(texts)) == tokenizer.encode_batch(texts)


@given(st.lists(st.text(st.sampled_from(CHARACTERS) | st.characters(), max_size=20), max_size=8))
def test_any_text(tokenizer: Tokenizer, texts: Sequence[str]) -> None:
    texts = [text.encode("utf-8", "ignore").decode("utf-8") for text in texts]
    assert rows(WordIds(tokenizer, np.uint16).encode(texts)) == tokenizer.encode_batch(texts)


def test_a_full_dictionary_forgets_the_rare_words(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "_MOST_WORDS", 20)
    rng, word_ids = np.random.default_rng(1), WordIds(tokenizer, np.uint16)
    for _ in range(30):
        texts = [" ".join(["the", *(f"w{number}" for number in rng.integers(0, 300, 5))]) for _ in range(4)]
        assert rows(word_ids.encode(texts)) == tokenizer.encode_batch(texts)
        assert len(word_ids._number_of) <= 20 + 6 * 4
    assert " the" in word_ids._number_of


def test_texts_without_words_are_soon_encoded_whole(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "_TRIED_WORDS", 50)
    word_ids = WordIds(tokenizer, np.uint16)
    for start in range(0, 120, 20):
        texts = [f"句子{number}没有空格" for number in range(start, start + 20)]
        assert rows(word_ids.encode(texts)) == tokenizer.encode_batch(texts)
    assert len(word_ids._number_of) == 60
