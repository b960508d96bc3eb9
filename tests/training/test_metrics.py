import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dist_transformer.training.metrics import Reporter, format_seconds, perplexity, read_records

VALUES = {
    "loss": 1.5, "nll": 1.25, "ppl": 3.49, "learning_rate": 3e-4, "gradient_norm": 0.75,
    "target_tokens_per_second": 12345.6, "skipped_steps": 0,
}  # fmt: skip


@pytest.fixture
def reporter(tmp_path: Path) -> Any:
    reporter = Reporter(tmp_path, is_main=True, max_steps=100, first_step=0)
    yield reporter
    reporter.close()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0:00"), (0.4, "0:00"), (0.6, "0:01"), (59.4, "0:59"), (59.6, "1:00"), (61, "1:01"), (600, "10:00"),
        (3599.4, "59:59"), (3599.6, "1:00:00"), (3723, "1:02:03"), (360_000, "100:00:00"),
    ],
)  # fmt: skip
def test_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_perplexity() -> None:
    assert perplexity(0.0) == 1.0
    # The paper's base model, newstest2013: 4.92 per piece.
    assert perplexity(1.5933085) == pytest.approx(4.92, rel=1e-6)
    assert perplexity(699.0) < math.inf
    assert perplexity(710.0) == math.inf
    assert math.isnan(perplexity(math.nan))


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """As a strict parser reads them: NaN and Infinity are no JSON."""

    def refuse(name: str) -> None:
        raise ValueError(name)

    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def test_records_are_json_with_null_where_a_number_is_not_finite(reporter: Reporter, tmp_path: Path) -> None:
    reporter.record("train", 1, {"loss": math.nan, "ppl": math.inf, "norm": -math.inf, "rate": 0.5, "note": "ä"})
    # Each line is there at once: a killed run keeps what it reported.
    assert lines_of(tmp_path) == [
        {"kind": "train", "step": 1, "loss": None, "ppl": None, "norm": None, "rate": 0.5, "note": "ä"}
    ]


def test_records_of_a_kind(reporter: Reporter, tmp_path: Path) -> None:
    for step in (1, 2):
        reporter.record("train", step, {"loss": float(step)})
        reporter.record("valid", step, {"loss": 10.0 * step})
    assert [record["loss"] for record in read_records(tmp_path, "valid")] == [10.0, 20.0]
    assert read_records(tmp_path, "end") == []


def test_a_resumed_run_appends(tmp_path: Path) -> None:
    for step in (1, 2):
        reporter = Reporter(tmp_path, is_main=True, max_steps=9, first_step=step - 1)
        reporter.record("train", step, {"loss": 1.0})
        reporter.close()
    assert [record["step"] for record in lines_of(tmp_path)] == [1, 2]


def test_a_log_file_has_plain_lines_without_carriage_returns(
    reporter: Reporter, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not sys.stderr.isatty()
    assert reporter.bar is None
    reporter.train_line(50, VALUES, seconds_left=61)
    reporter.advance()
    reporter.say("saved")
    output = capsys.readouterr()
    assert output.err == ""
    assert output.out == (
        "step     50/100  loss 1.500  ppl 3.49  lr 3.00e-04  norm 0.75  tok/s 12,346  left 1:01\nsaved\n"
    )


def test_numbers_that_are_not_finite_are_shown(reporter: Reporter, capsys: pytest.CaptureFixture[str]) -> None:
    reporter.train_line(1, {**VALUES, "loss": math.nan, "gradient_norm": math.inf}, seconds_left=0)
    assert "loss nan" in capsys.readouterr().out


def test_a_terminal_has_a_bar(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    reporter = Reporter(tmp_path, is_main=True, max_steps=100, first_step=40)
    reporter.train_line(41, VALUES, seconds_left=61)
    reporter.advance()
    reporter.say("saved")
    reporter.close()
    output = capsys.readouterr()
    assert "41/100" in output.err
    assert output.out == "saved\n"


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    board = EventAccumulator(str(folder / "tensorboard"))
    board.Reload()
    return {tag: [(event.step, event.value) for event in board.Scalars(tag)] for tag in board.Tags()["scalars"]}


def test_tensorboard_reads_the_scalars(reporter: Reporter, tmp_path: Path) -> None:
    reporter.record("train", 50, {"loss": 1.5, "steps": 3, "name": "no scalar"})
    reporter.record("train", 100, {"loss": 1.25, "steps": 4})
    reporter.record("valid", 100, {"loss": 1.75})
    reporter.close()
    assert scalars(tmp_path) == {
        "train/loss": [(50, 1.5), (100, 1.25)],
        "train/steps": [(50, 3.0), (100, 4.0)],
        "valid/loss": [(100, 1.75)],
    }


def test_a_resumed_run_replaces_the_scalars_after_its_checkpoint(tmp_path: Path) -> None:
    """Killed after step 150, resumed from step 100."""
    for first_step, steps, loss in ((0, (50, 100, 150), 2.0), (100, (150, 200), 1.0)):
        reporter = Reporter(tmp_path, is_main=True, max_steps=200, first_step=first_step)
        for step in steps:
            reporter.record("train", step, {"loss": loss})
        reporter.close()
    assert scalars(tmp_path) == {"train/loss": [(50, 2.0), (100, 2.0), (150, 1.0), (200, 1.0)]}


def test_other_ranks_write_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reporter = Reporter(tmp_path, is_main=False, max_steps=100, first_step=0)
    reporter.record("train", 1, VALUES)
    reporter.train_line(1, VALUES, seconds_left=1)
    reporter.advance()
    reporter.say("saved")
    reporter.close()
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr() == ("", "")
