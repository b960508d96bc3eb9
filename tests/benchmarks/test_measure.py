import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
import torch

from benchmarks import measure
from benchmarks.measure import Measure, measure_rates, one_thread, rate, write_result
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


def test_an_item_longer_than_the_time_counts_in_full(clock: Clock) -> None:
    assert rate(clock.work(7, 10.0), seconds=1.0) == 0.7


def test_items_of_no_units_do_not_end_a_rate(clock: Clock) -> None:
    def work() -> Iterator[int]:
        for units in itertools.cycle((0, 0, 4)):
            clock.now += 1
            yield units

    assert rate(work(), seconds=0.1) == pytest.approx(4 / 3)


def test_measures_take_turns_after_an_uncounted_round(clock: Clock) -> None:
    """The first item of each work is slow, as a cold file is; the rates do not show it."""
    order = []

    def work(name: str, units: int) -> Iterator[int]:
        for number in itertools.count():
            order.append(name)
            clock.now += 100 if number == 0 else 1
            yield units

    reports: list[str] = []
    works = {"a": work("a", 10), "b": work("b", 20)}
    found = measure_rates(works, seconds=2, repeats=3, report=reports.append)
    assert {name: measured.values for name, measured in found.items()} == {"a": (10, 10, 10), "b": (20, 20, 20)}
    assert order == ["a", "b", *["a", "a", "b", "b"] * 3]
    assert reports == ["round 1 of 3", "round 2 of 3", "round 3 of 3"]


def test_the_median_and_the_spread() -> None:
    assert Measure((9.0, 1.0, 3.0)).to_json() == {"median": 3, "lowest": 1, "highest": 9, "values": [9, 1, 3]}


def test_one_thread_and_as_many_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    torch_threads, arrow_threads = torch.get_num_threads(), pa.cpu_count()
    try:
        torch.set_num_threads(3)
        pa.set_cpu_count(5)
        with one_thread():
            assert (torch.get_num_threads(), pa.cpu_count()) == (1, 1)
            assert os.environ["TOKENIZERS_PARALLELISM"] == "false"
        assert (torch.get_num_threads(), pa.cpu_count()) == (3, 5)
        assert "TOKENIZERS_PARALLELISM" not in os.environ
        os.environ["TOKENIZERS_PARALLELISM"] = "true"
        with one_thread():
            pass
        assert os.environ["TOKENIZERS_PARALLELISM"] == "true"
    finally:
        torch.set_num_threads(torch_threads)
        pa.set_cpu_count(arrow_threads)


def test_a_result_is_written_whole(tmp_path: Path) -> None:
    write_result(tmp_path / "a.json", {"what": "größer"})
    assert json.loads((tmp_path / "a.json").read_text(encoding="utf-8")) == {"what": "größer"}
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    with pytest.raises(UserError, match=r"a\.json cannot be written .* choose another --json"):
        write_result(tmp_path / "none" / "a.json", {})


def test_a_process_that_is_killed_is_said_to_have_had_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "killed.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(UserError, match="it was killed, probably because memory is too small: leave"):
        measure.measure_apart("killed", {}, failure="P1 failed", remedy="leave it out")


@pytest.mark.parametrize(
    ("flags", "units"),
    [
        ("fma avx2 avx512f avx512_bf16 amx_bf16", "AMX"),
        ("fma avx2 avx512f avx512_bf16", "AVX-512-bf16"),
        ("fma avx2 avx512f", "AVX-512"),
        ("fma avx avx2", "AVX2"),
        ("sse", "no AVX2"),
    ],
)
def test_processors_of_one_name_differ_in_their_units(flags: str, units: str) -> None:
    assert measure.vector_units(flags.split()) == units
    assert measure.vector_units() in {"AMX", "AVX-512-bf16", "AVX-512", "AVX2", "no AVX2"}
