import pytest

from dist_transformer.data.vocabulary.byte_bpe import learn_byte_bpe
from dist_transformer.data.vocabulary.tokenizer import Tokenizer
from dist_transformer.inference.attention_maps import readable_pieces


@pytest.fixture(scope="module")
def multilingual() -> Tokenizer:
    return learn_byte_bpe(["über die Straße gehen", "你好 世界", "the street"] * 5, vocab_size=330)


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return readable_pieces(tokenizer, tokenizer.encode(text))


def test_pieces_are_text(multilingual: Tokenizer) -> None:
    assert pieces(multilingual, "über die Straße") == ["über", "▁die", "▁Straße", "</s>"]
    assert pieces(multilingual, "你好 世界") == ["你好", "▁世界", "</s>"]
    assert pieces(multilingual, "") == ["</s>"]


def test_pieces_put_together_are_the_sentence(multilingual: Tokenizer) -> None:
    text = "die Straßen, 你好好!"
    assert "".join(pieces(multilingual, text)).replace("▁", " ") == f"{text}</s>"


def test_a_part_of_a_character_is_one_mark(multilingual: Tokenizer) -> None:
    # Three bytes that were never merged.
    assert pieces(multilingual, "猫") == ["�", "�", "�", "</s>"]
    # Characters that differ in their first byte of three: the last two, no character in themselves, become a piece.
    ends = learn_byte_bpe(["一 帀 渀 縀"] * 5, vocab_size=261)
    assert len(ends.encode("鸀")) == 2
    assert pieces(ends, "鸀") == ["�", "�", "</s>"]


def test_a_joiner_within_a_word_is_shown() -> None:
    for word in ("می\u200cخواهم", "ක්\u200dෂ"):
        whole = learn_byte_bpe([word] * 5, vocab_size=330)
        assert pieces(whole, word) == [word, "</s>"]


def test_no_piece_breaks_a_line() -> None:
    keeping = learn_byte_bpe([], vocab_size=260, normalization="nfc")
    shown = pieces(keeping, "a\tb\nc\u0007")
    assert all(piece.isprintable() and not any(c.isspace() for c in piece) for piece in shown)
    assert "".join(shown) == "a▁b▁c�</s>"


def test_a_special_token_that_is_spelled_out_is_text(multilingual: Tokenizer) -> None:
    assert "".join(pieces(multilingual, "</s>")) == "</s></s>"
    assert len(pieces(multilingual, "</s>")) > 2
