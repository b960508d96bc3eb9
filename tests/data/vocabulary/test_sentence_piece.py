"""SentencePiece vocabularies against the library itself."""

import base64
import io
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from dist_transformer.base.errors import UserError
from dist_transformer.data.vocabulary.kinds import Learning, load_vocabulary
from dist_transformer.data.vocabulary.sentence_piece import SentencePiece, learn_sentence_piece, wrap_sentence_piece
from dist_transformer.data.vocabulary.tokenizer import BOS_ID, EOS_ID, PAD_ID, SPECIALS, UNK_ID
from tests.data.vocabulary.conftest import TEXT

KINDS = [*itertools.product(("unigram", "bpe"), (False, True))]
NAMES = [f"{kind}{'-bytes' * has_bytes}" for kind, has_bytes in KINDS]


def theirs(model: bytes) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_proto=model)


def stored(tokenizer: SentencePiece) -> dict[str, Any]:
    return json.loads(tokenizer.content)


def inverted(tokenizer: SentencePiece, rows: list[list[int]]) -> list[list[int]]:
    back = {ours: piece for piece, ours in enumerate(stored(tokenizer)["ids"])}
    return [[back[token] for token in row] for row in rows]


@pytest.mark.parametrize(("kind", "has_bytes"), KINDS, ids=NAMES)
def test_ids_of_real_lines_are_those_of_the_library(kind: str, has_bytes: bool, corpora: Path, tmp_path: Path) -> None:
    """A model that the library's own tools learned, with their order of special tokens and their table."""
    files = [corpora / "multi30k" / f"train.{language}" for language in ("en", "de")]
    lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()[:10_000]]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines[::10]),
        model_prefix=str(tmp_path / "own"),
        model_type=kind,
        byte_fallback=has_bytes,
        character_coverage=0.99,
        vocab_size=1000,
        minloglevel=2,
    )
    tokenizer = load_vocabulary(tmp_path / "own.model")
    assert isinstance(tokenizer, SentencePiece)
    library = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "own.model"))
    rows, expected = tokenizer.encode_batch(lines), library.encode(lines)
    assert len(rows) == 20_000
    assert inverted(tokenizer, rows) == expected
    assert [tokenizer.pieces[token] for token in rows[0]] == library.id_to_piece(expected[0])
    assert [tokenizer.decode(row) for row in rows] == [text.strip(" ") for text in library.decode(expected)]
    unknown = sum(token == UNK_ID for row in rows for token in row)
    assert (unknown == 0) == has_bytes
    tokenizer.save(tmp_path / "tokenizer.json")
    again = load_vocabulary(tmp_path / "tokenizer.json")
    assert again.content == tokenizer.content
    assert again.source.encode_batch(lines[:100]) == rows[:100]
    assert base64.b64decode(stored(tokenizer)["model"]) == (tmp_path / "own.model").read_bytes()


def test_special_tokens_come_first(small_sentence_piece: bytes) -> None:
    """The library's own order is `<unk>`, `<s>`, `</s>`, and there is no `<pad>`."""
    tokenizer, library = wrap_sentence_piece(small_sentence_piece, tags=["<2de>"]), theirs(small_sentence_piece)
    assert stored(tokenizer)["ids"][:5] == [UNK_ID, BOS_ID, EOS_ID, 5, 6]
    assert tokenizer.pieces[:6] == [*SPECIALS, "<2de>", library.id_to_piece(3)]
    assert tokenizer.vocab_size == library.get_piece_size() + 2
    assert tokenizer.tag_ids(["<2de>"]) == [4]
    assert tokenizer.decode([PAD_ID, 4, *tokenizer.encode("hello"), EOS_ID]) == "hello"
    # Text that spells them stays text.
    assert not {PAD_ID, BOS_ID, EOS_ID, 4} & {*tokenizer.encode("</s> <s> <pad> <2de>")}


def test_unknown_characters(small_sentence_piece: bytes) -> None:
    tokenizer = wrap_sentence_piece(small_sentence_piece)
    ids = tokenizer.encode("hello 北京 world 北")
    assert ids.count(UNK_ID) == 2
    assert tokenizer.decode(ids).split() == ["hello", "\u2047", "world", "\u2047"]
    assert tokenizer.unknown("hello 北京 world 北") == ["北", "京", "北"]
    assert tokenizer.unknown("hello") == []
    assert tokenizer.piece_text(UNK_ID) == "<unk>"


def test_blank_lines_by_a_rule_of_its_own(small_sentence_piece: bytes) -> None:
    """The library's table nmt_nfkc makes a space of a byte order mark, and removes control characters."""
    tokenizer = wrap_sentence_piece(small_sentence_piece)
    assert [*map(tokenizer.is_blank, ("", " \t", "\ufeff", "\x01 \u200b", "hello", "北", "!", "\u00ad"))] == [
        *[True] * 4,
        *[False] * 4,
    ]


def test_places_of_tokens(small_sentence_piece: bytes) -> None:
    tokenizer = wrap_sentence_piece(small_sentence_piece)
    text = tokenizer.normalize("  hello   wörld 北 ﬁne")
    assert text == "hello wörld 北 fine"
    starts = tokenizer.token_starts(text)
    assert len(starts) == len(tokenizer.encode(text))
    pieces = [text[first:last] for first, last in itertools.pairwise([*starts, len(text)])]
    assert "".join(pieces) == text
    texts = [tokenizer.piece_text(token) for token in tokenizer.encode(text)]
    assert [piece for piece, known in zip(pieces, texts, strict=True) if known != "<unk>"] == [
        known if index else known[1:] for index, known in enumerate(texts) if known != "<unk>"
    ]


@pytest.mark.parametrize(("kind", "has_bytes"), KINDS, ids=NAMES)
def test_learning(kind: Any, has_bytes: bool) -> None:
    settings = {
        "vocab_size": 330 if has_bytes else 60,
        "model_type": kind,
        "byte_fallback": has_bytes,
        "character_coverage": 0.9995,
        "normalization": "clean",
        "lowercase": True,
        "tags": ["<2de>"],
    }
    tokenizer = learn_sentence_piece(TEXT, **settings)
    assert learn_sentence_piece(TEXT, **settings).content == tokenizer.content
    assert tokenizer.vocab_size <= settings["vocab_size"]
    assert (tokenizer.tags, tokenizer.lowercase, tokenizer.normalization) == (("<2de>",), True, "clean")
    # The rule is in the library's own file.
    library = theirs(tokenizer.library_file)
    for text in ("\ufeffHe\u00adllo\u00a0W\u00d6RLD\u200b", "HELLO wo\u0308rld"):
        assert (
            inverted(tokenizer, [tokenizer.encode(text)]) == [library.encode(text)] == [library.encode("hello wörld")]
        )
        assert tokenizer.decode(tokenizer.encode(text)) == tokenizer.normalize(text) == "hello wörld"
    assert tokenizer.encode("he\0llo") == tokenizer.encode("hello")
    if has_bytes:
        assert tokenizer.decode(tokenizer.encode("北 \U0001f600 ж")) == "北 \U0001f600 ж"
        assert tokenizer.kind.endswith("with byte fallback")
        assert tokenizer.piece_text(tokenizer.encode("北")[1]) == "\ufffd"


def test_a_damaged_model_is_refused(small_sentence_piece: bytes, tmp_path: Path) -> None:
    parts = stored(wrap_sentence_piece(small_sentence_piece))
    parts["model"] = parts["model"][:-8]
    (tmp_path / "tokenizer.json").write_text(json.dumps(parts))
    with pytest.raises(UserError, match=r"tokenizer.json .*nor a SentencePiece model.*: use the tokenizer.json of"):
        load_vocabulary(tmp_path / "tokenizer.json")


def test_another_order_of_the_pieces_is_kept(small_sentence_piece: bytes, tmp_path: Path) -> None:
    first = wrap_sentence_piece(small_sentence_piece)
    parts = stored(first)
    parts["ids"][3:5] = parts["ids"][4:2:-1]
    (tmp_path / "tokenizer.json").write_text(json.dumps(parts))
    other = load_vocabulary(tmp_path / "tokenizer.json").source
    assert other.sha256 != first.sha256
    assert other.pieces == [*first.pieces[:4], first.pieces[5], first.pieces[4], *first.pieces[6:]]
    assert other.decode(other.encode("hello world")) == "hello world"


def test_a_piece_that_is_spelled_like_a_special_token_is_refused() -> None:
    written = io.BytesIO()
    settings = {"vocab_size": 32, "user_defined_symbols": ["<pad>"], "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(TEXT), model_writer=written, **settings)
    with pytest.raises(ValueError, match="has a piece of text that is spelled <pad>"):
        wrap_sentence_piece(written.getvalue())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"kind": "byte-bpe", "byte_fallback": True}, "byte_fallback is for SentencePiece"),
        ({"kind": "byte-bpe", "character_coverage": 1.0}, "character_coverage is for SentencePiece"),
        (
            {"kind": "sentencepiece", "character_coverage": 0.5},
            "character_coverage is 0.5: it must be 0.98 to 1",
        ),
        ({"kind": "sentencepiece", "vocab_size": 4}, "vocab_size 4 is too small"),
        ({"kind": "sentencepiece-bpe", "vocab_size": 260, "byte_fallback": True, "tags": ("<2de>",)}, "take 261"),
        ({"kind": "sentencepiece", "vocab_size": 2**24 + 1}, "too large"),
    ],
)
def test_wrong_settings_of_learning(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        Learning(**{"vocab_size": 8000, **settings})


def test_a_text_with_more_characters_than_entries() -> None:
    with pytest.raises(UserError, match=r"SentencePiece cannot learn 10 entries from this text .*: use another"):
        Learning(kind="sentencepiece", vocab_size=10).learn(TEXT)
