"""Rewrite the tables of figures in README.md and docs/: results from results/*.json, and the cost of training.

A table is between `<!-- NAME: made by tools/results_table.py -->` and `<!-- end of NAME -->`. NAME is `results` for all
rows of all files, `highlights` for the few results that README.md shows, or `costs` for
dist_transformer/cost/costs.py. With --check nothing is written, and the exit status is 1 if pages and figures
differ. A result file is one JSON object:

    what           what was run and what it shows, in one or two sentences
    corpus         the corpus and its languages: the table's first column
    synthetic      true if a grammar generated the text, which says nothing about real text
    date           date of the run, YYYY-MM-DD
    machine        "4 cores of AMD EPYC, …": cores of a processor, then memory, GPUs, versions of torch and DeepSpeed
    commands       the commands, in order
    seeds          seeds of the runs
    wall_seconds   seconds that everything took, or null if it was not measured
    figures        everything that was measured, nested as the result needs
    rows           lines of the table, each with its other columns: {"what": …, "steps": …, "result": …}

The texts of rows and highlights contain no numbers. They name figures by their path in the file, in Python's format
syntax: "{figures[test][bleu]:.1f} BLEU". Rows on real text come first, then the newest rows.
"""

import argparse
import datetime
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

from dist_transformer.base.errors import UserError
from dist_transformer.config.plain import read_json
from dist_transformer.cost.costs import cost_table

_ROOT = Path(__file__).resolve().parents[1]
_BLOCK = re.compile(
    r"(?P<start><!-- (?P<name>\w+): made by tools/results_table\.py -->\n).*?(?P<end><!-- end of (?P=name) -->)",
    re.DOTALL,
)
HEAD = ["| corpus | what | steps | result | processor | date |", "|---|---|---|---|---|---|"]


class Highlight(NamedTuple):
    """A line of the table in README.md: a result in one sentence that can be read aloud."""

    file: str
    what: str
    result: str


HIGHLIGHT_HEAD = ["| what | result | machine | figures |", "|---|---|---|---|"]
_TRAINING_ON_A_CPU = (
    "`tiny` trains {figures[train-tiny][fastest_marian][ours_to_this]:.1f} times and `base` "
    "{figures[train-base][fastest_marian][ours_to_this]:.1f} times as fast as Hugging Face's MarianMTModel in its "
    "fastest configuration"
)
# At most eight: README.md answers a newcomer's first questions, docs/benchmarks.md has the other results.
HIGHLIGHTS = [
    Highlight(
        "multi30k.json",
        "Translation, Multi30k",
        "English to German, lowercased, reaches {figures[mean][bleu_tokenized]:.1f} BLEU, the mean of three seeds; the "
        "published figure is {figures[published_tokenized]:.2f}",
    ),
    Highlight(
        "gpu-check-h100.json",
        "Speed on one GPU",
        "A step of `{figures[step-8-compiled][preset]}` on {figures[step-8-compiled][tokens_per_step]:,.0f} target "
        "tokens takes {figures[step-8-compiled][milliseconds]:.0f} ms: {figures[step-8-compiled][rates][median]:,.0f} "
        "tokens per second. Beam search with a beam of {figures[decode][beam_size]} translates "
        "{figures[decode][contenders][ours][sentences_per_second][median]:,.0f} sentences per second",
    ),
    Highlight("bench-cpu-intel-xeon.json", "Training on a CPU with AMX", _TRAINING_ON_A_CPU),
    Highlight("bench-cpu-amd-epyc.json", "Training on a CPU without AMX", _TRAINING_ON_A_CPU),
    Highlight(
        "bench-cpu-amd-epyc.json",
        "Decoding on a CPU",
        "In fp32, `base` at {figures[decode-base][contenders][generate][ours_to_this][median]:.1f} times the rate of "
        "Hugging Face's `generate`, {figures[decode-base][contenders][ctranslate2][ours_to_this][median]:.2f} times "
        "that of CTranslate2, and {figures[decode-base][contenders][int8][ours_to_this][median]:.2f} times that of "
        "CTranslate2 in int8",
    ),
    Highlight(
        "bench-cpu-amd-epyc.json",
        "Full packs",
        "Sentences fill {figures[data][fill_percent][both]:.1f}% of each pack's token budgets",
    ),
    Highlight(
        "faults.json",
        "Fault tolerance",
        "{figures[passed]:,} of {figures[faults]:,} injected faults ended as they must, and the campaigns found "
        "{figures[planted_found]} of {figures[planted]} bugs planted in the code",
    ),
    Highlight(
        "export.json",
        "Export",
        "A model scores {figures[hf][bleu_ours]:.2f} BLEU here, {figures[hf][bleu]:.2f} in transformers and "
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
_COLUMNS = ("what", "steps", "result")
_PROCESSOR = re.compile(r"\bcores? of (?:an? )?(?P<name>[^,;]+)")
_GPU = re.compile(r"\bGPUs: (?!none\b)(?P<name>[^,;]+)")
_PLACEHOLDER = re.compile(r"\{[^{}]*\}")
# Digits inside a name are not a figure: test_2016_flickr, 13a, bf16, ZeRO-1, Multi30k.
_NUMBER = re.compile(r"(?<![\w-])[0-9][0-9.,]*(?![\w-])")


def main() -> None:
    arguments = parse_arguments()
    pages = read_pages(_ROOT)
    results = _ROOT / "results"
    tables = {"highlights": make_highlights(results), "results": make_table(results), "costs": cost_table()}
    wanted = fill_pages(pages, tables)
    changed = [name for name in pages if wanted[name] != pages[name]]
    if arguments.check and changed:
        raise UserError(f"{', '.join(changed)} differ from the figures: run tools/results_table.py")
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


def make_table(folder: Path) -> str:
    """Make the Markdown table of all rows of the result files of a folder.

    Raises:
        UserError: a file does not follow the layout.
    """
    results = [(file, read_result(file)) for file in sorted(folder.glob("*.json"))]
    results.sort(key=lambda pair: pair[1]["date"], reverse=True)
    results.sort(key=lambda pair: pair[1]["synthetic"])
    lines = [line for file, result in results for line in make_lines(file, result)]
    return "\n".join([*HEAD, *lines])


def make_highlights(folder: Path) -> str:
    """Make the Markdown table of HIGHLIGHTS from the result files of a folder.

    Raises:
        UserError: a file is missing or does not follow the layout.
    """
    lines = []
    for file_name, what, template in HIGHLIGHTS:
        file = folder / file_name
        result = read_result(file)
        link = f"[{file.stem}]({folder.name}/{file_name})"
        lines.append(f"| {what} | {fill(template, result, file)} | {processor_of(result)} | {link} |")
    return "\n".join([*HIGHLIGHT_HEAD, *lines])


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
    if any(not isinstance(row, dict) or row.keys() != set(_COLUMNS) for row in result["rows"]):
        raise UserError(f"{file}: a row must hold {', '.join(_COLUMNS)} and nothing else")
    return result


def make_lines(file: Path, result: dict[str, Any]) -> list[str]:
    lines = []
    for row in result["rows"]:
        what, steps, text = (fill(row[name], result, file) for name in _COLUMNS)
        # The table is in a page of docs/, so the link goes up one folder.
        text += f", [{file.stem}](../{file.parent.name}/{file.name})"
        lines.append(f"| {result['corpus']} | {what} | {steps} | {text} | {processor_of(result)} | {result['date']} |")
    return lines


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
