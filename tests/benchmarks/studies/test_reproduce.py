"""tools/reproduce.py: bands by hand, a figure outside, damaged input, and the recipe for real on Multi30k."""

import dataclasses
import sys
from pathlib import Path

import pytest

from benchmarks.results_table import read_result
from benchmarks.studies.reproduce import BAND_FILE, BAND_SEEDS, COMPARED_SEED, FIGURES, RECIPE, Band, make_table
from tests.conftest import ROOT, run_command


@pytest.mark.parametrize(("floor", "low", "high"), [(0.5, -2.0, 6.0), (4.0, -2.0, 6.0), (5.0, -3.0, 7.0)])
def test_a_band_by_hand(floor: float, low: float, high: float) -> None:
    """1, 2 and 3 have mean 2 and standard deviation 1, so 4 deviations are 4; a larger floor takes their place."""
    band = Band.of([1.0, 2.0, 3.0], floor=floor)
    assert band == Band(mean=2.0, deviation=1.0, low=low, high=high)
    assert all(map(band.holds, (low, 2.0, high)))
    assert not any(map(band.holds, (low - 0.01, high + 0.01, float("nan"))))
    assert (band.distance(2.0), band.distance(low), band.distance(high)) == (0.0, 1.0, 1.0)


def test_the_committed_bands_follow_from_their_seeds_and_are_on_the_page() -> None:
    figures = read_result(BAND_FILE)["figures"]
    assert figures["recipe"] == RECIPE
    assert list(figures["seeds"]) == [str(seed) for seed in BAND_SEEDS]
    assert COMPARED_SEED not in BAND_SEEDS
    for name, (_, floor) in FIGURES.items():
        values = [seed[name] for seed in figures["seeds"].values()]
        band = Band.of(values, floor=floor)
        assert dataclasses.asdict(band) == pytest.approx(figures["bands"][name])
        assert all(band.holds(value) for value in values)
    assert f"\n\n{make_table(figures)}\n\n" in (ROOT / "docs" / "multi30k.md").read_text("utf-8")


@pytest.mark.slice(name="reproduce")
def test_the_recipe_is_reproduced(corpora: Path, tmp_path: Path) -> None:
    """The command of `make reproduce`, from text to BLEU, ends with all figures in the committed bands."""
    command = [sys.executable, "tools/reproduce.py", "--multi30k", corpora / "multi30k"]
    output = run_command(*command, "--out", tmp_path / "out", timeout=1800)
    assert [line.rpartition(": ")[2] for line in output.splitlines()[-4:]] == ["in"] * 4
