"""tools/table3.py: the table by hand from made-up figures, and two rows for real on the toy corpus."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.studies.table3 import compare, direction, main
from tests.conftest import run_command


def test_differences_are_from_base() -> None:
    """The paper: base 25.8, one head 24.9, 16 heads 25.8, width 1024 26.0, ffn 4096 26.2.

    Seeds of 30.0, 29.9 and 30.1 have mean 30 and standard deviation 0.1.
    """
    rows = {"base": 30.0, "A1": 29.5, "A3": 30.125, "C5": 29.0, "C7": 31.0}
    made: list[dict[str, Any]] = [{"row": row, "bleu": bleu, "steps": 40} for row, bleu in rows.items()]
    figures = compare(made, [{"bleu": 29.9}, {"bleu": 30.1}])
    compared = figures["rows"]
    assert (figures["base_bleu"], figures["noise_bleu"]) == pytest.approx((30.0, 0.1))
    assert [row["bleu_difference"] for row in compared] == pytest.approx([0.0, -0.5, 0.125, -1.0, 1.0])
    assert [row["paper_bleu_difference"] for row in compared] == [0.0, -0.9, 0.0, 0.2, 0.4]
    assert [row["same_direction"] for row in compared] == [None, "yes", "within noise", "no", "yes"]
    assert figures["verdicts"] == {"yes": 2, "no": 1, "within noise": 1}
    # Seldom: as far as the threshold, and no difference in the paper, here or in both.
    cases = ((0.4, 0.2, 0.4, "yes"), (-0.5, 0.2, 0.4, "no"), (0.5, 0.0, 0.0, "no"), (0.0, 0.0, 0.0, "yes"))
    assert all(direction(ours, theirs, threshold=least) == verdict for ours, theirs, least, verdict in cases)


def test_flags_of_a_row_are_those_it_is_trained_with(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing need exist; big takes three times the steps of base, and twice the widths that the flags give it."""
    words = "table3.py --data my-data --out o --preset tiny --max-steps 100 --flags-of big -- --model.ffn-width 64"
    monkeypatch.setattr(sys, "argv", words.split())
    main()
    expected = (
        "--preset tiny --data my-data --run-dir o/big --seed 1 --model.ffn-width 64 --model.width=256 --model.heads=8 "
        "--model.ffn-width=128 --model.dropout=0.3 --optimizer.peak-lr=0.002121320343559643 --max-steps 300"
    )
    assert capsys.readouterr().out.split() == expected.split()


@pytest.mark.slice(name="benchmarks")
def test_rows_are_trained_once(tmp_path: Path) -> None:
    data, out, second = tmp_path / "data", tmp_path / "a table", tmp_path / "second"
    run_command(sys.executable, "tools/prepare_data.py", "--toy", 120, "--vocab-size", 400, "--out", data)

    def table3(out: Path, steps: int, *flags: object, status: int = 0) -> str:
        fixed = ["--data", data, "--preset", "tiny", "--ranks", 1, "--max-steps", steps]
        return run_command(sys.executable, "tools/table3.py", *fixed, "--out", out, *flags, status=status)

    table3(out, 3, "--rows", "E")
    rows = json.loads((out / "table3.json").read_text())["figures"]["rows"]
    assert [(row["row"], row["change"], row["steps"]) for row in rows] == [
        ("base", "-", 3),
        ("E", "positions sinusoidal → learned", 3),
    ]
    assert rows[1]["parameters"] - rows[0]["parameters"] == 1024 * 128
    table3(second, 3, "--rows", "base", "--seed", 2)
    again = table3(out, 3, "--rows", "base", "--other-seeds", second)
    assert "$ " not in again
    assert "| E | positions sinusoidal → learned |" in again
    assert "from the mean of 2 seeds of base" in again
    assert json.loads((out / "table3.json").read_text())["seeds"] == [1, 2]
    assert "was trained with the same seed" in table3(out, 3, "--rows", "base", "--other-seeds", out, status=1)
    other = table3(out, 4, "--rows", "base", "--other-seeds", second, status=1)
    assert "was trained with another max_steps: only the seed may differ" in other
