"""Readings of a real tree of processes."""

import os
import sys
from pathlib import Path

import pytest

from benchmarks.race.meter import Reading, run_metered

pytestmark = pytest.mark.slice(name="benchmarks")

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


def test_all_processes_count_those_that_ended_too(tmp_path: Path) -> None:
    program = tmp_path / "tree.py"
    program.write_text(_TREE)
    readings: list[Reading] = []
    usage, peak_mib = run_metered(
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
    assert 50 < peak_mib < 150
    assert (tmp_path / "log").read_text() == "child\nchild\n"
