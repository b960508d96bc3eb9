"""Rates by a clock, processes apart, waits for commands, names of processors, and what a part's result keeps."""

import importlib
import itertools
import json
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import command, measure, start
from benchmarks.measure import ALLOCATOR, Measured, apart, measure_rates, processor_name, rate, read_flags, short_name
from benchmarks.training.field import TrainBenchmark
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
    # Three items, in 100 s, 0.5 s and 0.5 s.
    assert rate(work("c", 202), seconds=100.6) == 6


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
    """It has our allocator, and not this process's place in a launch."""
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
    name = processor_name("cpu family\t: 26\nmodel\t\t: 2\nmodel name\t: AMD EPYC\nflags\t\t: avx2 avx512_bf16\n")
    assert name == "AMD EPYC family 26 model 2 with AVX-512-bf16"
    assert short_name(name) == "amd-epyc-family-26-model-2-avx-512-bf16"
    assert short_name("Intel(R) Xeon(R) Gold 6338 CPU @ 2.00GHz with AVX2") == "intel-xeon-gold-6338-avx2"


def test_what_must_not_be_believed_is_kept_and_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The result has the command without folders of this machine; read again, it gives the same settings."""
    words = f"benchmark.py train --data here --json {tmp_path}/result.json --steps 2 --peers plain -- --seed 'a b'"
    monkeypatch.setattr("sys.argv", shlex.split(words))
    found = {"what": "a measure", "figures": {"rate": 2.5}, "seeds": [3], "rows": [{"table": "start", "cells": ["a"]}]}
    measured = Measured(**found, table="the table", flaw="the losses differ")
    monkeypatch.setattr(TrainBenchmark, "measure", lambda part: measured)
    with pytest.raises(UserError, match="the losses differ"):
        command.main()
    assert capsys.readouterr().out == "the table\n"
    result = json.loads((tmp_path / "result.json").read_text())
    assert {name: result[name] for name in found} == found
    assert result["commands"] == [
        "python tools/benchmark.py train --data DATA --preset=tiny --peers plain --steps=2 --rounds=6 -- --seed 'a b'"
    ]
    again = read_flags(TrainBenchmark, shlex.split(result["commands"][0])[3:])
    assert again == TrainBenchmark(data="DATA", steps=2, peers=("plain",), flags=("--seed", "a b"))


_WORK = """
import sys, time
line = sys.stdin.read()
end = time.process_time() + 0.5
while time.process_time() < end: pass
block = bytes(1) * 100_000_000
print("read", line, flush=True)
time.sleep(0.5)
"""


@pytest.mark.slice(name="benchmarks")
def test_a_wait_by_a_process_that_is_known(tmp_path: Path) -> None:
    whole = start.wait_for(("-c", _WORK), str(tmp_path))
    assert whole.seconds > 1
    assert 0.5 < whole.cpu_seconds < 3
    assert 95 < whole.peak_mib < 200
    part = start.wait_for(("-c", _WORK), str(tmp_path), until="read a line")
    assert 0.5 < part.seconds < whole.seconds + 10
    with pytest.raises(UserError, match="did not print 'nothing'"):
        start.wait_for(("-c", "print('a line')"), str(tmp_path), until="nothing")
    with pytest.raises(UserError, match="ended with status 3: the reason"):
        start.wait_for(("-c", "print('the reason'); exit(3)"), str(tmp_path))


@pytest.mark.slice(name="benchmarks")
def test_each_wait_is_measured_in_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real preparation, training and translation, and the help of one command."""
    monkeypatch.setattr(start, "WAITS", {name: start.WAITS[name] for name in ("plan --help", start.LINE)})
    figures = start.run_start_benchmark(start.StartBenchmark(rounds=1))
    assert list(figures["waits"]) == ["plan --help", start.LINE, start.FIRST_STEP]
    assert figures["waits"]["plan --help"]["peak_mib"] < figures["waits"][start.LINE]["peak_mib"]
    assert start.start_table(figures).splitlines()[2].startswith("translate one line")
