"""Readings of a real tree of processes."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.measure import ROOT
from benchmarks.race.meter import Reading, run_metered
from dist_transformer.base.errors import UserError

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
_TREE = """
import os, subprocess, sys, time
def work(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end: pass
if len(sys.argv) > 1:
    work(0.5)
    block = bytearray(os.urandom(1)) * 50_000_000
    print("child"); time.sleep(1.2)
else:
    subprocess.run([sys.executable, __file__, "x"])
    work(0.5)
    subprocess.run([sys.executable, __file__, "x"])
"""


def nothing(read: Callable[[], Reading]) -> None:
    pass


def test_all_processes_count_those_that_ended_too(tmp_path: Path) -> None:
    program = tmp_path / "tree.py"
    program.write_text(_TREE)
    readings: list[Reading] = []
    usage = run_metered(
        [sys.executable, str(program)],
        log=tmp_path / "log",
        environment=os.environ,
        watch=lambda read: readings.append(read()),
    )
    assert 1.5 < usage.cpu_seconds < 3
    # The last second is in the second child: the parent, and a child that was waited for, have worked one.
    cpu = [reading.cpu_seconds for reading in readings]
    assert any(1.4 < value < usage.cpu_seconds - 0.05 for value in cpu)
    assert cpu[-1] == usage.cpu_seconds
    assert 50 < usage.peak_mib < 150
    assert (tmp_path / "log").read_text() == "child\nchild\n"


def test_a_command_that_fails_is_told_with_its_last_line(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('first', flush=True); raise SystemExit('the reason')"]
    with pytest.raises(UserError, match=r"ended with status 1: the reason; all of its output is in .*log"):
        run_metered(command, log=tmp_path / "log", environment=os.environ, watch=nothing)


@pytest.mark.parametrize("error", ["raise RuntimeError", "os.kill(os.getpid(), signal.SIGTERM)"])
def test_nothing_runs_on_after_an_error(error: str, tmp_path: Path) -> None:
    program = f"""
import os, signal
from pathlib import Path
from benchmarks.measure import ROOT
from benchmarks.race.meter import run_metered
def watch(read):
    if Path("pid").exists():
        {error}
command = ["sh", "-c", "sleep 600 & echo $! > new; mv new pid; wait"]
run_metered(command, log=Path("log"), environment=os.environ, watch=watch)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=ENVIRONMENT, check=False)
    assert done.returncode in (1, 128 + signal.SIGTERM)
    state = Path(f"/proc/{int((tmp_path / 'pid').read_text())}/stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"
