"""The places where long texts are cut, and the joined translations of the parts."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_transformer.data.vocabulary.byte_bpe import learn_byte_bpe
from dist_transformer.data.vocabulary.tokenizer import Tokenizer
from dist_transformer.inference.translation import ScoredText, join_hypotheses, join_texts, split_text


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """One whose pieces are single bytes, " cat" and parts of that."""
    return learn_byte_bpe([" cat cat cat co cu"] * 9, vocab_size=263)


def without_space(text: str) -> str:
    return "".join(text.split())


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("It rains. We stay!  Do you?", ["It rains.", "We stay!", "Do you?"]),
        ('He said "Go." (Now!) Then he left…\tGood', ['He said "Go."', "(Now!)", "Then he left…", "Good"]),
        ("It is 3.5 m or v1.2.3 long.So", ["It is 3.5 m or v1.2.3 long.So"]),
        ("Wait . . . What? ! Yes", ["Wait . . .", "What? !", "Yes"]),
        (". . . . A", [". . . .", "A"]),
        ("Then he left… but came back. End", ["Then he left… but came back.", "End"]),
        ("a dog runs. two men sit … they rest", ["a dog runs.", "two men sit …", "they rest"]),
        ("Mr. Smith met Dr. J. S. Bach. They left.", ["Mr. Smith met Dr. J. S. Bach.", "They left."]),
        (
            "Das ist z. B. am 3. Oktober so (vgl. Abb. 3). Gut.",
            ["Das ist z. B. am 3. Oktober so (vgl. Abb. 3).", "Gut."],
        ),
        (
            "See e.g. the U.S. Army. That was in 1990. Nr. 5 lives!",
            ["See e.g. the U.S. Army.", "That was in 1990.", "Nr. 5 lives!"],
        ),
        ("你好。“再见！”好!那么，走？走", ["你好。", "“再见！”", "好!", "那么，走？", "走"]),
        ("एक है। दो हैं॥तीन", ["एक है।", "दो हैं॥", "तीन"]),
        ("هل؟ نعم۔لا", ["هل؟", "نعم۔", "لا"]),
        ("  one  ", ["one"]),
        ("...", ["..."]),
    ],
)
def test_sentences_end_where_their_signs_say(tokenizer: Tokenizer, text: str, parts: list[str]) -> None:
    assert split_text(text, tokenizer, 1_000) == parts


def test_a_long_sentence_is_cut_at_white_space(tokenizer: Tokenizer) -> None:
    # A part loses the space it begins with, and the word then has one more token.
    assert [len(tokenizer.encode(text)) for text in (" cat", "cat", "cat cat cat")] == [1, 2, 4]
    assert split_text("cat" + " cat" * 9, tokenizer, 4) == ["cat cat cat"] * 3 + ["cat"]
    assert split_text("a b!  cat" + " cat" * 6 + " ! z", tokenizer, 6) == [
        "a b!",
        "cat cat cat cat cat",
        "cat cat !",
        "z",
    ]
    assert split_text("a bcdefgh", tokenizer, 4) == ["a", "bcde", "fgh"]


def test_a_term_stays_with_its_translation(tokenizer: Tokenizer) -> None:
    term = "cu \ufffe co \uffff"
    assert split_text(f"cat {term} cat {term} {term}", tokenizer, 17) == [f"cat {term} cat", term, term]


def test_without_white_space_it_is_cut_between_characters(tokenizer: Tokenizer) -> None:
    assert split_text("x" * 11, tokenizer, 4) == ["xxxx", "xxxx", "xxx"]
    # Three bytes each.
    assert split_text("猫狗鸟", tokenizer, 7) == ["猫狗", "鸟"]
    assert split_text("🐈🐕", tokenizer, 4) == ["🐈", "🐕"]
    # A letter keeps its mark (two bytes), even where there is room for the letter.
    assert split_text("abcx\u0323d", tokenizer, 4) == ["abc", "x\u0323d"]


@settings(max_examples=300)
@given(
    text=st.text(max_size=100) | st.text(alphabet="ab the.!。猫🐈\u0323\u200d \n½ﷺ", max_size=200),
    limit=st.integers(4, 40),
)
def test_parts_fit_and_hold_all_of_the_text(tokenizer: Tokenizer, text: str, limit: int) -> None:
    parts = split_text(text, tokenizer, limit)
    assert all(part.strip() for part in parts)
    assert max((len(tokenizer.encode(part)) for part in parts), default=0) <= limit
    whole = "".join(tokenizer.decode(tokenizer.encode(part)) for part in parts)
    # A joiner at a cut is no longer between two letters.
    assert without_space(whole).replace("\u200d", "") == without_space(tokenizer.normalize(text)).replace("\u200d", "")


@pytest.mark.parametrize("text", ["x", "猫", ".", "! ", ' "', " "])
def test_time_grows_with_the_text_and_not_with_its_square(tokenizer: Tokenizer, text: str) -> None:
    def seconds(count: int) -> float:
        start = time.process_time()
        split_text("a" + text * count, tokenizer, 100)
        return time.process_time() - start

    assert seconds(40_000) < 8 * max(0.1, seconds(10_000))


def test_translations_are_joined_as_their_script_is_written() -> None:
    assert join_texts(["Es regnet.", "Wir bleiben."]) == "Es regnet. Wir bleiben."
    assert join_texts(["你好。", "再见!", "3 只猫。"]) == "你好。再见!3 只猫。".replace("!3", "! 3")
    assert join_texts(["ねこ", "です"]) == "ねこです"
    assert join_texts(["안녕.", "잘 가."]) == "안녕. 잘 가."
    # Of Thai, a space ends a sentence.
    assert join_texts(["ฝนตก", "เรานอน"]) == "ฝนตก เรานอน"
    assert join_texts(["", "a", "", "b", ""]) == "a b"
    assert join_texts(["", ""]) == join_texts([]) == ""


def test_counts_of_parts_are_added() -> None:
    part = ScoredText(text="a", score=-1.0, tokens=(5,), missing_spans=1, terms_kept=2)
    joined = ScoredText(text="a a", score=-1.0, tokens=(5, 5), missing_spans=2, terms_kept=4)
    assert join_hypotheses([(part,), (part,)]) == (joined,)
