import itertools
import json
import os
import random
import re
import subprocess
import sys
import time
import unicodedata
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from dist_transformer.base.errors import UserError
from dist_transformer.data.vocabulary.byte_bpe import learn_byte_bpe
from dist_transformer.data.vocabulary.kinds import load_vocabulary
from dist_transformer.data.vocabulary.normalization import first_folded
from dist_transformer.data.vocabulary.tokenizer import BOS_ID, EOS_ID, PAD_ID, SPECIALS, UNK_ID, Tokenizer

TEXTS = [
    "Two young men are outside near many bushes.",
    "Zwei junge weiße Männer sind im Freien.",
    "两个年轻人在外面。",
    "</s></s> <pad> <unk><s> are written here",
] * 10
AWKWARD = [
    "",
    " ",
    "  two leading, two trailing  ",
    "\ttab\t\ttabs\r\x0b\x85\u2028",
    "你好，世界。 ﬁne ½ Å ㎏",
    "👩‍👩‍👧 🇩🇪 e\u0301 o\u0302\u0323 \u0323\u0302o",
    "</s> <s> <pad> <unk></s></s><pad>",
    "Ġ Ċ ▁ ##ing @@",
    "\x00\x01\x7f\ufeff\ufffd\U0010ffff",
    "❤️ 1️⃣ \u0301 \u200d \u200c'\u0323s m\u200d'\u0300",
    "a" + "\u0323" * 300 + "b" * 300 + "\u200d" * 100,
]
SENTENCES = {
    "Hindi": "मेरी बहन हर सुबह पाँच बजे उठकर खेत में पानी देती है।",
    "Tamil": "என் தம்பி தினமும் காலையில் பள்ளிக்குச் செல்லும் முன் பால் குடிப்பான்.",
    "Sinhala": "ශ්\u200dරී ලංකාවේ ප්\u200dරධාන නගරයේ මගේ මිත්\u200dරයා අලුත් පොත් විකුණයි.",
    "Persian": "من هر روز صبح کتاب\u200cهای تازه را می\u200cخوانم و یادداشت می\u200cنویسم.",
    "vowelled Arabic": "ذَهَبَ الوَلَدُ إِلَى المَدْرَسَةِ مَعَ أَخِيهِ الصَّغِيرِ فِي الصَّبَاحِ.",
    "Vietnamese": "Mỗi buổi sáng em gái tôi tưới hoa trong vườn.",
    "Burmese": "ကျွန်တော် မနက်တိုင်း စာအုပ် အသစ်များ ဖတ်ပြီး သူငယ်ချင်း များနှင့် စကားပြောသည်။",
    "Thai": "เด็ก ๆ เล่น อยู่ ที่ ริม แม่น้ำ กับ เพื่อน ทุก วัน",
}
# GPT-2's rule, as in the library.
GPT2_WORDS = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
ENGLISH = [
    "I'm sure they'll say we've, you're, he'd, it's, don't: THEY'LL SAY O'REILLY'S.",
    "In 1999, 3.5% of £1,200 (or $1,500.00) went to R2D2 at 10:30pm -- see http://example.org/?a=1&b=2#c!",
    "  indented,\ttabbed \t\t and   spaced  \n\n  over\r\n lines   ",
    "'single' \"double\" “curly” ‘quotes’ … — –! naïve café ½ m² \U0001f600\U0001f600 \x00\xa0\xa0x",
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return learn_byte_bpe(TEXTS, vocab_size=330)


@pytest.fixture(scope="module")
def lowercasing() -> Tokenizer:
    return learn_byte_bpe(TEXTS, vocab_size=330, lowercase=True)


@pytest.fixture(scope="module")
def folding() -> Tokenizer:
    """Keeps what nobody sees."""
    return learn_byte_bpe(TEXTS, vocab_size=330, normalization="nfkc")


@pytest.fixture(scope="module")
def keeping() -> Tokenizer:
    """Keeps full-width and other variant forms."""
    return learn_byte_bpe(TEXTS, vocab_size=330, normalization="nfc")


def test_special_tokens_have_the_first_ids(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "t.json")
    backend = Backend.from_file(str(tmp_path / "t.json"))
    assert (PAD_ID, UNK_ID, BOS_ID, EOS_ID) == (0, 1, 2, 3)
    assert [backend.id_to_token(i) for i in range(4)] == ["<pad>", "<unk>", "<s>", "</s>"]
    assert tokenizer.vocab_size == 330


@settings(max_examples=300, deadline=None)
@given(
    text=st.text()
    | st.text(alphabet="<>/spadunk \t\n", max_size=30)
    | st.text(alphabet="aक我1-' \u0301\u093f\u0323\u200c\u200d\ufe0f👩", max_size=200)
)
def test_any_text_comes_back_exactly(
    tokenizer: Tokenizer, lowercasing: Tokenizer, folding: Tokenizer, keeping: Tokenizer, text: str
) -> None:
    for either in (tokenizer, lowercasing, folding, keeping):
        ids = either.encode(text)
        assert either.decode(ids) == either.normalize(text)
        assert all(i > EOS_ID for i in ids)


def test_awkward_text_comes_back_by_every_way(folding: Tokenizer, keeping: Tokenizer) -> None:
    for either, form in ((folding, "NFKC"), (keeping, "NFC")):
        rows = either.encode_batch(AWKWARD)
        assert rows == [either.encode(text) for text in AWKWARD]
        for text, ids in zip(AWKWARD, rows, strict=True):
            expected = unicodedata.normalize(form, text)
            assert either.decode(ids) == expected
            assert b"".join(map(either.piece_bytes, ids)) == expected.encode()
            assert all(i > EOS_ID for i in ids)


def words_of(tokenizer: Tokenizer, text: str) -> list[str]:
    """Cut a text into the words within which pieces are merged."""
    text = tokenizer.normalize(text)
    cut = tokenizer._backend.pre_tokenizer.pre_tokenize_str(text)
    words = [text[start:end] for _, (start, end) in cut]
    assert "".join(words) == text
    return words


@pytest.mark.parametrize("language", SENTENCES)
def test_letters_keep_their_marks_and_joiners(tokenizer: Tokenizer, keeping: Tokenizer, language: str) -> None:
    text = SENTENCES[language]
    for either in (tokenizer, keeping):
        assert either.decode(either.encode(text)) == either.normalize(text)
        words = words_of(either, text)
        assert len(words) <= 1.2 * len(text.split())
        # Whole words, and the sign at the end apart.
        sign = words.pop() if words[-1] in (".", "।", "။", "។") else ""
        assert words == re.findall(r" ?[^ ]+", either.normalize(text).removesuffix(sign))


def test_marks_stay_with_digits_and_signs_too(folding: Tokenizer) -> None:
    assert words_of(folding, "👩\u200d👩\u200d👧 ❤\ufe0f 1\ufe0f\u20e3, 'm\u0300") == [
        "👩\u200d👩\u200d👧",
        " ❤\ufe0f",
        " 1\ufe0f\u20e3",
        ",",
        " '",
        "m\u0300",
    ]


@settings(max_examples=300, deadline=None)
@given(text=st.text(st.characters(max_codepoint=127), max_size=60))
def test_english_is_cut_as_gpt2_does(tokenizer: Tokenizer, text: str) -> None:
    for line in map(tokenizer.normalize, (*ENGLISH, text)):
        assert tokenizer._backend.pre_tokenizer.pre_tokenize_str(line) == GPT2_WORDS.pre_tokenize_str(line)


MARKS = "\u0301\u0323\u093e\u200c\u200d"


RUNS = st.tuples(st.sampled_from([*"a1-. \n我क", *MARKS, "ab", "a\u0323", "我。"]), st.integers(1, 200))


@settings(max_examples=200, deadline=None)
@given(runs=st.lists(RUNS, max_size=6))
def test_no_word_is_long_and_none_begins_with_a_mark(keeping: Tokenizer, runs: list[tuple[str, int]]) -> None:
    words = words_of(keeping, "".join(text * count for text, count in runs))
    # A space, 64 characters, 30 marks.
    assert max(map(len, words), default=0) <= 95
    for before, word in pairwise(words):
        if word[0] in MARKS:
            # After white space, or where so many marks follow each other that there is no other place.
            assert before[-1].isspace() or set(before[-30:]) <= set(MARKS)


DRAWS: dict[str, Callable[[random.Random], str]] = {
    "letters": lambda chance: chance.choice("abcdefghijklmnopqrstuvwxyz"),
    "Chinese": lambda chance: chr(0x4E00 + int(3000 * chance.random() ** 3)),
    "one letter": lambda _: "a",
}


@pytest.mark.system
@pytest.mark.parametrize("kind", DRAWS)
def test_a_vocabulary_is_learned_in_linear_time(kind: str) -> None:
    def seconds(text: str) -> float:
        start = time.process_time()
        learn_byte_bpe([text], vocab_size=500)
        return time.process_time() - start

    chance = random.Random(1)
    text = "".join(itertools.islice(iter(lambda: DRAWS[kind](chance), None), 1_000_000))
    text = text.encode()[:1_000_000].decode(errors="ignore")
    # Quadratic time would be 16 times as long; a few milliseconds say nothing.
    assert seconds(text) < 8 * max(0.1, seconds(text[: len(text) // 4]))


def former_file(path: Path, *, normalization: str, lowercase: bool) -> Backend:
    """A tokenizer.json as versions before the present rule wrote it."""
    backend = Backend(models.BPE())
    form = {"nfkc": normalizers.NFKC(), "nfc": normalizers.NFC()}[normalization]
    backend.normalizer = normalizers.Sequence([form, normalizers.Lowercase()] if lowercase else [form])
    backend.pre_tokenizer = GPT2_WORDS
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIALS))
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        min_frequency=2,
        special_tokens=list(SPECIALS),
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    backend.train_from_iterator([*TEXTS, *SENTENCES.values()], trainer)
    backend.save(str(path), pretty=True)
    return backend


@pytest.mark.parametrize(("normalization", "lowercase"), itertools.product(("nfkc", "nfc"), (False, True)))
def test_a_former_tokenizer_keeps_its_rule_and_ids(normalization: str, lowercase: bool, tmp_path: Path) -> None:
    former = former_file(tmp_path / "t.json", normalization=normalization, lowercase=lowercase)
    loaded = load_vocabulary(tmp_path / "t.json")
    assert (loaded.normalization, loaded.lowercase) == (normalization, lowercase)
    lines = [*SENTENCES.values(), *ENGLISH, "a" * 300]
    assert loaded.encode_batch(lines) == [former.encode(line).ids for line in lines]
    assert words_of(loaded, "हिन्दी")[:3] == ["ह", "ि", "न"]
    loaded.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "t.json").read_bytes()


# Characters of Unicode 3.2, so that tokenizers' tables (Unicode 12) and Python's agree.
OLD_CHARACTERS = st.characters(exclude_categories=["Cs"]).filter(lambda c: unicodedata.ucd_3_2_0.category(c) != "Cn")


@settings(max_examples=200, deadline=None)
@given(text=st.text(OLD_CHARACTERS))
def test_normalisation_is_what_it_says(folding: Tokenizer, keeping: Tokenizer, text: str) -> None:
    assert folding.normalize(text) == unicodedata.normalize("NFKC", text)
    assert keeping.normalize(text) == unicodedata.normalize("NFC", text)


def test_nfc_keeps_forms_that_nfkc_folds(tokenizer: Tokenizer, keeping: Tokenizer) -> None:
    line = "两个人，一条狗！（ﬁn）e\u0301 …"
    assert tokenizer.decode(tokenizer.encode(line)) == "两个人,一条狗!(fin)é ..."
    assert keeping.decode(keeping.encode(line)) == "两个人，一条狗！（ﬁn）é …"


def test_the_first_character_that_nfkc_folds() -> None:
    assert first_folded("一，二！") == "，"
    assert first_folded("100 m² ½") == "²"
    assert first_folded("1\xa0000") == "\xa0"
    # Composed by both forms, or left alone by both.
    for text in ("", "plain", "e\u0301", "\u212b", "我。", "„so“ – ja"):
        assert first_folded(text) is None
        assert unicodedata.normalize("NFC", text) == unicodedata.normalize("NFKC", text)


def test_lowercase(lowercasing: Tokenizer) -> None:
    assert lowercasing.lowercase
    assert lowercasing.normalize("ÄRGER Ｘ") == "ärger x"
    assert lowercasing.encode("ÄRGER") == lowercasing.encode("ärger")


def test_decode_leaves_out_special_ids_and_keeps_text_that_spells_them(tokenizer: Tokenizer) -> None:
    ids = [BOS_ID, *tokenizer.encode("</s> here"), EOS_ID, PAD_ID, UNK_ID]
    assert tokenizer.decode(ids) == "</s> here"


def test_saved_file_loads_to_the_same_tokenizer(tokenizer: Tokenizer, lowercasing: Tokenizer, tmp_path: Path) -> None:
    for either in (tokenizer, lowercasing):
        either.save(tmp_path / "t.json")
        loaded = load_vocabulary(tmp_path / "t.json")
        assert loaded.sha256 == either.sha256
        assert (loaded.vocab_size, loaded.lowercase) == (either.vocab_size, either.lowercase)
        assert loaded.encode_batch(AWKWARD) == either.encode_batch(AWKWARD)
        loaded.save(tmp_path / "again.json")
        assert (tmp_path / "again.json").read_bytes() == (tmp_path / "t.json").read_bytes()


@pytest.mark.parametrize(
    ("normalization", "rule", "types"),
    [
        ("clean", "clean text, NFKC", ["Replace"] * 4 + ["NFKC"]),
        ("clean-nfc", "clean text, NFC", ["Replace"] * 4 + ["NFC"]),
        ("nfkc", "NFKC", ["NFKC"]),
        ("nfc", "NFC", ["NFC"]),
    ],
)
@pytest.mark.parametrize("lowercase", [False, True])
def test_the_file_says_what_the_normalisation_is(
    normalization: Any, rule: str, types: list[str], lowercase: bool, tmp_path: Path
) -> None:
    made = learn_byte_bpe(TEXTS, vocab_size=330, normalization=normalization, lowercase=lowercase)
    made.save(tmp_path / "t.json")
    normalizer = json.loads((tmp_path / "t.json").read_text())["normalizer"]
    assert [step["type"] for step in normalizer["normalizers"]] == types + ["Lowercase"] * lowercase
    for either in (made, load_vocabulary(tmp_path / "t.json")):
        assert (either.normalization, either.lowercase) == (normalization, lowercase)
        assert either.text_rule == f"{rule}{', lowercase' if lowercase else ''}"


def test_small_text_gives_a_smaller_vocabulary() -> None:
    # "ab" occurs twice and is merged; " ab" is "Ġ" + "ab", seen once, and is not.
    assert learn_byte_bpe(["ab ab"], vocab_size=1_000).vocab_size == 261
    assert learn_byte_bpe([], vocab_size=260).vocab_size == 260


def test_vocabulary_without_room_for_the_bytes_is_refused() -> None:
    with pytest.raises(UserError, match="vocab_size 259 is too small"):
        learn_byte_bpe(TEXTS, vocab_size=259)


def test_the_file_is_believed_and_foreign_files_are_refused(keeping: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.json cannot be read"):
        load_vocabulary(tmp_path / "none.json")
    file = tmp_path / "t.json"
    file.write_text("{}")
    with pytest.raises(UserError, match=r"t\.json is not a tokenizer file"):
        load_vocabulary(file)
    text = keeping.content.decode()
    file.write_text(text.replace('"NFC"', '"NFKC"'))
    assert load_vocabulary(file).normalization == "nfkc"
    foreign = [Backend(models.BPE()).to_str()]
    for ours, other in (
        ('"NFC"', '"NFD"'),
        ('"NFC"', '"Lowercase"'),
        ("{0,63}", "{0,64}"),
        ('"add_prefix_space": false', '"add_prefix_space": true'),
    ):
        assert ours in text
        foreign.append(text.replace(ours, other))
    for content in foreign:
        file.write_text(content)
        with pytest.raises(UserError, match=r"t\.json is a tokenizer of another kind"):
            load_vocabulary(file)


def test_same_text_gives_the_same_file_in_any_process() -> None:
    program = (
        "from dist_transformer.data.vocabulary.byte_bpe import learn_byte_bpe\n"
        "texts = [f'{a} {b}{c} {a}{c}' for a in ('ab', 'ba', 'cd', 'dc') for b in 'wxyz' for c in range(50)]\n"
        "print(learn_byte_bpe(texts, vocab_size=600).sha256)\n"
    )
    hashes = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed, "RAYON_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "true"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed, threads in (("1", "1"), ("2", "4"))
    }
    assert len(hashes) == 1
