"""tools/benchmark.py: what it keeps of any part."""

import argparse
import json
from pathlib import Path

import pytest

from benchmarks import command as benchmark
from dist_transformer.base.errors import UserError

MEASURED = benchmark.Measured(
    what="a measure",
    figures={"rate": 2.5},
    given=["--data", "DATA", "--steps=2"],
    table="the table",
    seeds=[3],
    rows=[{"table": "start", "cells": ["a"]}],
    flaw="the losses differ",
)


def run(monkeypatch: pytest.MonkeyPatch, measured: benchmark.Measured | None, json_file: Path | None) -> None:
    given = argparse.Namespace(
        part="train", flags=["--seed", "a b"], json=json_file, measure=lambda arguments: measured
    )
    monkeypatch.setattr(benchmark, "parse_arguments", lambda *_: given)
    benchmark.main()


def test_what_must_not_be_believed_is_kept_and_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="the losses differ"):
        run(monkeypatch, MEASURED, tmp_path / "result.json")
    assert capsys.readouterr().out == "the table\n"
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["commands"] == ["python tools/benchmark.py train --data DATA --steps=2 -- --seed 'a b'"]
    assert (result["what"], result["figures"], result["seeds"]) == ("a measure", {"rate": 2.5}, [3])
    assert result["rows"] == [{"table": "start", "cells": ["a"]}]
