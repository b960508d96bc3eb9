import html
import json
import math
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from dist_transformer.base.errors import UserError
from dist_transformer.evaluation.bleu import (
    Closest,
    corpus_bleu,
    corpus_chrf,
    count_edits,
    edit_rate,
    score,
    split_hyphens,
)
from dist_transformer.inference.translation import ScoredText, Translation

HYPOTHESES = ["The dog bit the man.", "It was not unexpected.", "The man bit him first."]
REFERENCES = ["The dog had bit the man.", "No one was surprised.", "The man had bitten the dog."]
# Quotes, apostrophes, an ampersand, abbreviations, numbers, hyphens, dashes, capitals: where tokenisers differ.
GERMAN = [
    "Prof. Müller, der E-Mail-Experte, zahlte z.B. 1.234,5 Euro & mehr.",
    "\u201eDas ist's\u201c, sagte sie \u2013 und ging. Dann kam der ICE-Zug um 5.30 Uhr.",
    'Ein "web-basierter" Dienst (neu) kostet 3-4 % mehr als 2013 ...',
]
WORSE = [
    "Prof. Müller, der E-mail-Experte, zahlte 1.234,5 Euro & mehr.",
    "\u201eDas ist es\u201c, sagte sie \u2013 und ging. Dann kam der ICE-Zug um 5.30 Uhr.",
    'ein "web-basierter" Dienst kostet 3-4 % mehr als 2013 ...',
]


def test_english_by_hand() -> None:
    scores = score(HYPOTHESES, REFERENCES, target_language="en")
    # n-gram matches 11/17, 5/14, 2/11, 1/8; brevity penalty exp(1 - 19/17).
    assert scores.bleu.value == pytest.approx(23.9326, abs=1e-4)
    # 1 + 4 + 4 edits of 6 + 4 + 6 words.
    assert scores.ter.value == 56.25
    assert scores.chrf.value == pytest.approx(36.3762, abs=1e-4)
    assert scores.bleu.signature.startswith("nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:")
    # Nothing in these lines is cut differently by Moses.
    assert scores.bleu_tokenized is not None
    assert scores.bleu_tokenized.value == pytest.approx(scores.bleu.value)
    assert scores.bleu_compound_split is None


def test_chrf_pp_by_hand() -> None:
    # Both 6 orders of characters and 2 of words, where both sides have any: a, b, ab; the words a, b and "a b".
    scores = score(["a b"], ["a b c"], target_language="en")
    precision, recall = 1.0, (2 / 3 + 1 / 2 + 2 / 3 + 1 / 2) / 4
    # F2: recall counts twice as much.
    assert scores.chrf_pp.value == pytest.approx(100 * 5 * precision * recall / (4 * precision + recall))
    assert "|nc:6|nw:2|" in scores.chrf_pp.signature


def test_several_references_by_hand() -> None:
    one, other = "The cat sat on a mat.", "A cat sat on the mat."
    hypothesis = "The cat sat on the mat."
    scores = score([hypothesis], [one], [other], target_language="en")
    # Each four words in succession are in one of the two: "The cat sat on" in the first, the others in the second.
    assert scores.bleu.value == pytest.approx(100)
    # One edit from the nearest, of 6 words.
    assert scores.ter.value == pytest.approx(100 / 6)
    # 6/7, 4/6, 2/5, 1/4: "The cat sat on".
    alone = score([hypothesis], [one], target_language="en")
    assert alone.bleu.value == pytest.approx(100 * (6 / 7 * 4 / 6 * 2 / 5 * 1 / 4) ** 0.25)
    for each in (scores.bleu, scores.chrf, scores.chrf_pp, scores.ter, scores.bleu_tokenized):
        assert each is not None
        assert each.signature.startswith("nrefs:2|")


@pytest.mark.parametrize("language", ["de", "deu", "deu_Latn"])
def test_tokenised_and_split_by_hand(language: str) -> None:
    hypothesis, reference = "Der web-basierte Dienst läuft gut.", "Der web-basierte Dienst läuft sehr gut."
    scores = score([hypothesis], [reference], target_language=language)
    assert scores.bleu_tokenized is not None
    assert scores.bleu_compound_split is not None
    # 6 words of 7: matches 6/6, 4/5, 2/4, 1/3.
    expected = 100 * math.exp(1 - 7 / 6) * (6 / 6 * 4 / 5 * 2 / 4 * 1 / 3) ** 0.25
    assert scores.bleu_tokenized.value == pytest.approx(expected)
    # "web-basierte" becomes three words: 8 of 9, and 8/8, 6/7, 4/6, 3/5.
    expected = 100 * math.exp(1 - 9 / 8) * (8 / 8 * 6 / 7 * 4 / 6 * 3 / 5) ** 0.25
    assert scores.bleu_compound_split.value == pytest.approx(expected)


@pytest.mark.parametrize("language", ["fr-CA", "fra_Latn", "fre"])
def test_the_tokens_are_those_of_the_language(language: str) -> None:
    # Moses: "l'" is a word of French, and matches; to 13a "l'eau" is one word, and does not.
    scores = score(["Il boit de l'eau froide."], ["Il boit de l'encre froide."], target_language=language)
    assert scores.bleu_tokenized is not None
    # Il boit de l' eau froide . : 6/7, 4/6, 2/5, 1/4.
    assert scores.bleu_tokenized.value == pytest.approx(100 * (6 / 7 * 4 / 6 * 2 / 5 * 1 / 4) ** 0.25)
    assert "|tok:moses-fr|" in scores.bleu_tokenized.signature
    # Il boit de l'eau froide . : 5/6, 3/5, 1/4, and 0/3 smoothed to 1/6.
    assert scores.bleu.value == pytest.approx(100 * (5 / 6 * 3 / 5 * 1 / 4 * 1 / 6) ** 0.25)


def test_both_sides_are_lowercased_before_they_are_cut() -> None:
    # Before a capital Moses cuts a full stop off, before a small letter it does not.
    line = "Es war spät. Hans ging."
    scores = score([line.lower()], [line], target_language="de", lowercase=True)
    for each in (scores.bleu, scores.bleu_lowercase, scores.bleu_tokenized, scores.bleu_compound_split, scores.chrf):
        assert each is not None
        assert each.value == pytest.approx(100)
        assert "|case:lc|" in each.signature
    assert scores.bleu_cased.value < 60
    assert "|case:mixed|" in scores.bleu_cased.signature


@pytest.mark.parametrize(
    ("line", "split"),
    [
        ("web-basiert", "web ##AT##-##AT## basiert"),
        ("E-Mail-Experte", "E ##AT##-##AT## Mail ##AT##-##AT## Experte"),
        # Matches do not overlap.
        ("a-b-c", "a ##AT##-##AT## b-c"),
        ("er - und - sie", "er - und - sie"),
        ("-5 bis- 3--4", "-5 bis- 3 ##AT##-##AT## -4"),
        ("Ost\u2013West", "Ost\u2013West"),
    ],
)
def test_hyphens_are_split_as_perl_does(line: str, split: str) -> None:
    assert split_hyphens(line) == split
    if shutil.which("perl"):
        program = ["perl", "-CSA", "-pe", r"s{(\S)-(\S)}{$1 ##AT##-##AT## $2}g"]
        done = subprocess.run(program, input=line, capture_output=True, text=True, check=True)
        assert done.stdout == split


def command(name: str, *arguments: str | Path, lines: list[str]) -> str:
    """A command that the package of that name installs."""
    program = [str(Path(sys.executable).with_name(name)), *map(str, arguments)]
    text = "".join(f"{line}\n" for line in lines)
    return subprocess.run(program, input=text, capture_output=True, text=True, check=True).stdout


@pytest.mark.system
@pytest.mark.parametrize("lowercase", [False, True])
def test_the_same_as_the_commands_of_sacrebleu_and_sacremoses(lowercase: bool, tmp_path: Path) -> None:
    scores = score(WORSE, GERMAN, target_language="de", lowercase=lowercase)

    def by_command(references: list[str], hypotheses: list[str], *options: str) -> tuple[float, str]:
        (tmp_path / "references").write_text("".join(f"{line}\n" for line in references), encoding="utf-8")
        result = json.loads(command("sacrebleu", tmp_path / "references", "-w", "6", *options, lines=hypotheses))
        return result["score"], result["signature"]

    without_case = ["-lc"] if lowercase else []
    for mine, options in (
        (scores.bleu, without_case),
        (scores.bleu_cased, []),
        (scores.bleu_lowercase, ["-lc"]),
        (scores.chrf, ["-m", "chrf", *(["--chrf-lowercase"] if lowercase else [])]),
        (scores.chrf_pp, ["-m", "chrf", "--chrf-word-order", "2", *(["--chrf-lowercase"] if lowercase else [])]),
        (scores.ter, ["-m", "ter"]),
    ):
        value, signature = by_command(GERMAN, WORSE, *options)
        assert mine.value == pytest.approx(value, abs=1e-6)
        assert mine.signature == signature

    def cut(lines: list[str]) -> list[str]:
        lines = [line.lower() for line in lines] if lowercase else lines
        # The command has no way to leave characters such as & unescaped.
        output = command("sacremoses", "-q", "-j", "1", "-l", "de", "tokenize", lines=lines)
        return html.unescape(output).splitlines()

    cut_references, cut_hypotheses = cut(GERMAN), cut(WORSE)
    assert "&" in cut_references[0].split()
    for own, change, rule in (
        (scores.bleu_tokenized, str, ""),
        (scores.bleu_compound_split, split_hyphens, "|hyphens:##AT##-##AT##"),
    ):
        assert own is not None
        texts = ([change(line) for line in lines] for lines in (cut_references, cut_hypotheses))
        value, signature = by_command(*texts, "--tokenize", "none", "--force", *without_case)
        assert own.value == pytest.approx(value, abs=1e-6)
        extended = signature.replace("|tok:none|", "|tok:moses-de|")
        extended = extended.replace("|version:", f"{rule}|sacremoses:{version('sacremoses')}|version:")
        assert own.signature == extended
    assert scores.bleu_tokenized is not None
    assert scores.bleu_tokenized.value != pytest.approx(scores.bleu.value, abs=0.1)


def test_chinese_by_hand() -> None:
    scores = score(["我喜欢狗。"], ["我喜欢猫。"], target_language="zh")
    # Characters: 4/5, 2/4, 1/3, and 0/2 smoothed to 1/4.
    assert scores.bleu.value == pytest.approx(100 * (4 / 5 * 2 / 4 * 1 / 3 * 1 / 4) ** 0.25, abs=1e-4)
    assert scores.ter.value == pytest.approx(20.0)
    assert "tok:zh" in scores.bleu.signature
    assert "asian:yes" in scores.ter.signature


@pytest.mark.parametrize("language", ["zh", "ja", "zh-CN"])
def test_languages_without_spaces_have_no_tokenised_score(language: str) -> None:
    scores = score(["一 a"], ["一 a"], target_language=language)
    assert (scores.bleu_tokenized, scores.bleu_compound_split) == (None, None)
    report = scores.report()
    assert (report["bleu_tokenized"], report["bleu_compound_split"]) == (None, None)
    assert set(report["signatures"]) == {"bleu", "bleu_cased", "bleu_lowercase", "chrf", "chrf_pp", "ter"}
    assert f"no tokenised BLEU: Moses splits at spaces, which does not suit {language}" in str(scores)
    assert "BLEU tokenised" not in str(scores)


def test_report_has_each_score_and_its_signature() -> None:
    scores = score(WORSE, GERMAN, target_language="de", lowercase=True)
    report = scores.report()
    assert report["bleu"] == report["bleu_lowercase"] == scores.bleu_lowercase.value
    assert report["signature"] == report["signatures"]["bleu"] == scores.bleu_lowercase.signature
    names = {"bleu", "bleu_cased", "bleu_lowercase", "bleu_tokenized", "bleu_compound_split", "chrf", "chrf_pp", "ter"}
    assert set(report) == names | {"signature", "signatures"}
    assert set(report["signatures"]) == names
    for name in names:
        assert (report[name], report["signatures"][name]) == getattr(scores, name)


@pytest.mark.parametrize("lowercase", [False, True])
def test_the_table_fits_80_columns(lowercase: bool) -> None:
    scores = score(WORSE, GERMAN, target_language="de", lowercase=lowercase)
    lines = str(scores).splitlines()
    assert max(map(len, lines)) <= 80
    labels = ["BLEU", "BLEU -lc", "BLEU tokenised", "BLEU compound split", "chrF", "chrF++", "TER"]
    values = ["bleu_cased", "bleu_lowercase", "bleu_tokenized", "bleu_compound_split", "chrf", "chrf_pp", "ter"]
    for line, label, name in zip(lines, labels, values, strict=False):
        assert line.startswith(f"{label:19} {getattr(scores, name).value:6.2f}  ")
    assert [label for line, label in zip(lines, labels, strict=False) if "the headline" in line] == [
        "BLEU -lc" if lowercase else "BLEU"
    ]
    # Signatures that are cut over lines are whole again when these are joined.
    joined = "".join(line[20:] for line in lines[8:])
    assert joined == "".join(getattr(scores, name).signature for name in values)


@pytest.mark.parametrize(
    ("hypotheses", "references", "language"),
    [
        (HYPOTHESES, REFERENCES, "en"),
        (["我爱北京。", "谢谢"], ["我们爱北京。", "多谢"], "zh"),
        (["a", ""], ["", ""], "en"),
        (["", ""], ["", ""], "en"),
    ],
)
def test_the_edits_of_parts_give_the_ter_of_all(hypotheses: list[str], references: list[str], language: str) -> None:
    expected = score(hypotheses, references, target_language=language).ter
    parts = [count_edits(hypotheses[first::2], references[first::2], target_language=language) for first in range(2)]
    assert edit_rate(sum(part[0] for part in parts), sum(part[1] for part in parts)) == expected.value
    assert {part[2] for part in parts} == {expected.signature}
    assert count_edits([], [], target_language=language) == (0, 0, "")


def test_single_scores_are_those_of_all() -> None:
    for language, lowercase in (("de", False), ("de", True), ("zh", False)):
        scores = score(WORSE, GERMAN, target_language=language, lowercase=lowercase)
        assert corpus_bleu(WORSE, GERMAN, target_language=language, lowercase=lowercase) == scores.bleu
        assert corpus_chrf(WORSE, GERMAN, lowercase=lowercase) == scores.chrf


@pytest.mark.parametrize("function", [score, corpus_bleu])
def test_counts_must_agree(function: type) -> None:
    with pytest.raises(UserError, match=r"^hypotheses and references must have the same number of lines \(2 and 3\)"):
        function(HYPOTHESES[:2], REFERENCES, target_language="en")
    with pytest.raises(UserError, match="no references"):
        function([], [], target_language="en")


def chosen(*texts: str, reference: str, language: str = "de", lowercase: bool = False) -> str:
    hypotheses = tuple(ScoredText(text=text, score=-float(rank), tokens=()) for rank, text in enumerate(texts))
    translation = Translation(hypotheses=hypotheses, beyond_training=True)
    found = Closest(language, lowercase=lowercase)(translation, reference)
    (one,) = found.hypotheses
    assert (one, found.beyond_training) == (hypotheses[texts.index(one.text)], True)
    return one.text


def test_the_best_sentence_bleu_wins_and_among_equals_the_model() -> None:
    # 1-, 2-, 3- and 4-gram precisions against five tokens: 5/5 4/4 3/3 2/2; 4/5 2/4 1/3 0.5/2.
    assert chosen("x y z", "a b c x e", "a b c d e", reference="a b c d e") == "a b c d e"
    assert chosen("x", "y", reference="a b") == "x"
    assert chosen("x", "y", reference="") == "x"
    # Without an order that the hypothesis lacks, a short equal text is perfect.
    assert chosen("a c", "a b", reference="a b") == "a b"


def test_case_counts_unless_the_model_writes_no_capitals() -> None:
    texts = ("ein hund rennt hier", "Der Hund läuft dort")
    assert chosen(*texts, reference="Ein Hund rennt dort") == texts[1]
    assert chosen(*texts, reference="Ein Hund rennt dort", lowercase=True) == texts[0]


def test_characters_count_in_chinese() -> None:
    assert chosen("我们你们", "他们都好", reference="他们很好", language="zh") == "他们都好"


@pytest.mark.parametrize("ends", [99, 100])
def test_tokenised_translations_are_said_to_be_so_once(
    ends: int, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    lines = ["das ist ein Satz ."] * ends
    score(lines, ["das ist ein Satz."] * ends, target_language="de")
    said = "warning: 100 translations end in a full stop after a space, as tokenised text does: detokenise them, "
    assert capfd.readouterr().err == (f"{said}otherwise their scores are not comparable\n" if ends == 100 else "")
    # Not by sacreBLEU, whose remedy is a flag of its own.
    assert not caplog.records
