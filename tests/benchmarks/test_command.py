"""tools/benchmark.py: what it keeps of any part."""

import json
import shlex
from pathlib import Path

import pytest

from benchmarks import command as benchmark
from benchmarks.measure import Measured, read_flags
from benchmarks.training.field import TrainBenchmark
from dist_transformer.base.errors import UserError

MEASURED = Measured(
    what="a measure",
    figures={"rate": 2.5},
    table="the table",
    seeds=[3],
    rows=[{"table": "start", "cells": ["a"]}],
    flaw="the losses differ",
)


def test_what_must_not_be_believed_is_kept_and_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The result has the command without folders of this machine; read again, it gives the same settings."""
    words = f"benchmark.py train --data here --json {tmp_path}/result.json --steps 2 --peers plain -- --seed 'a b'"
    monkeypatch.setattr("sys.argv", shlex.split(words))
    monkeypatch.setattr(TrainBenchmark, "measure", lambda part: MEASURED)
    with pytest.raises(UserError, match="the losses differ"):
        benchmark.main()
    assert capsys.readouterr().out == "the table\n"
    result = json.loads((tmp_path / "result.json").read_text())
    (command,) = result["commands"]
    assert command == (
        "python tools/benchmark.py train --data DATA --preset=tiny --peers plain --steps=2 --rounds=6 -- --seed 'a b'"
    )
    again = read_flags(TrainBenchmark, shlex.split(command)[3:])
    assert again == TrainBenchmark(data="DATA", steps=2, peers=("plain",), flags=("--seed", "a b"))
    assert (result["what"], result["figures"], result["seeds"]) == ("a measure", {"rate": 2.5}, [3])
    assert result["rows"] == [{"table": "start", "cells": ["a"]}]
