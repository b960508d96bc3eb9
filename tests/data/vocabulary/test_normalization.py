"""Cleaning of text, against a rule that is written here from Python's tables of characters."""

import time
import unicodedata
from typing import get_args

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dist_transformer.data.vocabulary.byte_bpe import learn_byte_bpe, parse_byte_bpe
from dist_transformer.data.vocabulary.normalization import Normalization, clean, is_blank, may_be_cleaned
from dist_transformer.data.vocabulary.tokenizer import Tokenizer

CLEANING: tuple[Normalization, ...] = ("clean", "clean-nfc")
FORMS: dict[Normalization, Normalization] = {"clean": "nfkc", "clean-nfc": "nfc"}
# Printable by Python's tables, and yet nothing is seen: Default_Ignorable_Code_Point has them.
FILLERS = {
    *("COMBINING GRAPHEME JOINER", "HANGUL CHOSEONG FILLER", "HANGUL JUNGSEONG FILLER", "HANGUL FILLER"),
    *("HALFWIDTH HANGUL FILLER", "KHMER VOWEL INHERENT AQ", "KHMER VOWEL INHERENT AA"),
}
INVISIBLE = "\u200b\u00ad\u2060\u200e\ufe0f\x00"
FAMILY = "👨\u200d👩\u200d👧\u200d👦"


@pytest.fixture(scope="module")
def tokenizers() -> dict[Normalization, Tokenizer]:
    texts = ["the cat and the hat are here"] * 3
    learned = {rule: learn_byte_bpe(texts, vocab_size=280, normalization=rule) for rule in get_args(Normalization)}
    return {rule: parse_byte_bpe(tokenizer.content) for rule, tokenizer in learned.items()}


def cleaned(character: str) -> str:
    """Clean a character that is alone or between two Latin letters."""
    category, name = unicodedata.category(character), unicodedata.name(character, "")
    if category in ("Zs", "Zl", "Zp") or character in "\t\n\v\f\r\x85":
        return " "
    return "" if category in ("Cc", "Cf") or "VARIATION SELECTOR" in name or name in FILLERS else character


@pytest.mark.parametrize("rule", CLEANING)
def test_every_character(tokenizers: dict[Normalization, Tokenizer], rule: Normalization) -> None:
    found, form = tokenizers[rule], tokenizers[FORMS[rule]]
    changed = 0
    # The library has tables of its own, so what one version of Unicode does not know is left out. The last two planes
    # are for private use.
    for character in filter(lambda c: unicodedata.category(c) not in ("Cn", "Cs"), map(chr, range(0xF0100))):
        expected = cleaned(character)
        changed += expected != character
        assert may_be_cleaned(character) or expected == character, ascii(character)
        assert found.is_blank(character) == (expected.strip() == ""), ascii(character)
        for before, after in (("", ""), ("a", "b")):
            text = f"{before}{character}{after}"
            assert found.clean(text) == f"{before}{expected}{after}", ascii(text)
            assert found.normalize(text) == form.normalize(f"{before}{expected}{after}"), ascii(text)
    # Unicode 14: 65 Cc, 163 Cf, 19 separators, 260 variation selectors, 7 fillers; but the space stays.
    assert changed >= 65 + 163 + 19 + 260 + 7 - 1


@pytest.mark.parametrize("sign", ["\ufeff", "\u200b", "\u200e", "\u202a", "\x00", "\u2060"])
def test_a_sign_before_a_line_changes_no_id(tokenizers: dict[Normalization, Tokenizer], sign: str) -> None:
    line = "the cat and the hat"
    for rule in CLEANING:
        assert tokenizers[rule].encode(sign + line) == tokenizers[rule].encode(line)
        assert tokenizers[rule].encode("the c\u00adat and\u00a0the\u2009hat") == tokenizers[rule].encode(line)
    for rule in FORMS.values():
        # Stored vocabularies keep what they were learned with.
        assert tokenizers[rule].normalize(sign + line) == sign + line
        assert tokenizers[rule].encode(sign + line)[-5:] == tokenizers[rule].encode(line)[-5:]
        assert len(tokenizers[rule].encode(sign + line)) > len(tokenizers[rule].encode(line))


@pytest.mark.parametrize(
    "text",
    [
        "می\u200cخواهم",
        "کِتاب\u200cها",
        "ه\u200dه",
        "क्\u200dष",
        "क्\u200cष",
        "ශ්\u200dරී ලංකාව",
        "അവൻ\u200cറെ",
        FAMILY,
        "❤\u200d🔥",
    ],
)
def test_joiners_of_letters_and_pictures_stay(tokenizers: dict[Normalization, Tokenizer], text: str) -> None:
    for rule in CLEANING:
        assert tokenizers[rule].normalize(text) == unicodedata.normalize("NFKC", text)
        # Between them, whatever else is removed.
        planted = "\ufeff" + text.replace("\u200d", "\ufe0f\u200d\u2060").replace("\u200c", "\u200b\u200c\u200e")
        assert tokenizers[rule].normalize(planted) == unicodedata.normalize("NFKC", text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Auf\u200clage x\u200dy 1\u200d1", "Auflage xy 11"),
        ("\u200cक \u200dक", "क क"),
        ("क\u200c क\u200d", "क क"),
        ("क\u200da a\u200cक", "कa aक"),
        ("क\u200d👩 👩\u200dक", "क👩 👩क"),
        ("👩\u200c👩 a\u200d👩 👩\u200d", "👩👩 a👩 👩"),
        ("क्\u200d\u200cष क्\u200c\u200c\u200cष", "क्\u200dष क्\u200cष"),
        ("\u200c\u200d \u200d\u200c", " "),
    ],
)
def test_other_joiners_are_removed(tokenizers: dict[Normalization, Tokenizer], text: str, expected: str) -> None:
    for rule in CLEANING:
        assert tokenizers[rule].normalize(text) == expected


def test_lines_of_invisible_characters_are_blank() -> None:
    for text in (
        "",
        " \t",
        INVISIBLE,
        *INVISIBLE,
        f" {INVISIBLE}\u3000",
        "\u200c",
        "\u200d\u200d",
        "\u3164",
        "\ufeff\n",
    ):
        assert is_blank(text, "clean")
        assert is_blank(text, "clean-nfc")
        assert is_blank(text, "nfkc") == is_blank(text, "nfc") == (text.strip() == "")
    for text in (f"{INVISIBLE}.", "\u0301", "。", "\ue000", "🙂", "\u2800", "_", f"\u200b{FAMILY}"):
        assert not any(is_blank(text, rule) for rule in get_args(Normalization))


ANY = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
PLANTED = st.text(f"ab .1½ﬁ{INVISIBLE}\u200c\u200d\u00a0\t\n\x85\u1160\u0301कष्هم👩🏽❤", max_size=30)


@settings(max_examples=500, deadline=None)
@given(text=ANY | PLANTED)
@example(text="क\u200d\u200d\u200cष\u200c")
@example(text="\x1c\x1f")
def test_cleaning_agrees_with_the_normalisation(tokenizers: dict[Normalization, Tokenizer], text: str) -> None:
    for rule, tokenizer in tokenizers.items():
        once = clean(text, rule)
        assert clean(once, rule) == once
        assert tokenizer.encode(once) == tokenizer.encode(text)
        assert tokenizer.is_blank(text) == (tokenizer.normalize(text).strip() == "")
        if rule in FORMS.values() or not may_be_cleaned(text):
            assert once == text


@pytest.mark.parametrize("text", ["a\u00a0", "\u200b", "\u200d", "क\u200dक", "👩\u200d"])
def test_time_grows_with_the_text_and_not_with_its_square(text: str) -> None:
    def seconds(count: int) -> float:
        start = time.process_time()
        clean(text * count, "clean")
        return time.process_time() - start

    assert seconds(200_000) < 8 * max(0.1, seconds(50_000))
