"""tools/table3.py: the table by hand from made-up figures, and two rows for real on the toy corpus."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.results_table import read_result
from benchmarks.studies.table3 import check_steps, compare, direction, main, make_table, write_results
from dist_transformer.base.errors import UserError
from dist_transformer.config.table3 import VARIANTS
from dist_transformer.data.folder.reader import DataFolder
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
        (-0.5, -0.2, 0.0, "yes"),
        (0.5, -0.2, 0.0, "no"),
        (-0.5, 0.2, 0.4, "no"),
        (-0.39, 0.2, 0.4, "within noise"),
        (0.4, 0.2, 0.4, "yes"),
        (0.5, 0.0, 0.0, "no"),
        (0.0, 0.0, 0.0, "yes"),
        (0.0, 0.2, 0.0, "no"),
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


def test_the_table_by_hand() -> None:
    lines = make_table(ROWS[:3], OTHERS).splitlines()
    assert lines[2:5] == [
        "| base | a → b | 2.35M | 3.24 | 30.0 ± 0.1 |  |  |  |",
        "| A1 | a → b | 2.35M | 2.72 | 29.5 | -0.5 | -0.9 | yes |",
        "| A3 | a → b | 2.35M | 2.72 | 30.1 | +0.1 | +0.0 | within noise |",
    ]
    assert lines[-1] == (
        "Differences are in BLEU, from the mean of 3 seeds of base. Threshold for `within noise`: 0.20 BLEU, twice "
        "their spread."
    )


def test_the_table_says_what_it_does_not_know_and_where_it_departs() -> None:
    table = make_table([finished("base", 30.0), finished("B1", 29.0)], [])
    assert "| base | a → b | 2.35M | 2.72 | 30.0 |  |  |  |" in table
    assert "Threshold for `within noise`: none, because base has one seed." in table
    assert "Rows B narrow the values together with the keys; the paper narrows only queries and keys." in table


def test_the_result_file_keeps_to_the_layout(toy_data: DataFolder, tmp_path: Path) -> None:
    arguments = argparse.Namespace(out=tmp_path / "results", preset="tiny", seed=7)
    arguments.out.mkdir()
    write_results(arguments, toy_data.index, ROWS, OTHERS, "the table")
    result = read_result(arguments.out / "table3.json")
    assert result["figures"]["verdicts"] == {"yes": 2, "no": 1, "within noise": 1}
    assert (result["seeds"], result["wall_seconds"], result["synthetic"]) == ([7, 8, 9], 10.5, True)
    assert [row["paper"]["bleu"] for row in result["figures"]["rows"]] == [25.8, 24.9, 25.8, 26.0, 26.2]
    assert (arguments.out / "table3.md").read_text(encoding="utf-8") == "the table\n"


@pytest.mark.system
def test_an_unknown_row_is_refused_before_anything_is_trained(toy_data: DataFolder, tmp_path: Path) -> None:
    command = [sys.executable, "tools/table3.py", "--data", toy_data.path, "--out", tmp_path / "out"]
    output = run_command(*command, "--rows", "C1", "Z9", status=1)
    assert output.startswith(f"error: --variant Z9 is unknown: choose one of {', '.join(VARIANTS)}")
    assert not (tmp_path / "out").exists()


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


def test_without_validation_there_is_no_perplexity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Said before anything is trained."""
    words = "table3.py --data d --out o --preset tiny --flags-of base -- --validate-every 0"
    monkeypatch.setattr(sys, "argv", words.split())
    with pytest.raises(UserError, match=r"^the table needs a perplexity, and --validate-every is 0: leave it out"):
        main()


@pytest.mark.parametrize("flag", ["--ranks", "--average"])
def test_none_is_no_number(flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed's launcher takes 0 processes for one."""
    monkeypatch.setattr(sys, "argv", ["table3.py", "--data", "d", "--out", "o", flag, "0"])
    with pytest.raises(UserError, match=rf"^{flag} is 0: it must be above 0$"):
        main()


def test_a_row_that_is_past_the_asked_steps_is_refused(tmp_path: Path) -> None:
    check_steps(tmp_path, 4)
    lines = [json.dumps({"kind": "checkpoint", "step": step, "seconds": 0.1}) for step in (2, 4)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    check_steps(tmp_path, 4)
    with pytest.raises(UserError, match="has 4 steps, this call allows 3: choose another --out"):
        check_steps(tmp_path, 3)


@pytest.mark.slice(name="benchmarks")
def test_rows_are_trained_once_and_resume(tmp_path: Path) -> None:
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
    for folder, problem in ((out, "was trained with the same seed"), (data, "holds no finished row `base`")):
        assert problem in run_command(*command, 3, "--rows", "base", "--other-seeds", folder, status=1)
    other = run_command(*command, 4, "--rows", "base", "--other-seeds", second, status=1)
    assert "was trained with another max_steps: only the seed may differ" in other
    longer = run_command(*command, 4, "--rows", "base", "--", "--optimizer.warmup-steps", 200)
    assert "resumed from" in longer
    assert [row["steps"] for row in json.loads((out / "table3.json").read_text())["figures"]["rows"]] == [4]
