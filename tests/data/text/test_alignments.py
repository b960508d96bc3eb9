"""Alignments in Pharaoh's format, and the tokens and characters that they mean."""

import re
from pathlib import Path
from typing import Any

import pytest

from dist_transformer.base.errors import UserError
from dist_transformer.data.text.alignments import link_tokens, parse_links, token_spans, words_of
from dist_transformer.data.text.pairs import line_files
from dist_transformer.data.vocabulary.byte_bpe import learn_byte_bpe
from dist_transformer.data.vocabulary.kinds import Learning

# One piece for each word, with or without a space.
TOKENIZER = learn_byte_bpe(["ab cd ef. ab"] * 9, vocab_size=400)


def test_pairs_are_parsed() -> None:
    assert parse_links("2-0 0-1\t0-0", "a b c", "d e") == [(2, 0), (0, 1), (0, 0)]
    assert parse_links(" ", "a", "b") == []


@pytest.mark.parametrize("line", ["0-0 3-0", "0-2", "0:0", "0-0-0", "-1-0", "0 - 0", "a-b", "1-0:0.7"])
def test_a_bad_line_is_refused_by_name(line: str, tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a.en", "a.de", "a.links")]
    for file, text in zip(files, ("a b c\nd e f\n", "g h\ni j\n", f"0-0\n{line}\n"), strict=True):
        file.write_text(text)
    (source,) = line_files(*([file] for file in files))
    with pytest.raises(UserError, match=rf"^{re.escape(str(files[2]))} line 2 has .*3 and 2 words: write pairs"):
        list(source.pairs())
    files[2].write_text("0-0\n\n1-1\n")
    with pytest.raises(UserError, match=r"a.en and .*a.links must have the same number of lines \(2 and 3\)"):
        list(source.pairs())
    with pytest.raises(UserError, match=r"there are 1 files of alignments .* and 2 source files"):
        line_files(files[:1] * 2, files[1:2] * 2, files[2:])


def test_tokens_of_linked_words_by_hand() -> None:
    """Words of two, one and two pieces; punctuation beside a word has no link."""
    texts = ("abcd ab ef.", "ef. cdab")
    ids = tuple(map(TOKENIZER.encode, texts))
    assert [[*map(TOKENIZER.piece_text, row)] for row in ids] == [
        ["ab", "cd", " ab", " ef", "."],
        ["ef", ".", " cd", "ab"],
    ]

    def link(line: str) -> list[int]:
        return link_tokens((TOKENIZER, TOKENIZER), texts, line, ids, {})  # type: ignore[arg-type]

    assert link("2-0 0-1") == [4, 0, 1, 2]
    # Both words of the source: the first and the last of three tokens, in their order.
    assert link("1-1 0-1") == [0, 0, 1, 3]
    # The first one of two, and the middle one of three.
    assert link("0-0") == [1, 0, 0, 0]
    assert link("1-0 0-0") == [2, 0, 0, 0]
    assert link("") == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("text", "spans"),
    [
        ("ab cd", [(0, 2), (3, 5)]),
        # Wide letters, capitals, and characters that are removed or are white space.
        (" Ａb\u00a0\u200bCD", [(1, 3), (5, 7)]),
        # What stands for nothing, and something between.
        ("ab — cd!", [(0, 2), (5, 7)]),
        ("cd", [(0, 0), (0, 2)]),
    ],
)
def test_spans_of_a_text_that_is_not_that_of_the_tokens(text: str, spans: list[tuple[int, int]]) -> None:
    assert token_spans(TOKENIZER, TOKENIZER.encode("ab cd"), text) == spans


@pytest.mark.parametrize("kind", ["byte-bpe", "sentencepiece"])
def test_parts_of_characters_and_unknown_ones_have_a_place(kind: Any) -> None:
    tokenizer = Learning(kind=kind, vocab_size=265 if kind == "byte-bpe" else 16).learn(["a b c d e f ab cd ef fa"] * 9)
    text = "ab ½ ab 漢"
    spans = token_spans(tokenizer, tokenizer.encode(text), text)
    assert {text[start:end] for start, end in spans if start < end} - {"a", "b", "ab"} == {"½", "漢"}
    # A protected text in place of a placeholder.
    assert token_spans(tokenizer, [4], "see x.y.", {4: "x.y"}) == [(4, 7)]


def test_words_of_parts() -> None:
    text = "The »old« man — he"
    parts = [(0, 3), (4, 5), (5, 8), (8, 9), (11, 13), (14, 15), (16, 18), (0, 0)]
    assert words_of(text, parts) == [0, None, 1, None, 2, 3, 4, None]
    assert words_of("", [(0, 0)]) == [None]
