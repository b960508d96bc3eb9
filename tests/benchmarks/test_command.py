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


def test_ranks_that_do_not_report_write_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run(monkeypatch, None, tmp_path / "result.json")
    assert not list(tmp_path.iterdir())


def test_a_place_that_is_not_there_is_said_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"none/result\.json is in no folder that exists: make the folder first"):
        run(monkeypatch, MEASURED, tmp_path / "none" / "result.json")
    assert capsys.readouterr().out == ""
