import itertools
import json
import os
import subprocess
import sys
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models

from dist_transformer.data.tokenizer import BOS_ID, EOS_ID, PAD_ID, UNK_ID, Tokenizer, first_folded, train_tokenizer
from dist_transformer.errors import UserError

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
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(TEXTS, vocab_size=330)


@pytest.fixture(scope="module")
def lowercasing() -> Tokenizer:
    return train_tokenizer(TEXTS, vocab_size=330, lowercase=True)


@pytest.fixture(scope="module")
def keeping() -> Tokenizer:
    """Keeps full-width and other variant forms."""
    return train_tokenizer(TEXTS, vocab_size=330, normalization="nfc")


def test_special_tokens_have_the_first_ids(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "t.json")
    backend = Backend.from_file(str(tmp_path / "t.json"))
    assert (PAD_ID, UNK_ID, BOS_ID, EOS_ID) == (0, 1, 2, 3)
    assert [backend.id_to_token(i) for i in range(4)] == ["<pad>", "<unk>", "<s>", "</s>"]
    assert tokenizer.vocab_size == 330


@pytest.mark.parametrize("text", AWKWARD)
def test_awkward_text_comes_back_exactly(tokenizer: Tokenizer, keeping: Tokenizer, text: str) -> None:
    for either, form in ((tokenizer, "NFKC"), (keeping, "NFC")):
        ids = either.encode(text)
        assert either.decode(ids) == unicodedata.normalize(form, text)
        assert all(i > EOS_ID for i in ids)


@settings(max_examples=300, deadline=None)
@given(text=st.text() | st.text(alphabet="<>/spadunk \t\n", max_size=30))
def test_any_text_comes_back_exactly(
    tokenizer: Tokenizer, lowercasing: Tokenizer, keeping: Tokenizer, text: str
) -> None:
    for either in (tokenizer, lowercasing, keeping):
        ids = either.encode(text)
        assert either.decode(ids) == either.normalize(text)
        assert all(i > EOS_ID for i in ids)


# Characters of Unicode 3.2, so that tokenizers' tables (Unicode 12) and Python's agree.
OLD_CHARACTERS = st.characters(exclude_categories=["Cs"]).filter(lambda c: unicodedata.ucd_3_2_0.category(c) != "Cn")


@settings(max_examples=200, deadline=None)
@given(text=st.text(OLD_CHARACTERS))
def test_normalisation_is_what_it_says(tokenizer: Tokenizer, keeping: Tokenizer, text: str) -> None:
    assert tokenizer.normalize(text) == unicodedata.normalize("NFKC", text)
    assert keeping.normalize(text) == unicodedata.normalize("NFC", text)


def test_nfc_keeps_forms_that_nfkc_folds(tokenizer: Tokenizer, keeping: Tokenizer) -> None:
    line = "两个人，一条狗！（ﬁn）e\u0301 …"
    assert tokenizer.decode(tokenizer.encode(line)) == "两个人,一条狗!(fin)é ..."
    assert keeping.decode(keeping.encode(line)) == "两个人，一条狗！（ﬁn）é …"


def test_real_chinese_comes_back_as_it_is(tokenizer: Tokenizer, keeping: Tokenizer, corpora: Path) -> None:
    file = corpora / "captions_en_zh" / "test.zh"
    if not file.exists():
        pytest.skip(f"{file} is absent")
    lines = [line for line in file.read_text(encoding="utf-8").split("\n") if "，" in line]
    assert len(lines) > 100
    assert [keeping.decode(ids) for ids in keeping.encode_batch(lines)] == lines
    folded = [tokenizer.decode(ids) for ids in tokenizer.encode_batch(lines)]
    assert folded == [unicodedata.normalize("NFKC", line) for line in lines]
    assert not set(folded) & set(lines)


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


def test_batch_equals_one_by_one(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode_batch(AWKWARD) == [tokenizer.encode(text) for text in AWKWARD]


def test_saved_file_loads_to_the_same_tokenizer(tokenizer: Tokenizer, lowercasing: Tokenizer, tmp_path: Path) -> None:
    for either in (tokenizer, lowercasing):
        either.save(tmp_path / "t.json")
        loaded = Tokenizer.load(tmp_path / "t.json")
        assert loaded.sha256 == either.sha256
        assert (loaded.vocab_size, loaded.lowercase) == (either.vocab_size, either.lowercase)
        assert loaded.encode_batch(AWKWARD) == either.encode_batch(AWKWARD)
        loaded.save(tmp_path / "again.json")
        assert (tmp_path / "again.json").read_bytes() == (tmp_path / "t.json").read_bytes()


@pytest.mark.parametrize(("normalization", "lowercase"), itertools.product(("nfkc", "nfc"), (False, True)))
def test_the_file_says_what_the_normalisation_is(normalization: Any, lowercase: bool, tmp_path: Path) -> None:
    made = train_tokenizer(TEXTS, vocab_size=330, normalization=normalization, lowercase=lowercase)
    made.save(tmp_path / "t.json")
    steps = [{"type": normalization.upper()}] + [{"type": "Lowercase"}] * lowercase
    assert json.loads((tmp_path / "t.json").read_text())["normalizer"] == {"type": "Sequence", "normalizers": steps}
    for either in (made, Tokenizer.load(tmp_path / "t.json")):
        assert (either.normalization, either.lowercase) == (normalization, lowercase)
        assert either.text_rule == f"{normalization.upper()}{', lowercase' if lowercase else ''}"


def test_the_file_is_believed_and_nothing_else(keeping: Tokenizer, tmp_path: Path) -> None:
    keeping.save(tmp_path / "t.json")
    text = (tmp_path / "t.json").read_text()
    (tmp_path / "t.json").write_text(text.replace('"NFC"', '"NFKC"'))
    assert Tokenizer.load(tmp_path / "t.json").normalization == "nfkc"
    for other in ('"NFD"', '"Lowercase"'):
        (tmp_path / "t.json").write_text(text.replace('"NFC"', other))
        with pytest.raises(UserError, match=r"t\.json is a tokenizer of another kind"):
            Tokenizer.load(tmp_path / "t.json")


def test_small_text_gives_a_smaller_vocabulary() -> None:
    # "ab" occurs twice and is merged; " ab" is "Ġ" + "ab", seen once, and is not.
    assert train_tokenizer(["ab ab"], vocab_size=1_000).vocab_size == 261
    assert train_tokenizer([], vocab_size=260).vocab_size == 260


def test_vocabulary_without_room_for_the_bytes_is_refused() -> None:
    with pytest.raises(UserError, match="vocab_size 259 is too small"):
        train_tokenizer(TEXTS, vocab_size=259)


def test_foreign_files_are_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.json cannot be read"):
        Tokenizer.load(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(UserError, match=r"bad\.json is not a tokenizer file"):
        Tokenizer.load(tmp_path / "bad.json")
    Backend(models.BPE()).save(str(tmp_path / "other.json"))
    with pytest.raises(UserError, match=r"other\.json is a tokenizer of another kind"):
        Tokenizer.load(tmp_path / "other.json")
    tokenizer.save(tmp_path / "prefix.json")
    text = (tmp_path / "prefix.json").read_text()
    (tmp_path / "prefix.json").write_text(text.replace('"add_prefix_space": false', '"add_prefix_space": true'))
    with pytest.raises(UserError, match=r"prefix\.json is a tokenizer of another kind"):
        Tokenizer.load(tmp_path / "prefix.json")


def test_same_text_gives_the_same_file_in_any_process() -> None:
    program = (
        "from dist_transformer.data.tokenizer import train_tokenizer\n"
        "texts = [f'{a} {b}{c} {a}{c}' for a in ('ab', 'ba', 'cd', 'dc') for b in 'wxyz' for c in range(50)]\n"
        "print(train_tokenizer(texts, vocab_size=600).sha256)\n"
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
