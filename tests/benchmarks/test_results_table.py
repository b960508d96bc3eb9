"""The tables of README.md and docs/ are what the result files give, and every number of a row comes from its file."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import results_table
from benchmarks.results_table import (
    HIGHLIGHTS,
    Highlight,
    fill,
    fill_pages,
    make_highlights,
    make_lines,
    make_tables,
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
    folder.mkdir(exist_ok=True)
    file = folder / name
    file.write_text(json.dumps({**RESULT, **changes}), encoding="utf-8")
    return file


@pytest.mark.system
def test_the_pages_are_what_the_figures_give() -> None:
    assert run_command(sys.executable, "tools/results_table.py", "--check") == ""


@pytest.mark.parametrize("file", sorted((ROOT / "results").glob("*.json")), ids=lambda file: file.name)
def test_every_number_of_a_row_comes_from_its_file(file: Path) -> None:
    """Each number that stands in the table's line is one of the file's, rounded as it is shown."""
    result = read_result(file)
    shown = [line for page in read_pages(ROOT).values() for line in page.splitlines()]
    for _, line in make_lines(file, result):
        assert line in shown
        require_numbers_of(result, line.split(" | ")[:-1])


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
    lines = make_highlights(ROOT / "results").splitlines()
    assert 2 < len(lines) <= 2 + 8
    assert {line.count("|") for line in lines} == {4}
    for highlight, line in zip(HIGHLIGHTS, lines[2:], strict=True):
        require_numbers_of(read_result(ROOT / "results" / highlight.file), line.split(" | ")[:-1])


def test_a_highlight_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "results", "run.json")
    one = Highlight("run.json", "Translation", "It reaches {figures[test_2016][last 3][bleu]:.1f} BLEU")
    monkeypatch.setattr(results_table, "HIGHLIGHTS", [one])
    assert make_highlights(tmp_path / "results").splitlines() == [
        "| what | result | measured on |",
        "|---|---|---|",
        "| Translation | It reaches 35.1 BLEU | [AMD EPYC with avx512_bf16, 2026-01-31](results/run.json) |",
    ]


def test_the_mean_of_the_seeds_is_their_mean() -> None:
    figures = read_result(ROOT / "results" / "multi30k.json")["figures"]
    for name, mean in figures["mean"].items():
        seeds = [figures[f"seed_{seed}"]["test_2016_flickr"][name] for seed in (1, 2, 3)]
        assert mean == pytest.approx(sum(seeds) / 3, abs=1e-4)


def numbers_in(value: Any) -> list[float]:
    if isinstance(value, dict | list):
        inside = value.values() if isinstance(value, dict) else value
        return [number for item in inside for number in numbers_in(item)]
    return [value] if isinstance(value, int | float) else []


def test_a_line_by_hand(tmp_path: Path) -> None:
    file = write(tmp_path / "results", "run.json")
    line = "| `multi30k`, ZeRO-2 | Multi30k | 1,500 | 35.1 (13a) | "
    link = "[AMD EPYC with avx512_bf16, 2026-01-31](../results/run.json) |"
    assert make_lines(file, read_result(file)) == [("quality", line + link)]
    busy = RESULT["machine"] + "; shared with other work, load 2.0 on 2 cores at the start"
    file = write(tmp_path / "results", "run.json", machine=busy)
    assert "bf16, shared, 2026" in make_lines(file, read_result(file))[0][1]


def test_the_newest_first_and_no_table_without_a_row(tmp_path: Path) -> None:
    old, new = ({"table": "quality", "cells": [name, "c", "–", "–"]} for name in ("old", "new"))
    write(tmp_path, "a.json", date="2026-01-01", rows=[old])
    write(tmp_path, "b.json", date="2026-02-01", rows=[new])
    write(tmp_path, "c.json", rows=[])
    (table,) = make_tables(tmp_path).items()
    assert table[0] == "quality"
    lines = table[1].splitlines()
    assert lines[:2] == ["| recipe | corpus | steps | BLEU | measured on |", "|---|---|---|---|---|"]
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| new", "| old"]


def test_a_cell_fits_in_a_table(tmp_path: Path) -> None:
    link = "[" + "n" * 90 + "](" + "p" * 200 + ")"
    row = {"table": "quality", "cells": [link, "c", "–", "–"]}
    file = write(tmp_path, "run.json", rows=[row])
    assert "n" * 90 in make_lines(file, read_result(file))[0][1]
    row["cells"][1] = "c" * 91
    file = write(tmp_path, "run.json", rows=[row])
    with pytest.raises(UserError, match=r"^a cell of a table has more than 90 characters: c{91}$"):
        make_lines(file, read_result(file))


def test_only_what_is_between_the_markers_changes() -> None:
    tables = {"quality": "| 1 |\n| \\2 |", "costs": "| c |"}
    results, costs = MARKED.format("quality"), MARKED.format("costs")
    pages = {"README.md": results, "docs/a.md": "# No table\n", "docs/b.md": costs + results}
    filled = fill_pages(pages, tables)
    new_results, new_costs = results.replace("old", "| 1 |\n| \\2 |"), costs.replace("old", "| c |")
    assert filled == {"README.md": new_results, "docs/a.md": "# No table\n", "docs/b.md": new_costs + new_results}
    assert fill_pages(filled, tables) == filled


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("# Title\n", "no page has a part for the table 'quality'"),
        (
            MARKED.format("quality").replace("end of quality", "end of costs"),
            "no page has a part for the table 'quality'",
        ),
        (MARKED.format("speed"), r"docs/a\.md marks a part 'speed': choose one of costs, quality"),
    ],
)
def test_markers_that_are_not_right_are_refused(page: str, message: str) -> None:
    pages = {"README.md": MARKED.format("costs"), "docs/a.md": page}
    with pytest.raises(UserError, match=message):
        fill_pages(pages, {"costs": "table", "quality": "table"})


def checkout(folder: Path, monkeypatch: pytest.MonkeyPatch, *flags: str) -> None:
    """Make a checkout with one result, and set the tool's command line."""
    write(folder / "results", "run.json")
    one = Highlight("run.json", "Translation", "It reaches {figures[test_2016][last 3][bleu]:.1f} BLEU")
    monkeypatch.setattr(results_table, "HIGHLIGHTS", [one])
    (folder / "docs" / "deep").mkdir(parents=True)
    (folder / "README.md").write_text(MARKED.format("highlights"), encoding="utf-8")
    marked = MARKED.format("quality") + MARKED.format("costs")
    (folder / "docs" / "deep" / "costs.md").write_text(marked, encoding="utf-8")
    monkeypatch.setattr(results_table, "_ROOT", folder)
    monkeypatch.setattr(sys, "argv", ["results_table.py", *flags])


def test_each_page_is_rewritten_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkout(tmp_path, monkeypatch)
    results_table.main()
    assert capsys.readouterr().err == "README.md: tables rewritten\ndocs/deep/costs.md: tables rewritten\n"
    assert "reaches 35.1 BLEU" in (tmp_path / "README.md").read_text(encoding="utf-8")
    deep = (tmp_path / "docs" / "deep" / "costs.md").read_text(encoding="utf-8")
    assert "ZeRO-2 | Multi30k | 1,500 | 35.1" in deep
    assert "| base, 100,000 steps |" in deep
    results_table.main()
    assert capsys.readouterr().err == ""


def test_a_check_names_the_pages_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkout(tmp_path, monkeypatch, "--check")
    with pytest.raises(UserError, match=r"^README\.md, docs/deep/costs\.md differ from the figures: run"):
        results_table.main()
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == MARKED.format("highlights")


@pytest.mark.parametrize("text", ["35.1 BLEU", "preset cut to 1,500 steps", "(3 seeds)", "= 7"])
def test_a_row_may_hold_no_number_of_its_own(text: str) -> None:
    with pytest.raises(UserError, match="move it to figures"):
        fill(text, RESULT, Path("results/run.json"))


@pytest.mark.parametrize("text", ["{figures[bleu]}", "{figures[runs][3]}", "{nothing}", "{figures[steps]:,", "{}"])
def test_a_figure_that_is_not_there_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"^row .* in \S*run\.json cannot be filled"):
        fill(text, RESULT, Path("results/run.json"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bleu": 3.0}, "has an unknown field 'bleu'"),
        ({"seeds": 1}, r"^seeds in \S*run\.json is 1: "),
        ({"date": "31.1.2026"}, r"^date in \S*run\.json is '31\.1\.2026': "),
        ({"rows": [{"table": "speed", "cells": []}]}, "a row must have cells, and a table among race, training"),
        ({"rows": [{"table": "quality", "cells": ["a"]}]}, "a row of quality must have 4 cells"),
        ({"figures": None}, r"^figures in \S*run\.json is None: "),
        ({"machine": "a laptop"}, r'^machine in \S*run\.json is \'a laptop\': begin it with "N cores of PROCESSOR,"'),
    ],
)
def test_a_file_that_does_not_keep_to_the_layout_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        read_result(write(tmp_path, "run.json", **changes))


def test_a_missing_field_is_named(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps({name: value for name, value in RESULT.items() if name != "machine"}), encoding="utf-8")
    with pytest.raises(UserError, match="misses field 'machine'"):
        read_result(file)
