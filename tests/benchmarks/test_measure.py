"""Rates by a clock that stands still unless work is done, processes apart, and the names of processors."""

import importlib
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import measure
from benchmarks.measure import ALLOCATOR, apart, measure_rates, processor_name, rate, short_name
from dist_transformer.base.errors import UserError


def test_rates_by_hand_in_turns_after_an_uncounted_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first item of each work is slow, as a cold file is; the rates do not show it."""
    clock, order = [0.0], []

    def work(name: str, units: int) -> Iterator[int]:
        for number in itertools.count():
            order.append(name)
            clock[0] += 100 if number == 0 else 0.5
            yield units

    monkeypatch.setattr(measure.time, "process_time", lambda: clock[0])
    found = measure_rates({"a": work("a", 10), "b": work("b", 20)}, seconds=1, repeats=3)
    assert {name: each["values"] for name, each in found.items()} == {"a": [20, 20, 20], "b": [40, 40, 40]}
    assert order == ["a", "b", *["a", "a", "b", "b"] * 3]
    # Three items of 0.5 s take longer than 1.2 s.
    warm = work("c", 30)
    next(warm)
    assert rate(warm, seconds=1.2) == 60


_SERVER = """
import os, signal
def serve(requests):
    for request in requests:
        print("a library prints")
        if request == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        yield [os.getpid(), os.environ[request]]
"""


def test_a_process_apart_answers_until_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With our allocator, and without this process's place in a launch."""
    (tmp_path / "server.py").write_text(_SERVER, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("RANK", "3")
    serve = importlib.import_module("server").serve
    with apart(serve, failure="P1 failed", remedy="leave it out") as ask:
        answers = [ask(name) for name in ALLOCATOR]
        assert [value for _, value in answers] == ["0", str(2**62), "1"]
        assert len({number for number, _ in answers}) == 1
        with pytest.raises(UserError, match="P1 failed: it was killed, probably because memory is too small: leave"):
            ask("die")
    with apart(serve, failure="P1 failed", remedy="leave it out") as ask, pytest.raises(UserError, match="KeyError"):
        ask("RANK")


def test_a_processor_is_named_with_what_its_speed_depends_on() -> None:
    info = "cpu family\t: 26\nmodel\t\t: 2\nmodel name\t: AMD EPYC\nflags\t\t: fpu avx2 avx512f avx512_bf16\n"
    name = processor_name(info)
    assert name == "AMD EPYC family 26 model 2 with AVX-512-bf16"
    assert short_name(name) == "amd-epyc-family-26-model-2-avx-512-bf16"
    assert short_name("Intel(R) Xeon(R) Gold 6338 CPU @ 2.00GHz with AVX2") == "intel-xeon-gold-6338-avx2"
