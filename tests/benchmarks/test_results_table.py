"""The tables of README.md and docs/ are what the result files give, and every number of a row comes from its file."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.results_table import (
    HIGHLIGHTS,
    RESULTS,
    fill,
    fill_pages,
    make_highlights,
    make_lines,
    read_pages,
    read_result,
)
from dist_transformer.base.errors import UserError
from tests.conftest import ROOT, run_command

RESULT: dict[str, Any] = {
    "what": "A run.",
    "corpus": "Multi30k en→de",
    "synthetic": False,
    "date": "2026-01-31",
    "machine": "2 cores of an AMD EPYC with avx512_bf16, 24 GiB; torch 2.13.0",
    "commands": ["make"],
    "seeds": [1],
    "wall_seconds": None,
    "figures": {"steps": 1500, "test_2016": {"last 3": {"bleu": 35.0642}}, "runs": [{"stage": 2}]},
    "rows": [
        {
            "table": "quality",
            "cells": [
                "`multi30k`, ZeRO-{figures[runs][0][stage]}",
                "Multi30k",
                "{figures[steps]:,}",
                "{figures[test_2016][last 3][bleu]:.1f} (13a)",
            ],
        }
    ],
}
MARKED = "# Title\n<!-- {0}: made by tools/results_table.py -->\nold\n<!-- end of {0} -->\nafter\n"


def write(folder: Path, name: str, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / name
    file.write_text(json.dumps({**RESULT, **changes}), encoding="utf-8")
    return file


@pytest.mark.system
def test_the_pages_are_what_the_figures_give() -> None:
    assert run_command(sys.executable, "tools/results_table.py", "--check") == ""


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.name)
def test_every_number_of_a_row_comes_from_its_file(file: Path) -> None:
    """Each number that stands in the table's line is one of the file's, rounded as it is shown; cells are short."""
    result = read_result(file)
    shown = [line for page in read_pages().values() for line in page.splitlines()]
    for _, line in make_lines(file, result):
        assert line in shown
        cells = line.split(" | ")[:-1]
        require_numbers_of(result, cells)
        assert max(map(len, cells)) <= 90


def require_numbers_of(result: dict[str, Any], cells: list[str]) -> None:
    names = re.compile(r"\w+_\w+|`[^`]*`|13a|bf16|float32|bfloat16|int8|Multi30k|CTranslate2")
    shown = [text.replace(",", "") for text in re.findall(r"\d[\d,]*(?:\.\d+)?", names.sub("", " | ".join(cells)))]
    values = list(numbers_in(result["figures"])) + result["seeds"]
    assert shown
    for text in shown:
        digits = len(text.partition(".")[2])
        assert any(f"{value:.{digits}f}" == text for value in values), text


def test_the_highlights_fit_on_a_screen() -> None:
    """At most eight rows of three columns, and each number comes from the row's file."""
    lines = make_highlights().splitlines()
    assert 2 < len(lines) <= 2 + 8
    assert {line.count("|") for line in lines} == {4}
    for highlight, line in zip(HIGHLIGHTS, lines[2:], strict=True):
        require_numbers_of(read_result(ROOT / "results" / highlight.file), line.split(" | ")[:-1])


def numbers_in(value: Any) -> list[float]:
    if isinstance(value, dict | list):
        inside = value.values() if isinstance(value, dict) else value
        return [number for item in inside for number in numbers_in(item)]
    return [value] if isinstance(value, int | float) else []


def test_a_line_by_hand(tmp_path: Path) -> None:
    file = write(tmp_path / "results/speed", "run.json")
    line = "| `multi30k`, ZeRO-2 | Multi30k | 1,500 | 35.1 (13a) | "
    link = "[AMD EPYC with avx512_bf16, 2026-01-31](../results/speed/run.json) |"
    assert make_lines(file, read_result(file)) == [("quality", line + link)]
    busy = RESULT["machine"] + "; shared with other work, load 2.0 on 2 cores at the start"
    file = write(tmp_path / "results/speed", "run.json", machine=busy)
    assert "bf16, shared, 2026" in make_lines(file, read_result(file))[0][1]


def test_only_what_is_between_the_markers_changes() -> None:
    tables = {"quality": "| 1 |\n| \\2 |", "costs": "| c |"}
    results, costs = MARKED.format("quality"), MARKED.format("costs")
    pages = {"README.md": results, "docs/a.md": "# No table\n", "docs/b.md": costs + results}
    filled = fill_pages(pages, tables)
    new_results, new_costs = results.replace("old", "| 1 |\n| \\2 |"), costs.replace("old", "| c |")
    assert filled == {"README.md": new_results, "docs/a.md": "# No table\n", "docs/b.md": new_costs + new_results}
    assert fill_pages(filled, tables) == filled


@pytest.mark.parametrize("text", ["35.1 BLEU", "preset cut to 1,500 steps", "(3 seeds)", "= 7"])
def test_a_row_may_hold_no_number_of_its_own(text: str) -> None:
    with pytest.raises(UserError, match="move it to figures"):
        fill(text, RESULT, Path("results/run.json"))
