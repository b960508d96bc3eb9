"""Two directions in one run, from text to scores: validated apart, resumed, the same on any number of ranks."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.evaluation.samples import read_sheets
from dist_transformer.model_folder import read_model_info
from dist_transformer.run.layout import read_records
from dist_transformer.run.ledger import read_ledger
from tests.conftest import run_command
from tests.distributed.test_runs import train

pytestmark = pytest.mark.slow

PROGRAM = (sys.executable, "-m", "dist_transformer")


@pytest.fixture(scope="module")
def folders(toy_data: DataFolder, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The toy text both ways, with one vocabulary; the way back is a tenth of it."""
    work, text = tmp_path_factory.mktemp("directions"), toy_data.path / "text"
    there, back = work / "en-de", work / "de-en"
    learned = ("--vocab-size", 400, "--tag", "<2de>", "<2en>")
    for out, split, languages, flags in (
        (there, "train", ("en", "de"), (*learned, "--src-tag", "<2de>")),
        (back, "valid", ("de", "en"), ("--tokenizer", there / "tokenizer.json", "--src-tag", "<2en>")),
    ):
        source, target = (text / f"{split}.{language}" for language in languages)
        run_command(*PROGRAM, "prepare", "--src", source, "--tgt", target, *flags, "--valid-pairs", 20, "--out", out)
    return there, back


@pytest.fixture(scope="module")
def runs(folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """8 steps on one rank, and on two that are started again after 4."""
    work = tmp_path_factory.mktemp("runs")
    places: Any = folders
    flags = ("--data", *places, "--data-temperature", 5, "--precision", "fp32", "--save-every", 4)
    flags = (*flags, "--validate-every", 4, "--validate-sentences", 4, "--seed", 2)
    for ranks, ends in ((1, (8,)), (2, (4, 8))):
        for end in ends:
            train(ranks, folders[0], work / str(ranks), *flags, "--max-steps", end)
    return {ranks: work / str(ranks) for ranks in (1, 2)}


@pytest.fixture(scope="module")
def model(runs: dict[int, Path]) -> Path:
    run_command(*PROGRAM, "average", "--run-dir", runs[2], "--last", 2, "--out", runs[2] / "model")
    return runs[2] / "model"


def test_every_direction_is_validated_by_name_on_the_sentences_of_one_rank(runs: dict[int, Path]) -> None:
    ledgers = [list(read_ledger(runs[ranks] / "ledger.jsonl")) for ranks in (1, 2)]
    assert ledgers[0] == ledgers[1]
    assert len(ledgers[0]) == 8
    one, two = (read_records(runs[ranks], "valid") for ranks in (1, 2))
    assert [record["step"] for record in two] == [4, 8]
    for record, other in zip(two, one, strict=True):
        for name in ("loss", "nll", "bleu", "chrf", "ter"):
            there, back = record[f"en-de/{name}"], record[f"de-en/{name}"]
            assert record[name] == pytest.approx((there + back) / 2)
        assert record["en-de/nll"] != record["de-en/nll"]
        assert [record[name] for name in ("en-de/nll", "de-en/nll")] == pytest.approx(
            [other[name] for name in ("en-de/nll", "de-en/nll")], abs=1e-4
        )
    state = json.loads((runs[2] / "checkpoints/step-00000008/state.json").read_text())
    assert sorted(state["best"]) == [[record["step"], record["nll"]] for record in two]


def test_the_scores_do_not_depend_on_the_ranks(runs: dict[int, Path]) -> None:
    one, two = ([sheet for sheet in read_sheets(runs[ranks]) if sheet.step == 4] for ranks in (1, 2))
    assert [[s.hypothesis for s in sheet.samples] for sheet in one] == [
        [s.hypothesis for s in sheet.samples] for sheet in two
    ]
    assert [sheet.scores for sheet in one] == [sheet.scores for sheet in two]
    assert [len(sheet.scores) for sheet in one] == [3, 3]


def test_samples_and_the_report_have_both(runs: dict[int, Path]) -> None:
    sheets = read_sheets(runs[2])
    assert [(sheet.step, sheet.direction) for sheet in sheets] == [
        *((4, "en-de"), (4, "de-en")),
        *((8, "en-de"), (8, "de-en")),
    ]
    assert [sample.source_tokens[0] for sheet in sheets[:2] for sample in sheet.samples] == ["<2de>"] * 4 + [
        "<2en>"
    ] * 4
    run_command(*PROGRAM, "report", runs[2])
    page = " ".join((runs[2] / "report.html").read_text(encoding="utf-8").split())
    assert "en → de, de → en" in page
    assert "Step 8, en-de: 4 of 4 validation sentences" in page
    assert "Step 8, de-en: 4 of 4 validation sentences" in page
    assert "mean over the directions" in page


def test_a_model_translates_and_is_scored_by_direction(model: Path, folders: tuple[Path, Path], tmp_path: Path) -> None:
    assert [(way.name, way.tags) for way in read_model_info(model).all_directions] == [
        ("en-de", ("<2de>",)),
        ("de-en", ("<2en>",)),
    ]
    valid = folders[1] / "valid"
    words: list[object] = ["evaluate", "--model", model, "--src", valid / "source.txt", "--ref", valid / "target.txt"]
    outputs = {}
    for name, flags in (("own", ()), ("other", ("--tag", "<2de>"))):
        file = tmp_path / f"{name}.json"
        output = run_command(*PROGRAM, *words, "--direction", "de-en", *flags, "--max-extra-tokens", 3, "--json", file)
        assert "sentences, de-en" in output
        outputs[name] = json.loads(file.read_text())
    assert (outputs["own"]["direction"], outputs["own"]["tags"]) == ("de-en", ["<2en>"])
    assert outputs["other"]["tags"] == ["<2de>"]


def test_a_sweep_takes_the_validation_text_of_its_direction(
    runs: dict[int, Path], folders: tuple[Path, Path], tmp_path: Path
) -> None:
    sweep = [*PROGRAM, "average", "--run-dir", runs[1], "--sweep", "1", "--max-extra-tokens", 3, "--out"]
    run_command(*sweep, tmp_path / "m", "--direction", "de-en")
    report = json.loads((tmp_path / "m.sweep.json").read_text())
    assert report["source"] == str(folders[1] / "valid/source.txt")
    output = run_command(*sweep, tmp_path / "n", "--direction", "de-fr", status=1)
    assert "was not trained on de-fr: check --direction" in output
