"""Text in the language of the other side is found, and right text is not suspected."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from dist_transformer.config.directions import Direction
from dist_transformer.data.folder.marks import LanguageMarks, find_marks
from dist_transformer.data.vocabulary.byte_bpe import learn_byte_bpe
from dist_transformer.data.vocabulary.tokenizer import Tokenizer
from dist_transformer.evaluation.languages import warn_of_wrong_side
from dist_transformer.model_folder import ModelInfo

Lines = tuple[list[str], list[str]]


def marks_of(tokenizer: Tokenizer, lines: Lines) -> LanguageMarks:
    sides = (np.array([token for row in tokenizer.encode_batch(side) for token in row]) for side in lines)
    return find_marks(*sides, first_piece=4)


def test_marks_are_frequent_on_one_side_only() -> None:
    """No special token or tag, no rare piece, none that is common to both."""
    source, target = (
        np.array([3] * 90 + [4] * 20 + [5] * 6 + [7] * 50),
        np.array([3] * 300 + [4] * 16 + [6] * 5 + [8] * 9),
    )
    assert find_marks(source, target, first_piece=4) == LanguageMarks(source=(5, 7), target=(8,))
    nothing = np.array([], dtype=np.uint16)
    assert find_marks(nothing, nothing, first_piece=4) == LanguageMarks()


def test_each_side_alone_and_both(toy_lines: Lines, toy_tokenizer: Tokenizer, model_info: ModelInfo) -> None:
    english, german = toy_lines
    info = replace(model_info, marks=(marks_of(toy_tokenizer, toy_lines),))

    def found(sources: list[str], targets: list[str]) -> str | None:
        said: list[str | None] = [None]
        warn_of_wrong_side(said.append, info, toy_tokenizer, "F", (sources, None), (targets, None))
        return said[-1]

    assert found(english, german) is None
    assert found(english, []) is None
    source = "the source text looks like de, the model's target language"
    target = "the target text looks like en, the model's source language"
    assert found(german, english) == f"{source} and {target} (direction en-de): check F"
    assert found(german, german) == found(german, []) == f"{source} (direction en-de): check F"
    assert found(english, english) == f"{target} (direction en-de): check F"
    # Too little text, and text of neither.
    assert found(german[:1], english[:1]) is None
    assert found(["1 2 3 4"] * 100, ["§"] * 100) is None
    info = replace(info, target_language="en")
    assert found(german, english) is None


def test_names_decide_where_the_text_does_not(
    toy_lines: Lines, toy_tokenizer: Tokenizer, model_info: ModelInfo
) -> None:
    """Models of older versions have no marks, and a few lines too few. Text that decides may have any name."""
    english, german = toy_lines

    def found(info: ModelInfo, lines: list[str], name: str) -> bool:
        said: list[str] = []
        warn_of_wrong_side(said.append, info, toy_tokenizer, "F", (lines, Path(name)))
        return bool(said)

    assert not model_info.marks
    for name in ("test.de", "x/test.DE", "test.de.gz"):
        assert found(model_info, german, name), name
    for name in ("test.en", "test.en.gz", "test.txt", "de", "test.fr", "de.txt"):
        assert not found(model_info, german, name), name
    for name in ("test.deu", "test.ger", "test.de_DE", "test.deu_Latn.gz"):
        assert found(model_info, german, name), name
    flores = replace(model_info, source_language="eng_Latn", target_language="deu_Latn")
    assert found(flores, german, "test.de")
    assert not found(flores, german, "test.en")
    info = replace(model_info, marks=(marks_of(toy_tokenizer, toy_lines),))
    assert not found(info, english, "test.de")
    assert found(info, german, "test.en")
    assert found(info, english[:1], "test.de")


def test_the_marks_of_the_chosen_direction(model_info: ModelInfo) -> None:
    there, back = LanguageMarks(source=(5,), target=(6,)), LanguageMarks(source=(6,), target=(5,))
    ways = tuple(
        Direction(source_language=a, target_language=b, tags=("<x>",)) for a, b in (["en", "de"], ["de", "en"])
    )
    info = replace(model_info, directions=ways, marks=(there, back))
    assert info.marks_of_direction == LanguageMarks()
    assert info.facing("en-de").marks_of_direction == there
    assert info.facing("de-en", ()).marks_of_direction == back
    # As of a damaged or older folder.
    assert replace(info, marks=(there,)).facing("de-en").marks_of_direction == LanguageMarks()


def test_real_text_of_another_kind_is_not_suspected(corpora: Path) -> None:
    """Captions and news, in parts of some lines: no right part is suspected, and most decide."""

    def read(name: str, most: int) -> Lines:
        sides = ((corpora / f"{name}.{language}").read_text(encoding="utf-8").splitlines() for language in ("en", "de"))
        english, german = (side[:most] for side in sides)
        return english, german

    captions, news = read("multi30k/train", 3000), read("newstest/newstest2013", 2000)
    for trained, other in ((captions, news), (news, captions)):
        tokenizer = learn_byte_bpe([*trained[0], *trained[1]], vocab_size=2000)
        marks = marks_of(tokenizer, trained)
        for side, lines in zip(("source", "target"), other, strict=True):
            rows = tokenizer.encode_batch(lines)
            for size in (1, 3, 20):
                sides = [marks.side_of(rows[first : first + size]) for first in range(0, len(rows), size)]
                assert set(sides) <= {side, None}, (size, side)
                assert size < 20 or sides.count(side) > 0.9 * len(sides)
