"""tools/reproduce.py: bands by hand, a figure outside, damaged input, and the recipe for real on Multi30k."""

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.results_table import read_result
from benchmarks.studies import reproduce
from benchmarks.studies.reproduce import (
    BAND_FILE,
    BAND_SEEDS,
    COMPARED_SEED,
    FIGURES,
    RECIPE,
    Band,
    hash_corpus,
    make_table,
)
from dist_transformer.base.errors import exit_on_user_error
from tests.conftest import ROOT, run_command

INSIDE = {"train_loss": 4.0, "dev_nll": 4.0, "test_chrf": 4.0, "test_bleu": 4.0}
TEXTS = [f"{name}.{language}" for name in ("train", "val", "test_2016_flickr") for language in ("en", "de")]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Files with the names of Multi30k's; nothing is trained on them."""
    folder = tmp_path / "multi30k"
    folder.mkdir()
    for name in TEXTS:
        (folder / name).write_text(f"{name}\n", encoding="utf-8")
    return folder


def band_file(path: Path, hashes: dict[str, str], **changes: Any) -> Path:
    """The committed file with bands from 3 to 5 for every figure, for texts with these hashes."""
    result = json.loads(BAND_FILE.read_text("utf-8"))
    band = {"mean": 4.0, "deviation": 0.25, "low": 3.0, "high": 5.0}
    bands = dict.fromkeys(FIGURES, band)
    result["figures"] |= {"recipe": RECIPE, "corpus_sha256": hashes, "bands": bands, **changes}
    path.write_text(json.dumps(result), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("floor", "low", "high"),
    [(0.5, -2.0, 6.0), (4.0, -2.0, 6.0), (5.0, -3.0, 7.0)],
)
def test_a_band_by_hand(floor: float, low: float, high: float) -> None:
    """1, 2 and 3 have mean 2 and standard deviation 1, so 4 deviations are 4; a larger floor takes their place."""
    band = Band.of([1.0, 2.0, 3.0], floor=floor)
    assert band == Band(mean=2.0, deviation=1.0, low=low, high=high)
    assert [band.holds(value) for value in (low - 0.01, low, 2.0, high, high + 0.01)] == [
        False,
        True,
        True,
        True,
        False,
    ]
    assert not band.holds(float("nan"))
    assert (band.distance(2.0), band.distance(low), band.distance(high)) == (0.0, 1.0, 1.0)


def test_the_committed_bands_follow_from_their_seeds() -> None:
    figures = read_result(BAND_FILE)["figures"]
    assert figures["recipe"] == RECIPE
    assert list(figures["seeds"]) == [str(seed) for seed in BAND_SEEDS]
    assert COMPARED_SEED not in BAND_SEEDS
    for name, figure in FIGURES.items():
        values = [seed[name] for seed in figures["seeds"].values()]
        band = Band.of(values, floor=figure.floor)
        assert dataclasses.asdict(band) == pytest.approx(figures["bands"][name])
        assert all(band.holds(value) for value in values)


def test_the_page_has_the_table_of_the_committed_bands() -> None:
    table = make_table(read_result(BAND_FILE)["figures"])
    assert f"\n\n{table}\n\n" in (ROOT / "docs" / "multi30k.md").read_text("utf-8")


def start(monkeypatch: pytest.MonkeyPatch, *words: object) -> None:
    monkeypatch.setattr(sys, "argv", ["reproduce.py", *map(str, words)])
    exit_on_user_error(reproduce.main)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Figures that stand in place of a training, before the seed or a defect moves them."""
    values = dict(INSIDE)

    def measure(name: str, seed: int, flags: Sequence[str], arguments: Any) -> dict[str, float]:
        (arguments.out / name).mkdir(parents=True)
        # Seeds 1 to 5 differ by 0.1 each, and the defects are far away.
        shift = 2.0 if flags else 0.1 * (seed - 3)
        return {figure: value + shift for figure, value in values.items()} | {"cpu_seconds": 2.0, "wall_seconds": 3.0}

    monkeypatch.setattr(reproduce, "prepare", lambda arguments: None)
    monkeypatch.setattr(reproduce, "measure", measure)
    return values


def test_the_exit_status_is_the_verdict(
    corpus: Path,
    tmp_path: Path,
    measured: dict[str, float],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Seed 6 measures 0.3 more than seed 3."""
    band = band_file(tmp_path / "band.json", hash_corpus(corpus))
    words = ["--multi30k", corpus, "--band", band, "--out"]
    start(monkeypatch, *words, tmp_path / "first")
    assert capsys.readouterr().out.count(": 4.300, band 3.000 to 5.000: in\n") == 4
    measured["test_bleu"] = 4.8
    with pytest.raises(SystemExit) as caught:
        start(monkeypatch, *words, tmp_path / "second")
    captured = capsys.readouterr()
    assert caught.value.code == 1
    assert captured.out.splitlines()[3] == "test BLEU: 5.100, band 3.000 to 5.000: out"
    assert captured.err.startswith("error: test BLEU not reproduced: find the change that moved the figures")


@pytest.mark.slice(name="reproduce")
def test_the_recipe_is_reproduced(corpora: Path, tmp_path: Path) -> None:
    """The command of `make reproduce`, from text to BLEU, ends with all figures in the committed bands."""
    command = [sys.executable, "tools/reproduce.py", "--multi30k", corpora / "multi30k"]
    output = run_command(*command, "--out", tmp_path / "out", timeout=1800)
    assert [line.rpartition(": ")[2] for line in output.splitlines()[-4:]] == ["in"] * 4
