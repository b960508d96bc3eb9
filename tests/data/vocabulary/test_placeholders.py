"""Text with marks of placeholders, in vocabularies of all kinds that are learned."""

import pytest

from dist_transformer.data.vocabulary.byte_bpe import learn_byte_bpe
from dist_transformer.data.vocabulary.placeholders import (
    decode_marked,
    encode_all,
    encode_marked,
    marks,
    placeholder_tags,
    placeholders_of,
)
from dist_transformer.data.vocabulary.sentence_piece import learn_sentence_piece
from dist_transformer.data.vocabulary.tokenizer import Tokenizer

TEXTS = ["Ein Haus steht am See.", "Ein Hund, und ein Haus", "Häuser über Häuser", "das Haus, das Haus"] * 9
A, B = marks(2)
TAGS = ("<2de>", *placeholder_tags(2))


@pytest.fixture(scope="module", params=["bytes", "unigram", "bpe"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    if request.param == "bytes":
        return learn_byte_bpe(TEXTS, vocab_size=320, tags=TAGS)
    how = {"byte_fallback": False, "character_coverage": 1.0, "normalization": "clean", "tags": TAGS}
    return learn_sentence_piece(TEXTS, vocab_size=60, model_type=request.param, **how)  # type: ignore[arg-type]


def test_marks_are_entries_and_the_text_around_them_stays(tokenizer: Tokenizer) -> None:
    assert placeholders_of(tokenizer) == {A: 5, B: 6}
    text = f"Ein Haus {A} am See{B}, das Haus"
    plain, ids = encode_all(tokenizer, ["Ein Haus", text])
    assert plain == tokenizer.encode("Ein Haus")
    assert [token for token in ids if token in (5, 6)] == [5, 6]
    at, then = ids.index(5), ids.index(6)
    assert ids[:at] == plain
    # A word after a mark begins as one within a text does.
    assert ids[at + 1 : then] == tokenizer.encode("Ein am See")[len(tokenizer.encode("Ein")) :]
    assert " ".join(decode_marked(tokenizer, ids).replace(A, f" {A} ").replace(B, f" {B} ").split()) == (
        f"Ein Haus {A} am See {B} , das Haus"
    )


def test_a_text_of_marks_alone(tokenizer: Tokenizer) -> None:
    assert encode_marked(tokenizer, f" {B}{A} ", tokenizer.encode) == [6, 5]
    assert decode_marked(tokenizer, [6, 5]) == f"{B}{A}"
