"""Records of a run, as they are kept."""

import math
from pathlib import Path

import pytest

from dist_transformer.reporting.reporter import Reporter, format_seconds, perplexity
from dist_transformer.reporting.sinks import SINKS
from dist_transformer.run.layout import read_records
from tests.reporting.recorded import VALUES, epoch_of, lines_of, make_sheet, scalars

TIMES = {0.6: "0:01", 59.6: "1:00", 61: "1:01", 3599.6: "1:00:00", 3723: "1:02:03", 360_000: "100:00:00"}


@pytest.mark.parametrize(("seconds", "text"), TIMES.items())
def test_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_perplexity() -> None:
    assert perplexity(0.0) == 1.0
    # The paper's base model, newstest2013: 4.92 per piece.
    assert perplexity(1.5933085) == pytest.approx(4.92, rel=1e-6)
    assert perplexity(699.0) < math.inf
    assert perplexity(710.0) == math.inf
    assert math.isnan(perplexity(math.nan))


def test_records_are_json_with_null_where_a_number_is_not_finite(reporter: Reporter, tmp_path: Path) -> None:
    reporter.record("train", 1, {"loss": math.nan, "ppl": math.inf, "norm": -math.inf, "rate": 0.5, "note": "ä"})
    # Each line is there at once: a killed run keeps what it reported.
    assert lines_of(tmp_path) == [
        {"kind": "train", "step": 1, "loss": None, "ppl": None, "norm": None, "rate": 0.5, "note": "ä"}
    ]


def test_an_epoch_by_hand(reporter: Reporter, tmp_path: Path) -> None:
    """900 of 10 · 100 source tokens, 2,940 of 10 · 300 target tokens, 3,840 of 4,000 together."""
    text = reporter.epoch(35, epoch_of(0))
    assert text == "epoch 3 done: 1,234 sentences, 2,940 target tokens (packs 96% full)"
    counts = {"packs": 10, "pairs": 1234, "source_tokens": 900, "target_tokens": 2940}
    fills = {"fill": 0.96, "source_fill": 0.9, "target_fill": 0.98}
    left_out = {"unfit_pairs": 7, "left_out_pairs": 50}
    assert lines_of(tmp_path) == [{"kind": "epoch", "step": 35, "corpus": 0, "epoch": 2, **counts, **fills, **left_out}]
    reporter.close()
    assert scalars(tmp_path)["z_more/epoch/pairs"] == [(35, 1234.0)]
    assert scalars(tmp_path)["z_more/epoch/fill"] == [(35, pytest.approx(0.96))]


def test_epochs_of_several_corpora_are_told_apart(tmp_path: Path) -> None:
    reporter = Reporter(tmp_path, is_main=True, max_steps=100, first_step=0, corpora=["news", "talks"])
    texts = [reporter.epoch(35, epoch_of(corpus)) for corpus in (0, 1)]
    assert [text.partition(" done")[0] for text in texts] == ["epoch 3 of news", "epoch 3 of talks"]
    assert [record["corpus"] for record in read_records(tmp_path, "epoch")] == [0, 1]
    reporter.close()
    assert {"z_more/epoch/corpus_1/fill", "z_more/epoch/corpus_2/fill"} <= scalars(tmp_path).keys()


def test_a_resumed_run_appends(tmp_path: Path) -> None:
    for step in (1, 2):
        reporter = Reporter(tmp_path, is_main=True, max_steps=9, first_step=step - 1)
        reporter.record("train", step, {"loss": 1.0})
        reporter.close()
    assert [record["step"] for record in lines_of(tmp_path)] == [1, 2]


def test_a_quiet_reporter_keeps_records_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reporter = Reporter(tmp_path, is_main=True, max_steps=100, first_step=0, quiet=True)
    reporter.train_line(50, VALUES, seconds_left=61)
    reporter.advance()
    reporter.say("saved")
    reporter.record("train", 50, {"loss": 1.0})
    reporter.close()
    assert capsys.readouterr() == ("", "")
    assert read_records(tmp_path, "train") == [{"kind": "train", "step": 50, "loss": 1.0}]


def test_a_record_that_is_there_is_found(reporter: Reporter) -> None:
    reporter.record("end", 12, {"train_seconds": 1.0})
    assert reporter.has_recorded("end", 12)
    assert not reporter.has_recorded("end", 1)
    assert not reporter.has_recorded("train", 12)


def test_other_ranks_write_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They make no sink either."""
    monkeypatch.setitem(SINKS._entries, "none", None)
    reporter = Reporter(tmp_path, is_main=False, max_steps=100, first_step=0)
    reporter.record("train", 1, VALUES)
    reporter.train_line(1, VALUES, seconds_left=1)
    reporter.advance()
    reporter.say("saved")
    reporter.samples(make_sheet(1))
    reporter.close()
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr() == ("", "")
