"""Rewrite the tables in README.md and docs/: results from results/*.json, costs of training, flags of other toolkits.

A table is between `<!-- NAME: made by tools/results_table.py -->` and `<!-- end of NAME -->`. NAME is one of TABLES for
the rows of all files that belong to it, `highlights` for the few results that README.md shows, `costs` for
dist_transformer/cost/costs.py, or one of benchmarks/foreign_flags.py. With --check nothing is written, and the exit
status is 1 if pages and their sources differ. A result file is one JSON object:

    what           what was run and what it shows, in one or two sentences
    corpus         the corpus and its languages
    synthetic      true if a grammar generated the text, which says nothing about real text
    date           date of the run, YYYY-MM-DD
    machine        "4 cores of AMD EPYC, …": cores of a processor, then memory, GPUs, versions of torch and DeepSpeed
    commands       the commands, in order
    seeds          seeds of the runs
    wall_seconds   seconds that everything took, or null if it was not measured
    figures        everything that was measured, nested as the result needs
    rows           rows of tables: {"table": a name of TABLES, "cells": a text for each of its columns}

The texts of cells and highlights contain no numbers. They name figures by their path in the file, in Python's format
syntax: "{figures[test][bleu]:.1f} BLEU". The newest rows come first. The last column states the processor and the date,
and links the file.
"""

import argparse
import datetime
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.foreign_flags import foreign_tables
from dist_transformer.base.errors import UserError
from dist_transformer.config.plain import read_json
from dist_transformer.cost.costs import cost_table

_ROOT = Path(__file__).resolve().parents[1]
_BLOCK = re.compile(
    r"(?P<start><!-- (?P<name>\w+): made by tools/results_table\.py -->\n).*?(?P<end><!-- end of (?P=name) -->)",
    re.DOTALL,
)
# One table per question, whose rows can be compared.
TABLES: dict[str, tuple[str, ...]] = {
    "race": ("trainer", "BLEU 15", "20", "25", "tokens per CPU second", "BLEU at the end, beam 4", "peak MiB"),
    "training": ("preset", "ours", "MarianMTModel, Trainer", "MarianMTModel, compiled", "torch.nn.Transformer"),
    "training_gpu": ("preset", "ours", "MarianMTModel, Trainer", "MarianMTModel, compiled", "torch.nn.Transformer"),
    "steps_gpu": ("step", "tokens per second", "milliseconds", "tokens", "peak GiB", "launches"),
    "decoding": ("model", "ours", "ours, bf16", "ours, int8", "transformers", "CTranslate2", "CTranslate2, int8"),
    "decoding_gpu": ("model", "ours", "transformers", "CTranslate2", "CTranslate2, int8"),
    "start": ("until", "seconds", "CPU seconds", "peak MiB"),
    "data": ("fill", "one pack at a time", "eight", "`prepare`", "`tokenizers` alone", "peak MiB of `prepare`"),
    "quality": ("recipe", "corpus", "steps", "BLEU"),
    "ways": ("search", "BLEU", "chrF", "sentences per CPU second"),
    "vocabularies": ("vocabulary", "BLEU", "chrF", "target tokens per sentence", "parameters"),
    "export": ("program", "BLEU", "outputs as ours"),
    "faults": ("campaign", "injected", "ended as they must"),
}
"""Columns of the tables by their names, without the last."""
_MEASURED = "measured on"
_LONGEST_CELL = 90
_LINK = re.compile(r"\[([^]]*)\]\([^)]*\)")


class Highlight(NamedTuple):
    """A line of the table in README.md: a result in one sentence that can be read aloud."""

    file: str
    what: str
    result: str


_TRAINING_ON_A_CPU = (
    "{figures[train-tiny][fastest_marian][ours_to_this]:.1f} (`tiny`) and "
    "{figures[train-base][fastest_marian][ours_to_this]:.1f} (`base`) times the rate of transformers' MarianMTModel"
)
# At most eight: README.md answers a newcomer's first questions, docs/benchmarks.md has the other results.
HIGHLIGHTS = [
    Highlight(
        "multi30k_rdrop.json",
        "Multi30k, English to German, with R-Drop",
        "{figures[mean][bleu_tokenized]:.1f} BLEU, mean of three seeds; published: {figures[published_tokenized]:.2f}",
    ),
    Highlight(
        "race-cpu-amd-epyc-avx512-bf16.json",
        "CPU seconds to {figures[goals][1]} BLEU, captions",
        "{figures[toolkits][ours][cpu_seconds_to_bleu][bleu_20][median]:,.0f}; compiled MarianMTModel "
        "{figures[toolkits][compiled][cpu_seconds_to_bleu][bleu_20][median]:,.0f}, "
        "Eole {figures[toolkits][eole][cpu_seconds_to_bleu][bleu_20][median]:,.0f}, "
        "Trainer {figures[toolkits][trainer][cpu_seconds_to_bleu][bleu_20][median]:,.0f}, "
        "Marian {figures[toolkits][marian][cpu_seconds_to_bleu][bleu_20][median]:,.0f}",
    ),
    Highlight(
        "gpu-check-h100.json",
        "`big` on one GPU",
        "{figures[step-8-compiled][rates][median]:,.0f} target tokens per second; decoding: "
        "{figures[decode][contenders][ours][sentences_per_second][median]:,.0f} sentences per second",
    ),
    Highlight("bench-cpu-intel-xeon.json", "Training on a CPU with AMX", _TRAINING_ON_A_CPU),
    Highlight("bench-cpu-amd-epyc-avx-512-bf16-one-core.json", "Training on a CPU without AMX", _TRAINING_ON_A_CPU),
    Highlight(
        "decode-width512.json",
        "Decoding on a CPU, width {figures[width]}, sentences per CPU second",
        "{figures[contenders][ours_int8][sentences_per_second][median]:,.0f} in int8, "
        "{figures[contenders][ours_bf16][sentences_per_second][median]:,.0f} in bf16; CTranslate2 "
        "{figures[contenders][int8][sentences_per_second][median]:,.0f} in int8, `generate` "
        "{figures[contenders][generate][sentences_per_second][median]:,.0f}",
    ),
    Highlight(
        "faults.json",
        "{figures[faults]:,} injected faults",
        "{figures[passed]:,} runs resumed exactly, or stopped with one clear sentence",
    ),
    Highlight(
        "export.json",
        "One model in three programs",
        "{figures[hf][bleu_ours]:.2f} BLEU here, {figures[hf][bleu]:.2f} in transformers, "
        "{figures[ctranslate2][bleu]:.2f} in CTranslate2",
    ),
]

_KINDS: dict[str, type | tuple[type, ...]] = {
    "what": str,
    "corpus": str,
    "synthetic": bool,
    "date": str,
    "machine": str,
    "commands": list,
    "seeds": list,
    "wall_seconds": (int, float, type(None)),
    "figures": dict,
    "rows": list,
}
_PROCESSOR = re.compile(r"\bcores? of (?:an? )?(?P<name>[^,;]+)")
_GPU = re.compile(r"\bGPUs: (?!none\b)(?P<name>[^,;]+)")
_PLACEHOLDER = re.compile(r"\{[^{}]*\}")
# Digits inside a name are not a figure: test_2016_flickr, 13a, bf16, ZeRO-1, Multi30k.
_NUMBER = re.compile(r"(?<![\w-])[0-9][0-9.,]*(?![\w-])")


def main() -> None:
    arguments = parse_arguments()
    pages = read_pages(_ROOT)
    results = _ROOT / "results"
    tables = {"highlights": make_highlights(results), "costs": cost_table(), **foreign_tables(), **make_tables(results)}
    wanted = fill_pages(pages, tables)
    changed = [name for name in pages if wanted[name] != pages[name]]
    if arguments.check and changed:
        raise UserError(f"{', '.join(changed)} differ from what they are made of: run tools/results_table.py")
    for name in changed:
        (_ROOT / name).write_text(wanted[name], encoding="utf-8")
        print(f"{name}: tables rewritten", file=sys.stderr)


def read_pages(root: Path) -> dict[str, str]:
    """Read README.md and the pages of docs/, by their paths in the checkout."""
    files = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    return {str(file.relative_to(root)): file.read_text(encoding="utf-8") for file in files}


def fill_pages(pages: dict[str, str], tables: dict[str, str]) -> dict[str, str]:
    """Return the pages with each marked part holding the table of its name.

    Raises:
        UserError: a part has a name without a table, or no page has a part for one of the tables.
    """
    marked = [(page, block["name"]) for page, text in pages.items() for block in _BLOCK.finditer(text)]
    for page, name in marked:
        if name not in tables:
            raise UserError(f"{page} marks a part {name!r}: choose one of {', '.join(tables)}")
    if missing := tables.keys() - {name for _, name in marked}:
        raise UserError(
            f"no page has a part for the table {min(missing)!r}: put the two markers (--help) into README.md or docs/"
        )
    return {
        page: _BLOCK.sub(lambda block: f"{block['start']}{tables[block['name']]}\n{block['end']}", text)
        for page, text in pages.items()
    }


def make_tables(folder: Path) -> dict[str, str]:
    """Make the Markdown tables of TABLES that have rows in the result files of a folder.

    Raises:
        UserError: a file does not follow the layout.
    """
    results = [(file, read_result(file)) for file in sorted(folder.glob("*.json"))]
    results.sort(key=lambda pair: pair[1]["date"], reverse=True)
    lines: dict[str, list[str]] = {name: [] for name in TABLES}
    for file, result in results:
        for table, line in make_lines(file, result):
            lines[table].append(line)
    return {name: "\n".join([*_head((*TABLES[name], _MEASURED)), *rows]) for name, rows in lines.items() if rows}


def _head(columns: Sequence[str]) -> list[str]:
    return [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]


def make_highlights(folder: Path) -> str:
    """Make the Markdown table of HIGHLIGHTS from the result files of a folder.

    Raises:
        UserError: a file is missing or does not follow the layout.
    """
    lines = []
    for file_name, what, template in HIGHLIGHTS:
        file = folder / file_name
        result = read_result(file)
        link = f"[{measured_on(result)}]({folder.name}/{file_name})"
        lines.append(_line([*(fill(text, result, file) for text in (what, template)), link]))
    return "\n".join([*_head(("what", "result", _MEASURED)), *lines])


def read_result(file: Path) -> dict[str, Any]:
    """Read a result file and check it against the layout."""
    result = read_json(file)
    if wrong := sorted(result.keys() ^ _KINDS.keys()):
        what = "misses" if wrong[0] in _KINDS else "has an unknown"
        raise UserError(f"{file} {what} field {wrong[0]!r}: the layout is in tools/results_table.py --help")
    for name, kind in _KINDS.items():
        if not isinstance(result[name], kind):
            raise UserError(f"{name} in {file} is {result[name]!r:.60}: the layout is in tools/results_table.py --help")
    try:
        datetime.date.fromisoformat(result["date"])
    except ValueError:
        raise UserError(f"date in {file} is {result['date']!r}: write it as 2026-01-31") from None
    if _PROCESSOR.search(result["machine"]) is None:
        raise UserError(f'machine in {file} is {result["machine"]!r}: begin it with "N cores of PROCESSOR,"')
    for row in result["rows"]:
        if not isinstance(row, dict) or row.keys() != {"table", "cells"} or row["table"] not in TABLES:
            raise UserError(f"{file}: a row must have cells, and a table among {', '.join(TABLES)}")
        if len(row["cells"]) != len(TABLES[row["table"]]):
            raise UserError(f"{file}: a row of {row['table']} must have {len(TABLES[row['table']])} cells")
    return result


def make_lines(file: Path, result: dict[str, Any]) -> list[tuple[str, str]]:
    """Make the table and the line of each row of a file."""
    # The table is in a page of docs/, so the link goes up one folder.
    link = f"[{measured_on(result)}](../{file.parent.name}/{file.name})"
    return [
        (row["table"], _line([*(fill(text, result, file) for text in row["cells"]), link])) for row in result["rows"]
    ]


def _line(cells: Sequence[str]) -> str:
    """Make a line of a table.

    Raises:
        UserError: a cell is too long to be read in a table.
    """
    for cell in cells:
        if len(_LINK.sub(r"\1", cell)) > _LONGEST_CELL:
            raise UserError(f"a cell of a table has more than {_LONGEST_CELL} characters: {cell}")
    return f"| {' | '.join(cells)} |"


def measured_on(result: dict[str, Any]) -> str:
    """Name the processor of a result, whether other work used it, and the date."""
    shared = ", shared" if "shared with other work" in result["machine"] else ""
    return f"{processor_of(result)}{shared}, {result['date']}"


def processor_of(result: dict[str, Any]) -> str:
    """Name the processor of a result's machine, or its GPU."""
    if gpu := _GPU.search(result["machine"]):
        return gpu["name"]
    match = _PROCESSOR.search(result["machine"])
    assert match is not None
    return match["name"]


def fill(template: str, result: dict[str, Any], file: Path) -> str:
    """Fill a text of a row with its figures.

    Raises:
        UserError: the text names a figure that is not in the file, or contains a number.
    """
    if number := _NUMBER.search(_PLACEHOLDER.sub("", template)):
        raise UserError(f"a row in {file} contains the number {number[0]!r}: move it to figures and name its path")
    try:
        return template.format_map(result)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"row {template!r:.200} in {file} cannot be filled ({error!r}): check the names") from None


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--check", action="store_true", help="only compare; exit 1 if they differ (default: write)")
    return parser.parse_args()
