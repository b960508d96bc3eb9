"""Sinks of a run's records: what is added from outside, and TensorBoard's file on a disk that does not take it."""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dist_transformer.base.errors import UserError
from dist_transformer.config.presets import PRESETS
from dist_transformer.reporting.reporter import Reporter
from dist_transformer.reporting.sinks import SINKS, MetricSink
from dist_transformer.reporting.trackers import TRACKERS
from dist_transformer.run.layout import read_records
from tests.conftest import run_python
from tests.reporting.recorded import lines_of, make_sheet


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

    def make(kind: type[Kept], run_dir: Path, continues_after: int) -> MetricSink:
        made.append(kind(run_dir, continues_after))
        return made[-1]

    monkeypatch.setitem(SINKS._entries, "broken", partial(make, Broken))
    monkeypatch.setitem(SINKS._entries, "kept", partial(make, Kept))
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


def test_a_file_in_place_of_the_folder_is_reported_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tensorboard").write_text("")
    reporter = Reporter(tmp_path, is_main=True, max_steps=9, first_step=0)
    reporter.record("train", 1, {"loss": 1.0})
    reporter.samples(make_sheet(1))
    reporter.settings(PRESETS["tiny"])
    reporter.close()
    assert capsys.readouterr().out == (
        "TensorBoard's file cannot be written (File exists): training continues without it; "
        "metrics.jsonl has the figures\n"
    )
    assert [record["step"] for record in lines_of(tmp_path)] == [1]


# The kernel refuses more than 4 KiB of any file, as a full disk would.
FULL = """
import json, resource, sys
from pathlib import Path
from dist_transformer.reporting.board import Board
from dist_transformer.reporting.sinks import OptionalSink
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
errors = []
board = OptionalSink(lambda: Board(Path(sys.argv[1]), first_step=0), lambda error: errors.append((step, str(error))))
for step in range(1, 200):
    board.use(lambda sink: sink.record("train", step, {"loss": float(step)}))
board.use(Board.close)
print(json.dumps(errors))
"""


@pytest.mark.system
def test_what_was_written_before_the_disk_was_full_is_there(tmp_path: Path) -> None:
    done = run_python("-c", FULL, tmp_path)
    ((step, error),) = json.loads(done.stdout)
    assert "File too large" in error
    # No thread of a library reports it a second time.
    assert done.stderr == ""
    board = EventAccumulator(str(tmp_path))
    board.Reload()
    assert [(event.step, event.value) for event in board.Scalars("main/loss")] == [(n, n) for n in range(1, step)]
    assert step > 10


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
