"""TensorBoard's file where a disk does not take it. What TensorBoard reads is in test_metrics.py."""

import json
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dist_transformer.reporting.board import Board
from tests.conftest import run_python


def test_a_file_in_place_of_the_folder_is_reported_once(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("")
    warnings: list[str] = []
    board = Board(tmp_path / "tensorboard", first_step=0, warn=warnings.append)
    board.record("train", 1, {"loss": 1.0})
    board.text("samples", "none", 1)
    board.picture("schedule", Figure(), 1)
    board.close()
    (warning,) = warnings
    assert warning.startswith("TensorBoard's file cannot be written (File exists): ")
    assert warning.endswith("): training continues without it; metrics.jsonl has the figures")


# The kernel refuses more than 4 KiB of any file, as a full disk would.
FULL = """
import json, resource, sys
from pathlib import Path
from dist_transformer.reporting.board import Board
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
warnings = []
board = Board(Path(sys.argv[1]), first_step=0, warn=lambda text: warnings.append((step, text)))
for step in range(1, 200):
    board.record("train", step, {"loss": float(step)})
board.close()
print(json.dumps(warnings))
"""


@pytest.mark.system
def test_what_was_written_before_the_disk_was_full_is_there(tmp_path: Path) -> None:
    done = run_python("-c", FULL, tmp_path)
    ((step, warning),) = json.loads(done.stdout)
    assert "File too large" in warning
    # No thread of a library reports it a second time.
    assert done.stderr == ""
    board = EventAccumulator(str(tmp_path))
    board.Reload()
    assert [(event.step, event.value) for event in board.Scalars("main/loss")] == [(n, n) for n in range(1, step)]
    assert step > 10
