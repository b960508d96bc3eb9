"""Sinks of a run's records: what is added from outside gets all of them, and cannot stop a training."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dist_transformer.base.errors import UserError
from dist_transformer.config.presets import PRESETS
from dist_transformer.reporting.reporter import Reporter
from dist_transformer.reporting.sinks import SINKS, MetricSink
from dist_transformer.reporting.trackers import TRACKERS
from dist_transformer.run.layout import read_records


class Kept:
    """A sink in memory."""

    def __init__(self, run_dir: Path, continues_after: int) -> None:
        self.run_dir, self.continues_after = run_dir, continues_after
        self.records, self.closed = list[tuple[str, int, dict[str, Any]]](), False

    def record(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        self.records.append((kind, step, dict(values)))

    def close(self) -> None:
        self.closed = True


class Broken(Kept):
    def record(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        super().record(kind, step, values)
        raise RuntimeError("no network\nand more")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Kept]:
    made: list[Kept] = []

    def add(name: str, kind: type[Kept]) -> None:
        def make(run_dir: Path, continues_after: int) -> MetricSink:
            made.append(kind(run_dir, continues_after))
            return made[-1]

        monkeypatch.setitem(SINKS._entries, name, make)

    add("broken", Broken)
    add("kept", Kept)
    return made


def test_a_sink_gets_every_record_and_one_that_fails_is_left_out(
    made: list[Kept], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reporter = Reporter(tmp_path, is_main=True, max_steps=9, first_step=7)
    for step in (1, 2):
        reporter.record("train", step, {"loss": 1.0 / step})
    reporter.close()
    broken, kept = made
    assert kept.records == [("train", 1, {"loss": 1.0}), ("train", 2, {"loss": 0.5})]
    assert kept.closed
    assert (kept.run_dir, kept.continues_after) == (tmp_path, 7)
    assert len(broken.records) == 1
    assert [record["step"] for record in read_records(tmp_path, "train")] == [1, 2]
    warning = "metric sink 'broken' failed (RuntimeError: no network): training continues without it\n"
    assert capsys.readouterr().out == warning


def test_a_sink_that_cannot_be_made_is_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: Path, __: int) -> MetricSink:
        raise ValueError("no key")

    monkeypatch.setitem(SINKS._entries, "remote", fail)
    reporter = Reporter(tmp_path, is_main=True, max_steps=2, first_step=0)
    reporter.record("train", 1, {"loss": 1.0})
    reporter.close()
    assert capsys.readouterr().out.count("metric sink 'remote' failed (ValueError: no key)") == 1


def test_other_ranks_make_no_sink(made: list[Kept], tmp_path: Path) -> None:
    reporter = Reporter(tmp_path, is_main=False, max_steps=2, first_step=0)
    reporter.record("train", 1, {"loss": 1.0})
    reporter.close()
    assert made == []


def test_sinks_of_the_package_are_chosen_by_name(
    made: list[Kept], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SINKS, "_entries", {})
    monkeypatch.setitem(TRACKERS, "wandb", lambda *given: made.append(Kept(*given)) or made[-1])
    for number, (sinks, trackers, has_board) in enumerate(
        ((("tensorboard",), 0, True), (("wandb",), 1, False), (("tensorboard", "wandb"), 2, True))
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        reporter = Reporter(folder, is_main=True, max_steps=9, first_step=0, sinks=sinks)
        reporter.record("train", 1, {"loss": 1.0})
        reporter.close()
        assert (len(made), (folder / "tensorboard").exists()) == (trackers, has_board)
    assert [each.records for each in made] == [[("train", 1, {"loss": 1.0})]] * 2
    with pytest.raises(UserError, match=r"sinks is \('comet',\): choose among tensorboard, wandb, mlflow"):
        PRESETS["tiny"].changed(sinks=("comet",))
