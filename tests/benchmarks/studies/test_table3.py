"""tools/table3.py: the table by hand from made-up figures, and two rows for real on the toy corpus."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.studies.table3 import compare, direction, main
from tests.conftest import run_command


def finished(row: str, bleu: float, **others: Any) -> dict[str, Any]:
    values = {"row": row, "change": "a → b", "parameters": 2_345_678, "steps": 40, "nll": 1.0, "ppl": 2.71828}
    return {**values, "bleu": bleu, "wall_seconds": 1.5, "commands": [f"train {row}"], **others}


ROWS = [
    finished("base", 30.0),
    finished("A1", 29.5),
    finished("A3", 30.125),
    finished("C5", 29.0),
    finished("C7", 31.0),
]

OTHERS = [
    finished("base", 29.9, ppl=3.0, settings={"seed": 8}),
    finished("base", 30.1, ppl=4.0, settings={"seed": 9}),
]


@pytest.mark.parametrize(
    ("difference", "paper", "threshold", "verdict"),
    [
        (0.5, 0.2, 0.0, "yes"),
        (-0.5, 0.2, 0.4, "no"),
        (-0.39, 0.2, 0.4, "within noise"),
        (0.4, 0.2, 0.4, "yes"),
        (0.5, 0.0, 0.0, "no"),
        (0.0, 0.0, 0.0, "yes"),
    ],
)
def test_direction(difference: float, paper: float, threshold: float, verdict: str) -> None:
    assert direction(difference, paper, threshold=threshold) == verdict


def test_differences_are_from_base() -> None:
    """The paper: base 25.8, one head 24.9, 16 heads 25.8, width 1024 26.0, ffn 4096 26.2.

    Seeds of 30.0, 29.9 and 30.1 have mean 30 and standard deviation 0.1.
    """
    compared = compare(ROWS, OTHERS)
    assert [row["bleu_difference"] for row in compared] == pytest.approx([0.0, -0.5, 0.125, -1.0, 1.0])
    assert [row["paper_bleu_difference"] for row in compared] == [0.0, -0.9, 0.0, 0.2, 0.4]
    assert [row["same_direction"] for row in compared] == [None, "yes", "within noise", "no", "yes"]


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
    data, out = tmp_path / "data", tmp_path / "a table"
    run_command(sys.executable, "tools/prepare_data.py", "--toy", 120, "--vocab-size", 400, "--out", data)
    command = [sys.executable, "tools/table3.py", "--data", data, "--out", out, "--preset", "tiny"]
    command += ["--ranks", 1, "--max-steps"]
    first = run_command(*command, 3, "--rows", "E")
    assert "--model.positions=learned" in first
    rows = json.loads((out / "table3.json").read_text())["figures"]["rows"]
    assert [(row["row"], row["change"], row["steps"]) for row in rows] == [
        ("base", "-", 3),
        ("E", "positions sinusoidal → learned", 3),
    ]
    assert rows[1]["parameters"] - rows[0]["parameters"] == 1024 * 128
    again = run_command(*command, 3, "--rows", "base")
    assert "$ " not in again
    assert "| E | positions sinusoidal → learned |" in again
    second = tmp_path / "second"
    of_second = [second if word == out else word for word in command]
    run_command(*of_second, 3, "--rows", "base", "--seed", 2)
    noisy = run_command(*command, 3, "--rows", "base", "--other-seeds", second)
    assert "from the mean of 2 seeds of base" in noisy
    assert json.loads((out / "table3.json").read_text())["seeds"] == [1, 2]
    same = run_command(*command, 3, "--rows", "base", "--other-seeds", out, status=1)
    assert "was trained with the same seed" in same
    other = run_command(*command, 4, "--rows", "base", "--other-seeds", second, status=1)
    assert "was trained with another max_steps: only the seed may differ" in other
