"""Terms behind their source terms, by hand."""

from pathlib import Path

import pytest

from dist_transformer.base.errors import UserError
from dist_transformer.data.text.terms import Terms, count_terms
from dist_transformer.data.vocabulary.placeholders import TERM_MARKS

BEFORE, AFTER = TERM_MARKS
TERMS = Terms(
    [
        ("dog", "Hund"),
        ("dog", "Köter"),
        ("hot dog", "Wurst"),
        ("hot", "heiß"),
        ("IT", "EDV"),
        ("狗", "Hund"),
        ("หมา", "Hund"),
        ("か", "?"),
        ("cafe\u0301", "Café"),
        ("C++", "C++"),
        ("का", "of"),
    ]
)


def with_terms(text: str) -> str:
    return TERMS.annotate(text)[0].replace(f" {BEFORE} ", "[").replace(f" {AFTER}", "]")


@pytest.mark.parametrize(
    ("source", "annotated"),
    [
        ("Dogs see a dog.", "Dogs see a dog[Hund]."),
        # The longest; in lower case, a source term has any case.
        ("A HOT  DOG, Dog", "A HOT  DOG[Wurst], Dog[Hund]"),
        ("IT is it", "IT[EDV] is it"),
        ("一只狗跑", "一只狗[Hund]跑"),
        ("มีหมาวิ่ง", "มีหมา[Hund]วิ่ง"),
        ("か\u3099", "か\u3099"),
        ("C++ or C", "C++[C++] or C"),
        ("a café, cafe\u0301", "a café[Café], cafe\u0301[Café]"),
        # A vowel sign belongs to its word.
        ("का काम", "का[of] काम"),
    ],
)
def test_terms_are_written_behind_their_sources(source: str, annotated: str) -> None:
    assert with_terms(source) == annotated


def test_of_a_pair_only_terms_that_its_target_has() -> None:
    assert TERMS.annotate("A dog, IT", "Ein köter") == (f"A dog {BEFORE} Köter {AFTER}, IT", ["Köter"])
    assert TERMS.annotate("A dog", "Hunde") == ("A dog", [])


def test_a_term_counts_as_often_as_it_is_wanted_and_there() -> None:
    assert count_terms(["Hund", "Hund", "Wurst"], "Hund hund HUND Würste") == 2
    assert count_terms(["Hund", "Hund"], "Der Hund") == 1
    assert count_terms(["1 m²", "e\u0301"], "1 m2 é") == 2


@pytest.mark.parametrize("line", ["dog", "dog\tHund\tKöter", "dog\t ", "\tHund"])
def test_a_line_that_is_no_term(tmp_path: Path, line: str) -> None:
    (tmp_path / "terms").write_text(f"IT\tEDV\n{line}\n")
    with pytest.raises(UserError, match="terms, line 2: write a source term, one tab, and its target term"):
        Terms.read(tmp_path / "terms")


def test_a_term_with_a_mark_of_ours(tmp_path: Path) -> None:
    (tmp_path / "terms").write_text(f"dog\tHu{AFTER}nd\n")
    assert Terms.read(tmp_path / "terms").annotate("dog")[1] == ["Hu\ufffdnd"]


def test_a_file_without_terms(tmp_path: Path) -> None:
    (tmp_path / "terms").touch()
    with pytest.raises(UserError, match="terms has no terms"):
        Terms.read(tmp_path / "terms")
