"""Files of translations against sacreBLEU itself."""

import json
from pathlib import Path

import pytest
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.significance import PairedTest

from dist_transformer.base.errors import UserError
from dist_transformer.evaluation.bleu import score
from dist_transformer.evaluation.compare import compare

Lines = tuple[list[str], list[str]]


@pytest.fixture
def texts(toy_lines: Lines) -> dict[str, list[str]]:
    """Two references, and translations with an error in every third and in every fifth word."""
    reference = toy_lines[1][:30]

    def with_errors(every: int) -> list[str]:
        lines = [line.split() for line in reference]
        return [" ".join("oder" if i % every == every - 1 else w for i, w in enumerate(words)) for words in lines]

    return {"ref": reference, "other": toy_lines[1][30:60], "bad": with_errors(3), "good": with_errors(5)}


@pytest.fixture
def files(texts: dict[str, list[str]], tmp_path: Path) -> dict[str, Path]:
    for name, lines in texts.items():
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return {name: tmp_path / name for name in texts}


def test_one_file_has_the_scores_of_its_lines(texts: dict[str, list[str]], files: dict[str, Path]) -> None:
    comparison = compare([files["bad"]], [files["ref"], files["other"]], target_language="de", lowercase=True)
    expected = score(texts["bad"], texts["ref"], texts["other"], target_language="de", lowercase=True)
    assert comparison.scores == (expected,)
    assert str(comparison) == str(expected)
    report = comparison.report()
    assert {name: report.pop(name) for name in expected.report()} == expected.report()
    assert report == {
        "hypotheses": str(files["bad"]),
        "references": [str(files["ref"]), str(files["other"])],
        "sentences": 30,
    }


@pytest.mark.parametrize("lowercase", [False, True])
def test_the_bootstrap_is_sacrebleu_s(texts: dict[str, list[str]], files: dict[str, Path], lowercase: bool) -> None:
    comparison = compare(
        [files["bad"], files["good"], files["bad"]], [files["ref"]], target_language="de", lowercase=lowercase
    )
    metrics = {"BLEU": BLEU(lowercase=lowercase), "chrF2++": CHRF(word_order=2, lowercase=lowercase)}
    systems = [("a", texts["bad"]), ("b", texts["good"]), ("c", texts["bad"])]
    signatures, expected = PairedTest(systems, metrics, [texts["ref"]], test_type="bs")()
    for own, theirs in (("bleu", "BLEU"), ("chrf_pp", "chrF2++")):
        row = [(each.mean, each.margin, each.p_value) for each in comparison.resampled[own]]
        assert row[:2] == [(result.mean, result.ci, result.p_value) for result in expected[theirs][:2]]
        assert comparison.signatures[own] == str(signatures[theirs])
        assert "|bs:1000|seed:12345|" in comparison.signatures[own]
        assert row[0][2] is None
        assert row[1][2] == pytest.approx(1 / 1001)
        # The same text has no difference, which sacreBLEU itself calls one that is hardly chance.
        assert row[2][2] == 1
    json.dumps(comparison.report())


def test_two_files_side_by_side(files: dict[str, Path]) -> None:
    comparison = compare([files["bad"], files["good"]], [files["ref"]], target_language="de")
    report = comparison.report()
    assert report["sentences"] == 30
    assert [system["hypotheses"] for system in report["systems"]] == [str(files["bad"]), str(files["good"])]
    assert [system["bleu"] for system in report["systems"]] == [each.bleu.value for each in comparison.scores]
    good = comparison.resampled["chrf_pp"][1]
    assert report["systems"][1]["paired_bootstrap"]["chrf_pp"] == {
        "mean": good.mean,
        "margin": good.margin,
        "p_value": good.p_value,
    }
    lines = str(comparison).splitlines()
    assert [line for line in lines if "p = " in line] == [
        f"{label:8} {found.mean:6.2f} ± {found.margin:4.2f}  p = {found.p_value:.4f}  {files['good']}"
        for label, found in (("BLEU", comparison.resampled["bleu"][1]), ("chrF++", good))
    ]


def test_files_of_other_lengths(files: dict[str, Path]) -> None:
    with files["good"].open("a") as file:
        file.write("one too many\n")
    with pytest.raises(
        UserError, match=r"ref and \S*good must have the same number of lines \(30 and 31\): line i of one must"
    ):
        compare([files["bad"], files["good"]], [files["ref"]], target_language="de")
    files["ref"].write_text("")
    files["bad"].write_text("")
    with pytest.raises(UserError, match=r"ref is empty: use a file with at least one line$"):
        compare([files["bad"]], [files["ref"]], target_language="de")


def test_references_in_one_file_are_refused(files: dict[str, Path], tmp_path: Path) -> None:
    both = tmp_path / "both.tsv"
    pairs = zip(*(files[name].read_text().splitlines() for name in ("ref", "other")), strict=True)
    lines = ["\t".join(pair) for pair in pairs]
    both.write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(
        UserError, match=r"both.tsv has a tab in 100% of its lines, and .*bad in 0%, so it seems to hold"
    ):
        compare([files["bad"]], [both], target_language="de")
    # Tabs of the text itself are on both sides, or in few lines.
    assert compare([both], [both], target_language="de").scores[0].bleu_cased.value == pytest.approx(100)
    both.write_text("\n".join(lines[:20] + ["x"] * 10), encoding="utf-8")
    assert compare([files["bad"]], [both], target_language="de").sentences == 30
