"""Spans that are not translated: found, replaced by marks, and put back."""

import time

import pytest

from dist_transformer.data.text.protect import KINDS, ProtectedLine
from dist_transformer.data.text.terms import Terms
from dist_transformer.data.vocabulary.placeholders import TERM_MARKS, marks

A, B, C = MARKS = marks(3)


def of(line: str, *, recase: bool = False) -> ProtectedLine:
    return ProtectedLine.of(line, KINDS, MARKS, recase=recase)


@pytest.mark.parametrize(
    ("line", "spans"),
    [
        ("See https://example.org/a?b=1, or www.example.org.", ["https://example.org/a?b=1", "www.example.org"]),
        ("a (http://example.org/)", ["http://example.org/"]),
        ("a (www.a.example/b_(c)): www.a.example/{id}{{n}}!", ["www.a.example/b_(c)", "www.a.example/{id}{{n}}"]),
        ("Write to a.b+c@example.co.uk!", ["a.b+c@example.co.uk"]),
        ("It is 13.50 € or 1,000,000 at 12:30", ["13.50", "1,000,000", "12:30"]),
        ("B2B, 3D and x86 have none", []),
        ("in 1'000 or ١٢٫٥, 10–20", ["1'000", "١٢٫٥", "10–20"]),
        ("Hi {name}, {{ user.name }} has %s of %1$d <x1/>", ["{name}", "{{ user.name }}", "%s"]),
        ("100% sure, %5d or %.2f", ["100", "%5d", "%.2f"]),
        ("see %1$@ or %@", ["%1$@", "%@"]),
        ("see “https://a.example/b”, «www.example.org»", ["https://a.example/b", "www.example.org"]),
        ("1.5km at 12:30pm, 1.2.3a, Müller@example.org", []),
        ("SEE HTTP://EXAMPLE.ORG/A.", ["HTTP://EXAMPLE.ORG/A"]),
        ("有3只狗，见https://example.org/a。写信到a@example.org谢谢", ["3", "https://example.org/a", "a@example.org"]),
        ("ราคา500บาทที่www.example.orgครับ", ["500", "www.example.org"]),
        ("𠮷5階ｶﾅ7", ["5", "7"]),
        ("제5장은 12개", []),
        ("cafe\u03015, की5, 5\u20e3", []),
        ("ที่5", ["5"]),
    ],
)
def test_spans(line: str, spans: list[str]) -> None:
    found = of(line)
    assert [span for span, _, _ in found.spans.values()] == spans
    assert found.restore(found.text, append=False) == (line, 0)


@pytest.mark.parametrize(
    ("output", "append", "restored"),
    [
        (f"x {A} y {B}", True, ("x 1 y 2", 0)),
        (f"{B}{A}", True, ("2 1", 0)),
        (f"x {A} {A} {C} y", True, ("x 1 y 2", 1)),
        (f"x {B}.", False, ("x 2.", 1)),
        ("x", False, ("x", 2)),
        (f"在{A}和{B}。", True, ("在1和2。", 0)),
    ],
)
def test_each_span_comes_once(output: str, append: bool, restored: tuple[str, int]) -> None:
    assert of("a 1 b 2").restore(output, append=append) == restored


def test_a_span_is_beside_what_it_was_beside() -> None:
    assert of("a (1) b/2").restore(f"x ({A}) y/{B}", append=True) == ("x (1) y/2", 0)
    assert of("a ( 1 )").restore(f"x {A}, y", append=True) == ("x 1, y", 0)


@pytest.mark.parametrize(
    ("line", "output", "restored"),
    [
        # Beside a letter there is no space where the source has none.
        ("a <b>dog</b> {name}s", f"ein {A} Hund {B} {C} s", "ein <b>Hund</b> {name}s"),
        ("see {name} so", f"sieh {A} so", "sieh {name} so"),
        # But not beside one of a script without spaces.
        ("价格100元。", f"The price is {A} yuan.", "The price is 100 yuan."),
        ("see 5 here", f"ราคา {A} บาท", "ราคา5บาท"),
        ("see 5 here", f"यहाँ {A} ।", "यहाँ 5।"),
        ("see 5 here", f"¿ {A} aquí?", "¿5 aquí?"),
        ("see 5 here", f"هنا {A} ، {B} ؟", "هنا 5،؟"),
        ("see 5 here", f"서울에서 {A} 마리 {B}", "서울에서 5 마리"),
        ("see 5 here", f"🐕 {A} 🐕", "🐕 5 🐕"),
        ("a 3 or 5", f"ein {A} - {B}", "ein 3 - 5"),
        ("a 15 inch", f"ein {A}-Zoll-Bild - {B}", "ein 15-Zoll-Bild -"),
    ],
)
def test_a_span_is_beside_letters_as_in_the_source(line: str, output: str, restored: str) -> None:
    assert of(line).restore(output, append=True) == (restored, 0)


@pytest.mark.parametrize("line", ["%" + "0" * 20_000, "a.b+" * 20_000])
def test_hostile_text_takes_no_time(line: str) -> None:
    started = time.process_time()
    of(line)
    assert time.process_time() - started < 0.5


@pytest.mark.parametrize("line", ["13.50 €", "https://example.org/a.", "{name}: %s"])
def test_a_line_of_spans_alone_is_its_own_translation(line: str) -> None:
    found = of(line)
    assert (found.text, found.restore("", append=True)) == ("", (line, 0))
    assert of("a 5").text == f"a {A}"


def test_a_prefix_may_have_spans() -> None:
    line = ProtectedLine.of("SEE 1 AND 1 AT 2", KINDS, MARKS, recase=True, prefix="Sieh 1")
    assert line.text == f"SEE {A} AND {B} AT {C}"
    assert line.restore(f"Sieh 1 {A} und {B} bei {C}", append=True) == ("Sieh 1 und 1 bei 2", 0)
    assert ProtectedLine.of("5", KINDS, MARKS, recase=True, prefix="Die").text == A
    # A span within a word, or within a longer span, is another one.
    both = ProtectedLine.of("1 of 12 at www.a.example/1", KINDS, MARKS, recase=False, prefix="www.a.example/1, 12")
    assert both.spans.keys() == {A}
    assert ProtectedLine.of("a 5", KINDS, MARKS, recase=False, prefix="15").spans.keys() == {A}
    assert ProtectedLine.of("x{n} 5", KINDS, MARKS, recase=False, prefix="y{n}共5元").spans == {}
    assert both.restore(f"www.a.example/1, 12: {B} {A} {C}", append=True) == ("www.a.example/1, 12: 1", 0)


def test_a_span_that_a_translation_continues_is_missing() -> None:
    line = ProtectedLine.of("At www.a.example/1 or 2", KINDS, MARKS, recase=False, prefix="Bei www.a.example/1")
    assert line.restore(f"Bei www.a.example/1. {B}", append=True) == ("Bei www.a.example/1. 2", 0)
    assert line.restore(f"Bei www.a.example/12 {B}", append=True) == ("Bei www.a.example/12 2 www.a.example/1", 1)
    assert ProtectedLine.of("a 5", KINDS, MARKS, recase=False, prefix="5").restore("50", append=False) == ("50", 1)
    both = ProtectedLine.of("a 2 or 12", KINDS, MARKS, recase=False, prefix="12")
    assert both.restore("120", append=False) == ("120", 2)


def test_text_without_spans_stays_as_it_is() -> None:
    assert of("a").restore(" x  y ", append=True) == (" x  y ", 0)
    assert of(f"a{A}b").text == "a\ufffdb"


@pytest.mark.parametrize(
    ("line", "text", "restored"),
    [
        ("A DOG RUNS. IT IS 5!", f"A dog runs. It is {A}!", "EIN HUND 5"),
        ("NATO", "NATO", "ein Hund 5"),
        ("NATO 5", f"NATO {A}", "ein Hund 5"),
        ("AUF DER STRAßE", "Auf der straße", "EIN HUND 5"),
        ("他在 NATO 和 EU", "他在 NATO 和 EU", "ein Hund 5"),
        ("A Dog", "A Dog", "ein Hund 5"),
    ],
)
def test_capitals(line: str, text: str, restored: str) -> None:
    found = of(line, recase=True)
    assert found.text == text
    assert found.restore(f"ein Hund {A}" if found.spans else "ein Hund 5", append=True) == (restored, 0)


def test_terms_of_a_line_in_capitals() -> None:
    terms = Terms([("EU", "EU"), ("dog etc", "Hund usw. und"), ("Bonn", "Bonn")])
    how = {"kinds": (), "marks": (), "recase": True, "terms": terms}
    line = ProtectedLine.of("THE EU. BONN DOG ETC. IT", **how)  # type: ignore[arg-type]
    text = line.text.replace(f" {TERM_MARKS[0]} ", "[").replace(f" {TERM_MARKS[1]}", "]")
    assert text == "The eu[EU]. Bonn[Bonn] dog etc[Hund usw. und]. It"
    assert line.terms == ("EU", "Bonn", "Hund usw. und")
    # Elsewhere, capitals count.
    assert ProtectedLine.of("The eu, BONN", **how).terms == ()  # type: ignore[arg-type]


def test_terms_with_spans() -> None:
    terms = Terms([("windows 1.1", "Fenster 1.1"), ("dog", "Hund"), ("24/7", "immer")])
    line = ProtectedLine.of("5 Windows 1.1 at www.dog.example", KINDS, MARKS, recase=False, terms=terms)
    assert line.text == f"{A} Windows 1.1 {TERM_MARKS[0]} Fenster 1.1 {TERM_MARKS[1]} at {C}"
    assert line.restore(f"{A} Fenster 1.1 {C}", append=True) == ("5 Fenster 1.1 www.dog.example", 0)
    assert ProtectedLine.of("24/7, 5", KINDS, MARKS, recase=False, terms=terms).terms == ("immer",)


def test_capitals_of_turkish() -> None:
    line = ProtectedLine.of("IŞIK İYİ", (), (), recase=True, language="tur_Latn")
    assert line.text == "Işık iyi"
    assert line.restore("iyi ışık", append=True, language="tr") == ("İYİ IŞIK", 0)
    assert line.restore("im", append=True, language="de") == ("IM", 0)


def test_spans_of_the_kinds_alone() -> None:
    line = ProtectedLine.of("{n} of 5 at www.example.org", ["numbers", "placeholders"], MARKS, recase=False)
    assert line.text == f"{A} of {B} at www.example.org"
