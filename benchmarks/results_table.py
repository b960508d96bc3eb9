"""Rewrite the tables in README.md and docs/: results from results/*/*.json, costs of training, flags of other toolkits.

A table is between `<!-- NAME: made by tools/results_table.py -->` and `<!-- end of NAME -->`. NAME is one of TABLES for
the rows of all files that belong to it, `highlights` for the few results that README.md shows, `costs` for
benchmarks/paper_costs.py, or `missing` or a toolkit of dist_transformer/config/foreign_flags.toml. With --check
nothing is written, and the exit status is 1 if pages and their sources differ. A result file is one JSON object:

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

import re
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.measure import ROOT, read_flags
from benchmarks.paper_costs import cost_table
from benchmarks.rows import markdown_line, markdown_table
from dist_transformer.base.errors import UserError
from dist_transformer.config import wrong_names
from dist_transformer.config.plain import read_json

RESULTS = sorted((ROOT / "results").rglob("*.json"))
_BLOCK = re.compile(
    r"(?P<start><!-- (?P<name>\w+): made by tools/results_table\.py -->\n).*?(?P<end><!-- end of (?P=name) -->)",
    re.DOTALL,
)
_TRAINING = ("preset", "ours", "Trainer", "loop", "compiled", "torch's layers")
# One table per question, whose rows can be compared.
TABLES: dict[str, tuple[str, ...]] = {
    "race": ("trainer", "BLEU 15", "20", "25", "tokens per CPU second", "BLEU at the end, beam 4", "peak MiB"),
    "training": _TRAINING,
    "training_gpu": _TRAINING,
    "steps_gpu": ("step", "tokens per second", "milliseconds", "tokens", "peak GiB", "launches"),
    "decoding": ("model", "ours", "ours, bf16", "ours, int8", "transformers", "CTranslate2", "CTranslate2, int8"),
    "decoding_gpu": ("model", "ours", "transformers", "CTranslate2", "CTranslate2, int8"),
    "start": ("until", "seconds", "CPU seconds", "peak MiB"),
    "data": ("fill", "one pack at a time", "eight", "`prepare`", "`tokenizers` alone", "peak MiB of `prepare`"),
    "quality": ("recipe", "corpus", "steps", "BLEU"),
    "ways": ("search", "BLEU", "chrF", "sentences per CPU second"),
    "vocabularies": ("vocabulary", "BLEU", "chrF", "target tokens per sentence", "parameters"),
    "export": ("program", "BLEU", "outputs as ours"),
    "robust": (
        *("training", "BLEU", "in capitals", "in capitals, `--recase auto`", "with errors"),
        *("spans that come once, %", "of these beside a neighbour, %"),
    ),
    "tags": ("lines", "with the same tags, balanced", "with a translation of a tagged word", "of these in the tags"),
    "terms": ("terms", "in source and reference", "come out without `--terms`", "with", "BLEU without", "with"),
    "optimizers": ("text, network", "peak, warm-up", "steps to BLEU 20", "25", "CPU seconds to 20", "25", "test BLEU"),
    "null_gpu": (
        *("ZeRO stage", "launches", "before", "waits for the device", "before", "collectives", "before"),
        *("CPU ms of the host", "before"),
    ),
    "faults": ("campaign", "injected", "ended as they must"),
}
"""Columns of the tables by their names, without the last."""
_MEASURED = "measured on"

_TRAINING_ON_A_CPU = (
    "{figures[train-tiny][fastest_marian][ours_to_this]:.1f} (`tiny`) and "
    "{figures[train-base][fastest_marian][ours_to_this]:.1f} (`base`) times the rate of transformers' MarianMTModel"
)
# Files, subjects, and results in one sentence that can be read aloud. At most five: README.md answers a newcomer's
# first questions, docs/benchmarks.md lists the pages of the other results.
HIGHLIGHTS = [
    (
        "quality/multi30k-rdrop.json",
        "Multi30k, English to German, with R-Drop",
        "{figures[mean][bleu_tokenized]:.1f} BLEU, mean of three seeds; published: {figures[published_tokenized]:.2f}",
    ),
    (
        "speed/race-cpu-amd-epyc-family-25-model-17.json",
        "CPU seconds to {figures[goals][1]} BLEU, captions",
        "{figures[toolkits][ours_alike][cpu_seconds_to_bleu][bleu_20][median]:,.0f} with Adam, "
        "{figures[toolkits][ours][cpu_seconds_to_bleu][bleu_20][median]:,.0f} with Muon; a loop of MarianMTModel "
        "{figures[toolkits][loop][cpu_seconds_to_bleu][bleu_20][median]:,.0f}, "
        "Trainer {figures[toolkits][trainer][cpu_seconds_to_bleu][bleu_20][median]:,.0f}, "
        "Marian {figures[toolkits][marian][cpu_seconds_to_bleu][bleu_20][median]:,.0f}",
    ),
    (
        "speed/gpu-check-h100.json",
        "One GPU",
        "`big`: {figures[step-8-compiled][rates][median]:,.0f} target tokens per second; decoding with `base`: "
        "{figures[decode][contenders][ours][sentences_per_second][median]:,.0f} sentences per second",
    ),
    ("speed/bench-cpu-amd-epyc-family-25-model-17-one-core.json", "Training on a CPU", _TRAINING_ON_A_CPU),
    (
        "faults/faults.json",
        "{figures[faults]:,} injected faults",
        "{figures[passed]:,} runs resumed exactly, or stopped with one clear sentence",
    ),
]

_FIELDS = (
    *("what", "corpus", "synthetic", "date", "machine"),
    *("commands", "seeds", "wall_seconds", "figures", "rows"),
)
_PROCESSOR = re.compile(r"\bcores? of (?:an? )?(?P<name>[^,;]+)")
_GPU = re.compile(r"\bGPUs: (?!none\b)(?P<name>[^,;]+)")
_PLACEHOLDER = re.compile(r"\{[^{}]*\}")
# Digits inside a name are not a figure: test_2016_flickr, 13a, bf16, ZeRO-1, Multi30k.
_NUMBER = re.compile(r"(?<![\w-])[0-9][0-9.,]*(?![\w-])")
_FOREIGN_FLAGS = Path(wrong_names.__file__).with_name("foreign_flags.toml")
# A flag, with its value where that is no English word; a word of vocabularies; a variable of the environment.
_CODE = re.compile(r"--[a-z][\w.-]*\w( (?=\S*[A-Z\d_])[\w.-]*\w)?|<unk>|\b[A-Z]+(_[A-Z]+)+=?")


class Toolkit(NamedTuple):
    """A toolkit of the page: the name of its table, its heading, and whether it has settings rather than flags."""

    table: str
    heading: str
    settings: bool


TOOLKITS = {
    "f": Toolkit("fairseq", "fairseq", settings=False),
    "m": Toolkit("marian", "Marian", settings=False),
    "o": Toolkit("opennmt", "OpenNMT-py, Eole", settings=True),
    "t": Toolkit("transformers", "transformers", settings=True),
}
"""Toolkits by their letters in the file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Flags."""

    check: bool = False
    """Only compare; exit with status 1 if they differ."""


def main() -> None:
    arguments = read_flags(Settings)
    pages = read_pages()
    tables = {"highlights": make_highlights(), "costs": cost_table(), **foreign_tables(), **make_tables()}
    wanted = fill_pages(pages, tables)
    changed = [name for name in pages if wanted[name] != pages[name]]
    if arguments.check and changed:
        raise UserError(f"{', '.join(changed)} differ from what they are made of: run tools/results_table.py")
    for name in changed:
        (ROOT / name).write_text(wanted[name], encoding="utf-8")
        print(f"{name}: tables rewritten", file=sys.stderr)


def read_pages() -> dict[str, str]:
    """Read README.md and the pages of docs/, by their paths in the checkout."""
    files = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return {str(file.relative_to(ROOT)): file.read_text(encoding="utf-8") for file in files}


def fill_pages(pages: dict[str, str], tables: dict[str, str]) -> dict[str, str]:
    """Return the pages with each marked part holding the table of its name.

    Raises:
        UserError: no page has a part for one of the tables.
    """
    marked = {block["name"] for text in pages.values() for block in _BLOCK.finditer(text)}
    if missing := tables.keys() - marked:
        raise UserError(
            f"no page has a part for the table {min(missing)!r}: put the two markers (--help) into README.md or docs/"
        )
    return {
        page: _BLOCK.sub(lambda block: f"{block['start']}{tables[block['name']]}\n{block['end']}", text)
        for page, text in pages.items()
    }


def make_tables() -> dict[str, str]:
    """Make the Markdown tables of TABLES that have rows in the result files."""
    results = [(file, read_result(file)) for file in RESULTS]
    results.sort(key=lambda pair: pair[1]["date"], reverse=True)
    lines: dict[str, list[str]] = {name: [] for name in TABLES}
    for file, result in results:
        for table, line in make_lines(file, result):
            lines[table].append(line)
    heads = {name: markdown_table((*TABLES[name], _MEASURED), ()) for name in TABLES}
    return {name: "\n".join([heads[name], *rows]) for name, rows in lines.items() if rows}


def make_highlights() -> str:
    """Make the Markdown table of HIGHLIGHTS."""
    rows = []
    for name, what, template in HIGHLIGHTS:
        file = ROOT / "results" / name
        result = read_result(file)
        link = f"[{measured_on(result)}](results/{name})"
        rows.append([*(fill(text, result, file) for text in (what, template)), link])
    return markdown_table(("what", "result", _MEASURED), rows)


def read_result(file: Path) -> dict[str, Any]:
    """Read a result file and check its fields and rows against the layout."""
    result = read_json(file)
    if wrong := result.keys() ^ set(_FIELDS):
        raise UserError(f"{file} has no or an unknown field {min(wrong)!r}: see tools/results_table.py --help")
    for row in result["rows"]:
        if len(row["cells"]) != len(TABLES.get(row["table"], ())):
            raise UserError(f"{file}: a row of {row['table']!r} has not the cells of a table in TABLES")
    return result


def make_lines(file: Path, result: dict[str, Any]) -> list[tuple[str, str]]:
    """Make the table and the line of each row of a file."""
    # The table is in a page of docs/, so the link goes up one folder.
    link = f"[{measured_on(result)}](../{'/'.join(file.parts[-3:])})"
    return [
        (row["table"], markdown_line([*(fill(text, result, file) for text in row["cells"]), link]))
        for row in result["rows"]
    ]


def measured_on(result: dict[str, Any]) -> str:
    """Name the processor or GPU of a result, whether other work used it, and the date."""
    shared = ", shared" if "shared with other work" in result["machine"] else ""
    match = _GPU.search(result["machine"]) or _PROCESSOR.search(result["machine"])
    assert match is not None, f"machine does not begin with N cores of PROCESSOR: {result['machine']}"
    return f"{match['name']}{shared}, {result['date']}"


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


def foreign_tables() -> dict[str, str]:
    """Make a Markdown table of each toolkit's names, and one of all names of what does not exist here."""
    file = tomllib.loads(_FOREIGN_FLAGS.read_text("utf-8"))
    tables = {}
    for letter, toolkit in TOOLKITS.items():
        rows = [(_names(names, letter, dashes=""), f"`{ours}`") for ours, names in file["commands"].items()]
        for ours, names in file["flags"].items():
            # The page says once that text becomes a folder of data.
            remedy = ours.removesuffix(" | {data}").format(**file["phrases"])
            remedy = _marked(remedy).replace(" | there", "; otherwise there").replace(" | ", ", or ")
            rows.append((_names(names, letter), remedy))
        tables[toolkit.table] = markdown_table((toolkit.heading, "here"), [row for row in rows if row[0]])
    missing = [
        (_names(names, "fmot"), _marked(f"{why[0].upper()}{why[1:]}.")) for why, names in file["missing"].items()
    ]
    return {**tables, "missing": markdown_table(("elsewhere", "here"), [row for row in missing if row[0]])}


def _names(words: str, letters: str, *, dashes: str = "--") -> str:
    """Write the names that toolkits of these letters have, in the form of the first that has it."""
    written = []
    for marks, _, name in (word.rpartition(":") for word in words.split()):
        if found := [TOOLKITS[letter] for letter in letters if letter in marks]:
            written.append(f"`{name.replace('-', '_')}`" if found[0].settings else f"`{dashes}{name}`")
    return ", ".join(written)


def _marked(text: str) -> str:
    return _CODE.sub(r"`\g<0>`", text)
