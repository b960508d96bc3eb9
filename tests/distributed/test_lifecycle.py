"""How a job ends before its run does: signals, time limit, hangs, errors, launchers that die. Real ranks."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from dist_transformer.data.folder import DataFolder
from dist_transformer.training.metrics import read_records
from dist_transformer.training.signals import INTERRUPTED
from tests.conftest import ROOT, deepspeed_command

pytestmark = pytest.mark.slow

WORKER = ROOT / "tests" / "distributed" / "worker_faults.py"
SMALL = [
    *("--preset", "tiny", "--model.width", "32", "--model.ffn-width", "64", "--model.heads", "2"),
    *("--model.encoder-layers", "1", "--model.decoder-layers", "1", "--batch.max-target-tokens", "256"),
    *("--optimizer.warmup-steps", "10", "--log-every", "1", "--save-every", "1000"),
    *("--validate-every", "8", "--validate-sentences", "0"),
]
# On a machine that is busy with other things.
PATIENCE = 300


class Job:
    """Processes of one launch, their output in one file."""

    def __init__(self, folder: Path, data: DataFolder, run_dir: Path, *flags: object, fault: str = "") -> None:
        self.run_dir, self.log = run_dir, folder / f"log-{len(list(folder.glob('log-*')))}"
        self.log.touch()
        words = [*SMALL, "--data", data.path, "--run-dir", run_dir, *flags]
        self.arguments = [str(word) for word in words]
        self.environment = {**os.environ, "DS_ACCELERATOR": "cpu", "FAULT": fault or "0:0:none"}
        self.processes: list[subprocess.Popen[bytes]] = []

    def start_ranks(self, world: int = 2) -> "Job":
        """Without any launcher."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = str(probe.getsockname()[1])
        for rank in range(world):
            named = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world),
                "LOCAL_WORLD_SIZE": str(world),
            }
            self._start([sys.executable, str(WORKER)], {**named, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port})
        return self

    def start_deepspeed(self) -> "Job":
        self._start([str(word) for word in [*deepspeed_command(2), WORKER]], {})
        return self

    def _start(self, command: list[str], named: dict[str, str]) -> None:
        with self.log.open("ab") as log:
            started = subprocess.Popen(
                [*command, *self.arguments],
                cwd=ROOT, env={**self.environment, **named}, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        self.processes.append(started)

    def statuses(self) -> list[int]:
        try:
            return [process.wait(PATIENCE) for process in self.processes]
        except subprocess.TimeoutExpired:
            pytest.fail(f"does not end:\n{self.output}")

    def wait_for_training(self) -> None:
        metrics, deadline = self.run_dir / "metrics.jsonl", time.monotonic() + PATIENCE
        while not (metrics.exists() and metrics.read_text()):
            assert time.monotonic() < deadline, self.output
            assert self.processes[0].poll() is None, self.output
            time.sleep(0.05)

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in (self.run_dir / "checkpoints").glob("step-*"))


@pytest.fixture
def jobs() -> Iterator[list[Job]]:
    """Jobs whose processes are ended with the test."""
    started: list[Job] = []
    yield started
    for job in started:
        for process in job.processes:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            process.wait()


def test_stopped_twice_a_run_ends_as_if_it_was_not(toy_data: DataFolder, tmp_path: Path, jobs: list[Job]) -> None:
    steps = ("--max-steps", 12)
    whole = Job(tmp_path, toy_data, tmp_path / "whole", *steps).start_ranks()
    run_dir = tmp_path / "run"
    # One rank of two is told, and each once more while it saves.
    told = Job(tmp_path, toy_data, run_dir, *steps, fault="1:3:SIGUSR1").start_ranks()
    jobs += [whole, told]
    assert told.statuses() == [INTERRUPTED] * 2, told.output
    assert "stopped at step 4, SIGUSR1 on rank 1" in told.output
    assert told.checkpoints == ["step-00000004"]
    # Under DeepSpeed's launcher, and when a validation is due: that one is done when the run goes on.
    launched = Job(tmp_path, toy_data, run_dir, *steps, fault="1:7:SIGTERM").start_deepspeed()
    jobs.append(launched)
    assert launched.statuses() == [INTERRUPTED], launched.output
    assert "stopped at step 8, SIGTERM on rank 1" in launched.output
    assert read_records(run_dir, "valid") == []
    last = Job(tmp_path, toy_data, run_dir, *steps).start_ranks()
    jobs.append(last)
    assert last.statuses() == [0, 0], last.output
    assert whole.statuses() == [0, 0], whole.output
    name = "weights/step-00000012.safetensors"
    expected, found = load_file(tmp_path / "whole" / name), load_file(run_dir / name)
    assert all(expected[key].equal(found[key]) for key in expected)
    assert (run_dir / "ledger.jsonl").read_text() == (tmp_path / "whole" / "ledger.jsonl").read_text()
    assert read_records(run_dir, "valid") == read_records(tmp_path / "whole", "valid")
    before = (run_dir / "metrics.jsonl").read_text()
    again = Job(tmp_path, toy_data, run_dir, *steps).start_ranks(1)
    jobs.append(again)
    assert again.statuses() == [0], again.output
    assert "finished before, at step 12: all steps done" in again.output
    assert "average_checkpoints.py" in again.output
    assert (run_dir / "metrics.jsonl").read_text() == before


def test_whatever_happens_to_one_rank_ends_all(toy_data: DataFolder, tmp_path: Path, jobs: list[Job]) -> None:
    """Started together, for they wait most of the time."""
    limit = ("--timeout-minutes", 0.2)
    frozen = Job(tmp_path, toy_data, tmp_path / "frozen", *limit, fault="1:3:SIGSTOP").start_ranks()
    raised = Job(tmp_path, toy_data, tmp_path / "raised", fault="1:3:raise").start_ranks()
    orphaned = Job(tmp_path, toy_data, tmp_path / "orphaned", "--max-steps", 10**6).start_deepspeed()
    limited = Job(tmp_path, toy_data, tmp_path / "limited", "--walltime-minutes", 0.01).start_ranks()
    jobs += [frozen, raised, orphaned, limited]

    assert limited.statuses() == [INTERRUPTED] * 2, limited.output
    assert "stopped at step 1, the time limit is near" in limited.output
    assert limited.checkpoints == ["step-00000001"]

    assert raised.statuses() == [1, 1], raised.output
    assert "ValueError: boom" in raised.output
    assert "error: rank 0 ends: rank 1 failed: ValueError: boom" in raised.output

    assert frozen.processes[0].wait(PATIENCE) == 1, frozen.output
    rank_1 = frozen.processes[1]
    named = f"rank 1 ({socket.gethostname()}, process {rank_1.pid}) gives no sign of life; last seen in training"
    assert named in frozen.output
    stacks = (frozen.run_dir / "hangs" / "rank-0.txt").read_text()
    assert "no progress in training, step 3, for 0.2 minutes" in stacks
    assert "_train_step" in stacks
    assert named in stacks
    rank_1.send_signal(signal.SIGCONT)
    assert rank_1.wait(PATIENCE) == 1, frozen.output

    orphaned.wait_for_training()
    launcher = psutil.Process(orphaned.processes[0].pid)
    family = launcher.children(recursive=True)
    assert len(family) == 3
    launcher.kill()
    _, alive = psutil.wait_procs(family, timeout=PATIENCE)
    assert alive == [], orphaned.output
    assert f"its launcher, process {launcher.pid}, is gone" in orphaned.output
