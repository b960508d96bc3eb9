import importlib
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import measure
from benchmarks.measure import measure_rates, rate
from dist_transformer.base.errors import UserError


class Clock:
    """Stands still unless work is done."""

    def __init__(self) -> None:
        self.now = 0.0

    def process_time(self) -> float:
        return self.now

    def work(self, units: int, seconds: float) -> Iterator[int]:
        while True:
            self.now += seconds
            yield units


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(measure.time, "process_time", clock.process_time)
    return clock


def test_a_rate_by_hand(clock: Clock) -> None:
    """Items of 30 units in 0.5 s: at 1.2 s three of them are done, in 1.5 s."""
    assert rate(clock.work(30, 0.5), seconds=1.2) == 60
    assert clock.now == 1.5


def test_measures_take_turns_after_an_uncounted_round(clock: Clock) -> None:
    """The first item of each work is slow, as a cold file is; the rates do not show it."""
    order = []

    def work(name: str, units: int) -> Iterator[int]:
        for number in itertools.count():
            order.append(name)
            clock.now += 100 if number == 0 else 1
            yield units

    works = {"a": work("a", 10), "b": work("b", 20)}
    found = measure_rates(works, seconds=2, repeats=3)
    assert {name: each["values"] for name, each in found.items()} == {"a": [10, 10, 10], "b": [20, 20, 20]}
    assert order == ["a", "b", *["a", "a", "b", "b"] * 3]


def test_a_process_that_is_killed_is_said_to_have_had_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "killed.py").write_text(
        "import os, signal\ndef end(request): os.kill(os.getpid(), signal.SIGKILL)\n", encoding="utf-8"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(UserError, match="it was killed, probably because memory is too small: leave"):
        measure.measure_apart(importlib.import_module("killed").end, {}, failure="P1 failed", remedy="leave it out")
