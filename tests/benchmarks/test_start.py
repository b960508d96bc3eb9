"""Waits for a command, by processes whose time and memory are known."""

import pytest

from benchmarks import start
from benchmarks.start import StartBenchmark, run_start_benchmark, start_table, wait_for
from dist_transformer.base.errors import UserError

pytestmark = pytest.mark.slice(name="benchmarks")

_WORK = """
import sys, time
line = sys.stdin.read()
print("first", flush=True)
end = time.process_time() + 0.5
while time.process_time() < end: pass
block = bytes(1) * 100_000_000
print("read", line, flush=True)
time.sleep(0.5)
"""


def test_a_wait_by_a_process_that_is_known(tmp_path: object) -> None:
    whole = wait_for(("-c", _WORK), str(tmp_path))
    assert whole.seconds > 1
    assert 0.5 < whole.cpu_seconds < 3
    assert 95 < whole.peak_mib < 200
    part = wait_for(("-c", _WORK), str(tmp_path), until="read a line")
    assert part.seconds > 0.5
    assert part.cpu_seconds > 0.5
    with pytest.raises(UserError, match="did not print 'nothing'"):
        wait_for(("-c", _WORK), str(tmp_path), until="nothing")


def test_each_wait_is_measured_in_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real preparation, training and translation, and the help of one command."""
    waits = {name: start.WAITS[name] for name in ("plan --help", start.LINE)}
    monkeypatch.setattr(start, "WAITS", waits)
    figures = run_start_benchmark(StartBenchmark(rounds=1))
    assert list(figures["waits"]) == [*waits, start.FIRST_STEP]
    assert all(len(wait["seconds"]["values"]) == 1 for wait in figures["waits"].values())
    translated = figures["waits"][start.LINE]
    assert figures["waits"]["plan --help"]["peak_mib"] < translated["peak_mib"]
    assert start_table(figures).splitlines()[2].startswith("translate one line")
