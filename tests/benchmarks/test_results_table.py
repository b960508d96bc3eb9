"""The tables of README.md and docs/ are what the result files give, which have every number of a row."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.results_table import fill, fill_pages, make_highlights, make_lines, read_result
from dist_transformer.base.errors import UserError
from tests.conftest import run_command

RESULT: dict[str, Any] = {
    **{"what": "A run.", "corpus": "Multi30k en→de", "synthetic": False, "date": "2026-01-31"},
    "machine": "2 cores of an AMD EPYC with avx512_bf16, 24 GiB; torch 2.13.0",
    **{"commands": ["make"], "seeds": [1], "wall_seconds": None},
    "figures": {"steps": 1500, "test_2016": {"last 3": {"bleu": 35.0642}}, "runs": [{"stage": 2}]},
}
CELLS = ["`multi30k`, ZeRO-{figures[runs][0][stage]}", "Multi30k", "{figures[steps]:,}"]
CELLS += ["{figures[test_2016][last 3][bleu]:.1f} (13a)"]
MARKED = "# Title\n<!-- {0}: made by tools/results_table.py -->\nold\n<!-- end of {0} -->\nafter\n"


@pytest.mark.system
def test_the_pages_are_what_the_figures_give() -> None:
    assert run_command(sys.executable, "tools/results_table.py", "--check") == ""


def test_the_highlights_fit_on_a_screen() -> None:
    """At most eight rows of three columns."""
    lines = make_highlights().splitlines()
    assert 2 < len(lines) <= 2 + 8
    assert {line.count("|") for line in lines} == {4}


def test_a_line_by_hand(tmp_path: Path) -> None:
    file = tmp_path / "results" / "speed" / "run.json"
    file.parent.mkdir(parents=True)
    for load, shown in (("", ""), ("; shared with other work, load 2.0 on 2 cores at the start", ", shared")):
        rows = [{"table": "quality", "cells": CELLS}]
        file.write_text(json.dumps({**RESULT, "machine": RESULT["machine"] + load, "rows": rows}), encoding="utf-8")
        line = "| `multi30k`, ZeRO-2 | Multi30k | 1,500 | 35.1 (13a) | "
        link = f"[AMD EPYC with avx512_bf16{shown}, 2026-01-31](../results/speed/run.json) |"
        assert make_lines(file, read_result(file)) == [("quality", line + link)]


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
