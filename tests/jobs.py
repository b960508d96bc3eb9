"""Trainings as users start them: real processes of one launch, their output in one file."""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import psutil
from safetensors.torch import load_file

from benchmarks.launching import overridden
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.runtime.launch import free_port
from tests.commands import Begun, rank_variables
from tests.conftest import ROOT, allow_interrupts, begin_python, deepspeed_command
from tests.support.tiny import TINY_FLAGS

WORKER = ROOT / "tests" / "distributed" / "worker_faults.py"
SMALL = (*TINY_FLAGS, "--optimizer.warmup-steps", "10", "--log-every", "1")
# Seconds, on a machine that is busy with other things.
PATIENCE = 300


class Job:
    """One launch of a training.

    Args:
        fault: what one of its ranks does to itself, as worker_faults.py reads it.
        threads: of each rank.
    """

    def __init__(
        self, folder: Path, data: DataFolder, run_dir: Path, *flags: object, fault: str = "", threads: int = 1
    ) -> None:
        self.run_dir, self.log = run_dir, folder / f"log-{len(list(folder.glob('log-*')))}"
        self.log.touch()
        self.arguments = overridden([*SMALL, "--data", data.path, "--run-dir", run_dir, *flags])
        self.environment = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": str(threads), "FAULT": fault or "0:0:none"}
        self.threads = threads
        self.processes: list[subprocess.Popen[bytes] | Begun] = []

    def start_ranks(self, world: int = 2, *, absent: Collection[int] = (), port: int | None = None) -> "Job":
        """Without any launcher, and without the `absent` ranks."""
        port = port or free_port()
        for rank in sorted(set(range(world)) - set(absent)):
            environment = self._of_rank(rank, world, port)
            if self.threads == 1:
                self.processes.append(begin_python(WORKER, *self.arguments, output=self.log, **environment))
            else:
                # As many threads as its libraries have found at their start.
                self._start([sys.executable, WORKER, *self.arguments], environment)
        return self

    def _of_rank(self, rank: int, world: int, port: int) -> dict[str, str]:
        master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        return {**self.environment, **master, **rank_variables(rank, world)}

    def start_deepspeed(self, world: int = 2, *, port: int | None = None) -> "Job":
        command = deepspeed_command(world)
        self._start([*command[:-1], port or command[-1], WORKER, *self.arguments], self.environment)
        return self

    def start_apart(self, folder: Path, rank: int, port: int) -> "Job":
        """Start one of two ranks, by the code that it finds from its folder."""
        command = [sys.executable, "-m", "dist_transformer", "train", *self.arguments]
        self._start(command, {**self._of_rank(rank, 2, port), "PYTHONPATH": str(ROOT)}, folder)
        return self

    def start_shell(self, command: Sequence[object], redirected: str) -> "Job":
        """Start a user's own command, with redirections."""
        words = shlex.join(map(str, [*command, *self.arguments]))
        self._start(["bash", "-c", f"{words} {redirected}; exit ${{PIPESTATUS[0]}}"], self.environment)
        return self

    def _start(self, command: Sequence[object], environment: dict[str, str], folder: Path = ROOT) -> None:
        with self.log.open("ab") as log:
            started = subprocess.Popen(
                [str(word) for word in command],
                cwd=folder,
                env={**os.environ, **environment},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=allow_interrupts,  # noqa: PLW1509
            )
        self.processes.append(started)

    def statuses(self) -> list[int]:
        try:
            return [process.wait(PATIENCE) for process in self.processes]
        except subprocess.TimeoutExpired:
            raise AssertionError(f"does not end:\n{self.output}") from None

    def wait_for_training(self, records: int = 1) -> None:
        """Wait until the metrics have at least this many records."""
        metrics = self.run_dir / "metrics.jsonl"
        self.wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= records)

    def wait_for(self, happened: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not happened():
            assert time.monotonic() < deadline, self.output
            assert self.processes[0].poll() is None, self.output
            time.sleep(0.05)

    def family(self) -> list[psutil.Process]:
        """List the living processes that this job started, launchers first, also those that have lost their parent."""
        return [process for process in psutil.process_iter() if self._is_own(process)]

    def _is_own(self, process: psutil.Process) -> bool:
        try:
            return str(self.run_dir) in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False

    def close(self) -> None:
        """End what is left of it."""
        for process in self.processes:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            process.wait()

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def ledger(self) -> str:
        return (self.run_dir / "ledger.jsonl").read_text()

    @property
    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in (self.run_dir / "checkpoints").glob("step-*"))


def require_same_end(run_dir: Path, whole: Path, step: int) -> None:
    """Two runs have the same sentences in every step, weights that are equal bit for bit, and nothing temporary."""
    name = f"weights/step-{step:08d}.safetensors"
    expected, found = load_file(whole / name), load_file(run_dir / name)
    assert all(expected[key].equal(found[key]) for key in expected.keys() | found.keys()), "other weights"
    assert (whole / "ledger.jsonl").read_bytes() == (run_dir / "ledger.jsonl").read_bytes(), "another ledger"
    assert unfinished(run_dir) == [], "temporary files were left"


def unfinished(run_dir: Path) -> list[Path]:
    """Temporary files and folders of saves."""
    return [path for folder in ("checkpoints", "weights") for path in (run_dir / folder).glob(".*.tmp")]
