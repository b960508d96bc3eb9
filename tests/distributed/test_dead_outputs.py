"""Trainings whose output has nowhere to go: closed pipes, full disks, closed streams. Real processes and disks."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from dist_transformer.base.errors import UserError
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.run.checkpoint.reader import checkpoint_problem
from dist_transformer.run.layout import checkpoints_of, read_records
from tests.conftest import ROOT, deepspeed_command
from tests.faults.disks import mounted
from tests.jobs import PATIENCE, SMALL

pytestmark = pytest.mark.slice(name="worlds")

ALONE = (sys.executable, "-m", "dist_transformer.train")
STEPS = ("--max-steps", 8, "--save-every", 4, "--validate-every", 4, "--validate-sentences", 4)
# What a line that is lost is reported as.
LOST = "cannot be written ("


def launch() -> tuple[object, ...]:
    return (*deepspeed_command(2), "--module", "dist_transformer.train")


class Started:
    """One training under a shell; a user's redirections are part of the command."""

    def __init__(self, command: tuple[object, ...], data: DataFolder, run_dir: Path, *, redirected: str) -> None:
        self.run_dir, self.log = run_dir, run_dir.with_suffix(".log")
        words = [str(word) for word in (*command, *SMALL, *STEPS, "--data", data.path, "--run-dir", run_dir)]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                ["bash", "-c", f"{shlex.join(words)} {redirected}; exit ${{PIPESTATUS[0]}}"],
                cwd=ROOT,
                env={**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def output(self) -> str:
        """Once it has ended: what could be read of it. The run is finished and whole."""
        status = self.process.wait(PATIENCE)
        output = self.log.read_text(errors="replace")
        assert status == 0, output
        assert "Traceback" not in output
        assert "Exception ignored" not in output
        assert [record["step"] for record in read_records(self.run_dir, "end")] == [8], output
        assert checkpoints_of(self.run_dir)[0].name == "step-00000008"
        assert [checkpoint_problem(path) for path in checkpoints_of(self.run_dir)] == [None, None]
        assert [record["step"] for record in read_records(self.run_dir, "train")] == list(range(1, 9))
        return output

    @property
    def ledger(self) -> str:
        return (self.run_dir / "ledger.jsonl").read_text()


@pytest.fixture
def held() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_a_training_outlives_its_outputs(toy_data: DataFolder, tmp_path: Path) -> None:
    """Started together; each ends with status 0 and a whole run on the sentences of the undisturbed one."""

    def start(name: str, redirected: str, command: tuple[object, ...] = ALONE) -> Started:
        return Started(command, toy_data, tmp_path / name, redirected=redirected)

    in_the_way = tmp_path / "piped" / "tensorboard"
    in_the_way.parent.mkdir()
    in_the_way.write_text("a file where TensorBoard's folder should be")
    undisturbed = start("undisturbed", "")
    piped = start("piped", "| head -n 2")
    full = start("full", "> /dev/full")
    closed = start("closed", ">&- 2>&-")
    deaf = start("deaf", "> /dev/full 2>&1")
    launched = start("launched", "2>&1 | head -n 2", launch())
    launched_closed = start("launched-closed", "2> /dev/full | head -n 2", launch())

    whole = undisturbed.output()
    assert LOST not in whole
    assert " average --run-dir" in whole[whole.index("next:") :]
    assert (undisturbed.run_dir / "tensorboard").is_dir()
    output = piped.output()
    assert output.count(LOST) == 2, output
    assert "stdout cannot be written (Broken pipe): training continues" in output
    assert "TensorBoard's file cannot be written (File exists" in output
    output = full.output()
    assert output.count(LOST) == 1, output
    assert "stdout cannot be written (No space left on device): training continues" in output
    for silent in (closed, deaf):
        assert silent.output() == ""
    launched.output()
    launched_closed.output()
    for run in (piped, full, closed, deaf, launched, launched_closed):
        assert run.ledger == undisturbed.ledger, run.run_dir
    # A record that a killed process owes is written by the next start.
    metrics = undisturbed.run_dir / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    assert json.loads(lines[-1])["kind"] == "end"
    metrics.write_text("".join(lines[:-1]))
    assert "already finished at step 8" in start("undisturbed", "").output()


def test_a_training_outlives_the_disk_of_tensorboard(toy_data: DataFolder, tmp_path: Path, held: ExitStack) -> None:
    board = tmp_path / "run" / "tensorboard"
    board.mkdir(parents=True)
    try:
        # Room for the records of the start and not for those of the first validation.
        held.enter_context(mounted("-t", "tmpfs", "-o", "size=8k", "tmpfs", board))
    except UserError as error:
        pytest.skip(str(error))
    output = Started(ALONE, toy_data, tmp_path / "run", redirected="").output()
    assert output.count(LOST) == 1, output
    assert "TensorBoard's file cannot be written (No space left on device): training continues" in output
    assert "finished at step 8" in output
