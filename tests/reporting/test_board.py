"""TensorBoard's file where a disk does not take it. What TensorBoard reads is in test_tensorboard_records.py."""

import json
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dist_transformer.config.presets import PRESETS
from dist_transformer.reporting.reporter import Reporter
from tests.conftest import run_python
from tests.reporting.recorded import lines_of, make_sheet


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
