"""Trainings whose output has nowhere to go: closed pipes, full disks, closed streams. Real processes and disks."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dist_transformer.run.checkpoint.reader import checkpoint_problem
from dist_transformer.run.layout import checkpoints_of, read_records
from tests.conftest import deepspeed_command
from tests.faults.disks import mounted
from tests.jobs import Job

pytestmark = pytest.mark.slice(name="worlds")

ALONE = (sys.executable, "-m", "dist_transformer.train")
STEPS = ("--max-steps", 8, "--save-every", 4, "--validate-every", 4, "--validate-sentences", 4)
# What a line that is lost is reported as.
LOST = "cannot be written ("


def ended(job: Job) -> str:
    """Wait for its end, and return what could be read of it. The run is finished and whole."""
    assert job.statuses() == [0], job.output
    assert "Traceback" not in job.output
    assert "Exception ignored" not in job.output
    assert [record["step"] for record in read_records(job.run_dir, "end")] == [8], job.output
    assert checkpoints_of(job.run_dir)[0].name == "step-00000008"
    assert [checkpoint_problem(path) for path in checkpoints_of(job.run_dir)] == [None, None]
    assert [record["step"] for record in read_records(job.run_dir, "train")] == list(range(1, 9))
    return job.output


def test_a_training_outlives_its_outputs(job: Callable[..., Job], tmp_path: Path) -> None:
    """Started together; each ends with status 0 and a whole run on the sentences of the undisturbed one."""
    in_the_way = tmp_path / "piped" / "tensorboard"
    in_the_way.parent.mkdir()
    in_the_way.write_text("a file where TensorBoard's folder should be")
    undisturbed = job("undisturbed", *STEPS).start_shell(ALONE, "")
    redirected = {
        "piped": "| head -n 2",
        "full": "> /dev/full",
        "closed": ">&- 2>&-",
        "deaf": "> /dev/full 2>&1",
        "launched": "2>&1 | head -n 2",
        "launched-closed": "2> /dev/full | head -n 2",
    }

    def command(name: str) -> tuple[object, ...]:
        return (*deepspeed_command(2), "--module", ALONE[-1]) if name.startswith("launched") else ALONE

    others = {name: job(name, *STEPS).start_shell(command(name), to) for name, to in redirected.items()}
    whole = ended(undisturbed)
    assert LOST not in whole
    assert " average --run-dir" in whole[whole.index("next:") :]
    assert (undisturbed.run_dir / "tensorboard").is_dir()
    outputs = {name: ended(other) for name, other in others.items()}
    assert {name: outputs[name].count(LOST) for name in ("piped", "full")} == {"piped": 2, "full": 1}, outputs
    assert "stdout cannot be written (Broken pipe): training continues" in outputs["piped"]
    assert "TensorBoard's file cannot be written (File exists" in outputs["piped"]
    assert "stdout cannot be written (No space left on device): training continues" in outputs["full"]
    assert outputs["closed"] == outputs["deaf"] == ""
    for other in others.values():
        assert other.ledger == undisturbed.ledger, other.run_dir
    # A record that a killed process owes is written by the next start.
    metrics = undisturbed.run_dir / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    assert json.loads(lines[-1])["kind"] == "end"
    metrics.write_text("".join(lines[:-1]))
    assert "already finished at step 8" in ended(job("undisturbed", *STEPS).start_shell(ALONE, ""))


def test_a_training_outlives_the_disk_of_tensorboard(job: Callable[..., Job], tmp_path: Path) -> None:
    board = tmp_path / "run" / "tensorboard"
    board.mkdir(parents=True)
    # Room for the records of the start and not for those of the first validation.
    with mounted("-t", "tmpfs", "-o", "size=8k", "tmpfs", board):
        output = ended(job("run", *STEPS).start_shell(ALONE, ""))
    assert output.count(LOST) == 1, output
    assert "TensorBoard's file cannot be written (No space left on device): training continues" in output
    assert "finished at step 8" in output
