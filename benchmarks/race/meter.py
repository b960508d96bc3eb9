"""CPU time and memory of a command with all of its processes, read while it runs."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.measure import children_seconds
from dist_transformer.base.errors import UserError
from dist_transformer.base.files import leaving_at_sigterm

_PAUSE, _PAUSE_OF_MEMORY = 0.1, 1.0


@dataclass(frozen=True, slots=True)
class Reading:
    """Time that a command used."""

    cpu_seconds: float
    wall_seconds: float


def run_metered(
    command: Sequence[str],
    *,
    log: Path,
    environment: Mapping[str, str],
    watch: Callable[[Callable[[], Reading]], object],
) -> tuple[Reading, float]:
    """Run a command in a session of its own; return what it used, and its peak MiB.

    The peak is that of all of its processes together, read once per second; pages that several share count once.

    Args:
        log: gets its output.
        watch: called every 0.1 s with a function that reads what the command used so far.

    Raises:
        UserError: the command failed; the message has the last line of its output.
    """
    started, peak, next_memory = time.monotonic(), 0.0, 0.0
    with log.open("wb") as output:
        process = psutil.Popen(
            [*command],
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
            env={**environment},
            start_new_session=True,
        )

    def read() -> Reading:
        return Reading(_sum(process, _cpu_seconds), time.monotonic() - started)

    before = children_seconds()
    try:
        with leaving_at_sigterm():
            while process.poll() is None:
                watch(read)
                if time.monotonic() >= next_memory:
                    peak, next_memory = max(peak, _sum(process, _mib)), time.monotonic() + _PAUSE_OF_MEMORY
                time.sleep(_PAUSE)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    usage = Reading(children_seconds() - before, time.monotonic() - started)
    watch(lambda: usage)
    if process.returncode != 0:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["it printed nothing"]
        raise UserError(
            f"{command[0]} ended with status {process.returncode}: {lines[-1]}; all of its output is in {log}"
        )
    return usage, peak


def _sum(process: psutil.Process, figure: Callable[[psutil.Process], float]) -> float:
    """Sum a figure of a process and of all that it started."""
    total = 0.0
    # A process that has ended has no figures.
    with suppress(psutil.Error):
        for each in (process, *process.children(recursive=True)):
            with suppress(psutil.Error):
                total += figure(each)
    return total


def _cpu_seconds(process: psutil.Process) -> float:
    """Return its time, and that of the processes that it has waited for."""
    times = process.cpu_times()
    return float(times.user + times.system + times.children_user + times.children_system)


def _mib(process: psutil.Process) -> float:
    return float(process.memory_full_info().pss / 2**20)
