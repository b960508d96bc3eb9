"""CPU time and memory of a command with all of its processes, read while it runs."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dist_transformer.base.errors import UserError
from dist_transformer.base.files import leaving_at_sigterm

_TICK = os.sysconf("SC_CLK_TCK")
_PAUSE, _PAUSE_OF_MEMORY = 0.1, 1.0


@dataclass(frozen=True, slots=True)
class Reading:
    cpu_seconds: float
    wall_seconds: float


@dataclass(frozen=True, slots=True)
class Usage:
    """Resources that a command used up to its end."""

    cpu_seconds: float
    wall_seconds: float
    peak_mib: float
    """Most memory of all of its processes together, read once per second; pages that several share count once."""


def run_metered(
    command: Sequence[str],
    *,
    log: Path,
    environment: Mapping[str, str],
    watch: Callable[[Callable[[], Reading]], object],
) -> Usage:
    """Run a command in a session of its own.

    Args:
        log: gets its output.
        watch: called every 0.1 s with a function that reads what the command used so far.

    Raises:
        UserError: the command failed; the message has the last line of its output.
    """
    started, peak, next_memory = time.monotonic(), 0.0, 0.0
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command],
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
            env={**environment},
            start_new_session=True,
        )

    def read() -> Reading:
        return Reading(_cpu_seconds(process.pid), time.monotonic() - started)

    before = _children_seconds()
    try:
        with leaving_at_sigterm():
            while process.poll() is None:
                watch(read)
                if time.monotonic() >= next_memory:
                    peak, next_memory = max(peak, _mib(process.pid)), time.monotonic() + _PAUSE_OF_MEMORY
                time.sleep(_PAUSE)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    usage = Usage(_children_seconds() - before, time.monotonic() - started, peak)
    watch(lambda: Reading(usage.cpu_seconds, usage.wall_seconds))
    if process.returncode != 0:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["it printed nothing"]
        raise UserError(
            f"{command[0]} ended with status {process.returncode}: {lines[-1]}; all of its output is in {log}"
        )
    return usage


def _children_seconds() -> float:
    times = os.times()
    return times.children_user + times.children_system


def _session(leader: int) -> list[Path]:
    """List the processes of a session, in /proc."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            fields = _fields(folder)
            if fields and int(fields[3]) == leader:
                found.append(folder)
    return found


def _fields(folder: Path) -> list[str]:
    """Read a process's fields from the third on, or nothing if it has ended."""
    try:
        return (folder / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _cpu_seconds(leader: int) -> float:
    """Sum the time of a session's processes, and of those that ended and were waited for."""
    fields = [_fields(folder) for folder in _session(leader)]
    return sum(sum(map(int, one[11:15])) for one in fields if one) / _TICK


def _mib(leader: int) -> float:
    total = 0
    for folder in _session(leader):
        try:
            lines = (folder / "smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1024
