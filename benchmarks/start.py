"""Time until a command answers, and the memory that it takes.

Each command is a process of its own; they run in turns.
"""

import os
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from benchmarks.measure import ROOT, Measured, Part, columns, resident_mib, say, spread
from benchmarks.rows import start_rows
from dist_transformer.base.errors import UserError
from dist_transformer.cli.command import COMMANDS

_PAUSE = 0.01
_PROGRAM = ("-m", "dist_transformer")
_RUN = ("train", "--preset", "tiny", "--data", "data", "--max-steps", "1", "--log-every", "1", "--run-dir")
FIRST_STEP, LINE = "the first step of tiny", "translate one line"
WAITS: dict[str, tuple[str, ...]] = {
    "import torch": ("-c", "import torch"),
    "--help": (*_PROGRAM, "--help"),
    **{f"{command} --help": (*_PROGRAM, command, "--help") for command in COMMANDS},
    LINE: (*_PROGRAM, "translate", "--model", "model"),
}
"""Arguments of Python by what is waited for, to the end of the process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StartBenchmark(Part):
    """Time that a user waits before a command answers."""

    rounds: int = 5
    """Rounds; medians are reported."""

    def measure(self) -> Measured:
        figures = run_start_benchmark(self)
        return Measured(
            what="seconds until a command answers, CPU seconds and peak memory of one process; medians of rounds",
            figures=figures,
            table=start_table(figures),
            rows=start_rows([*figures["waits"]]),
        )


@dataclass(frozen=True, slots=True)
class Wait:
    seconds: float
    cpu_seconds: float
    peak_mib: float
    """Memory of its first process."""


def run_start_benchmark(settings: StartBenchmark) -> dict[str, Any]:
    """Measure all waits in a new folder, with data and a model of synthetic text."""
    found: dict[str, list[Wait]] = {name: [] for name in (*WAITS, FIRST_STEP)}
    with tempfile.TemporaryDirectory(prefix="dist_transformer-benchmark-") as folder:
        wait_for((*_PROGRAM, "prepare", "--toy", "2000", "--vocab-size", "400", "--out", "data"), folder)
        wait_for((*_PROGRAM, *_RUN, "run"), folder)
        wait_for((*_PROGRAM, "average", "--run-dir", "run", "--last", "1", "--out", "model"), folder)
        for number in range(settings.rounds):
            for name, words in WAITS.items():
                found[name].append(wait_for(words, folder))
            found[FIRST_STEP].append(wait_for((*_PROGRAM, *_RUN, f"run{number}"), folder, until="step 1"))
            say(f"round {number + 1} of {settings.rounds}")
    return {
        "waits": {
            name: {
                "seconds": spread(wait.seconds for wait in waits),
                "cpu_seconds": spread(wait.cpu_seconds for wait in waits),
                "peak_mib": max(wait.peak_mib for wait in waits),
            }
            for name, waits in found.items()
        }
    }


def wait_for(words: tuple[str, ...], folder: str, *, until: str | None = None) -> Wait:
    """Run Python with these arguments, a line of text as its input, and measure it to its end.

    Args:
        until: text of a line of its output; `seconds` end there.

    Raises:
        UserError: it fails, or no line has that text.
    """
    began, seen, line = time.monotonic(), None, ""
    process = subprocess.Popen(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    peak = 0.0

    def watch() -> None:
        nonlocal peak
        # A process that has ended has no memory to read.
        with suppress(OSError, StopIteration):
            while True:
                peak = resident_mib("VmHWM", process.pid)
                time.sleep(_PAUSE)

    watcher = threading.Thread(target=watch)
    watcher.start()
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):
            process.stdin.write("a line\n")
            process.stdin.close()
        for line in process.stdout:
            if until is not None and seen is None and until in line:
                seen = time.monotonic() - began
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    watcher.join()
    if process.returncode != 0:
        raise UserError(f"{' '.join(words)} ended with status {process.returncode}: {line.strip()}")
    if until is None:
        seen = time.monotonic() - began
    if seen is None:
        raise UserError(f"{' '.join(words)} did not print {until!r}: run it by hand")
    return Wait(seen, usage.ru_utime + usage.ru_stime, peak)


def start_table(figures: dict[str, Any]) -> str:
    rows = [("", "seconds", "CPU seconds", "MiB")]
    for name, wait in figures["waits"].items():
        seconds, cpu_seconds = (f"{wait[kind]['median']:.2f}" for kind in ("seconds", "cpu_seconds"))
        rows.append((name, seconds, cpu_seconds, f"{wait['peak_mib']:,.0f}"))
    return "\n".join(columns(rows))
