"""A suite of benchmarks: its corpora, its parts, and the result file that merges them.

A part is a command of `tools/` in a separate process. Its result file becomes one part of the suite's result file.
"""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.charts import bar_groups, curves
from benchmarks.figures import bar_picture, cost_picture
from benchmarks.measure import NO_CORPUS, ROOT, vector_units, write_result
from dist_transformer.base.errors import UserError
from dist_transformer.config.plain import read_json
from dist_transformer.cost.hardware import kind_of_device
from dist_transformer.reporting.figures import as_png
from dist_transformer.run.environment import describe_environment
from dist_transformer.runtime.launch import own_command, run_printed

CORPORA = "DIST_TRANSFORMER_DATA"
"""The environment variable that names the folder of corpora."""
TRAINING_TEXT = "mix_en_de/train"
CORPUS = "mix_en_de"
DECODED_TEXT, DECODED_VALID = "multi30k/train", "multi30k/val"
TEST_SETS = {"newstest2014": "newstest/newstest2014", "test_2016_flickr": "multi30k/test_2016_flickr"}
SOURCE, TARGET = "en", "de"
_SHARED = ("corpus", "synthetic", "date", "machine", "commands", "seeds", "wall_seconds")


@dataclass(frozen=True, kw_only=True, slots=True)
class Suite:
    corpora: Path
    """Folder with the texts above, `.en` and `.de`."""
    work: Path
    """Work folder for the data folder, models and results of parts; existing content is reused."""
    vocab_size: int
    deadline: float | None = None
    """Value of time.monotonic() at which a part that still runs is stopped."""

    @property
    def data(self) -> Path:
        return self.work / f"data-{self.vocab_size}"

    def prepare(self) -> None:
        """Make the data folder unless it exists."""
        if not (self.data / "index.json").exists():
            self.work.mkdir(parents=True, exist_ok=True)
            texts = ["--src", self.text(TRAINING_TEXT, SOURCE), "--tgt", self.text(TRAINING_TEXT, TARGET)]
            self.run("prepare", *texts, "--vocab-size", self.vocab_size, "--corpus", CORPUS, "--out", self.data)

    def text(self, name: str, language: str) -> Path:
        """Find the file of a text.

        Raises:
            UserError: the file is missing.
        """
        file = self.corpora / f"{name}.{language}"
        if not file.is_file():
            raise UserError(f"{file} does not exist: add it, or name another folder with --data or {CORPORA}")
        return file

    def test_set(self, name: str) -> list[object]:
        """Give the flags that name a test set, for tools that translate."""
        path = TEST_SETS[name]
        return ["--src", self.text(path, SOURCE), "--ref", self.text(path, TARGET)]

    def model(self, preset: str, *, minutes: float, flags: Sequence[object]) -> Path:
        """Train a model for `minutes` with these training flags unless its folder exists; return the folder."""
        path = self.work / f"model-{preset}-{minutes:g}"
        if not path.exists():
            settings = ["--data", self.data, "--preset", preset, "--minutes", minutes, "--out", path]
            self.measure(f"learn-{preset}-{minutes:g}", "learn", *settings, "--", *flags)
        return path

    def translator(self, preset: str, *, vocab_size: int, flags: Sequence[object]) -> Path:
        """Train a model that translates well on Multi30k, unless its folder exists; return the folder.

        An interrupted training resumes.
        """
        data, run = self.work / f"multi30k-{vocab_size}", self.work / f"run-{preset}"
        if not (run / "model").exists():
            if not (data / "index.json").exists():
                texts = (("", DECODED_TEXT), ("valid-", DECODED_VALID))
                sides = (("src", SOURCE), ("tgt", TARGET))
                named = [
                    word
                    for kind, name in texts
                    for side, language in sides
                    for word in (f"--{kind}{side}", self.text(name, language))
                ]
                self.run("prepare", *named, "--vocab-size", vocab_size, "--out", data)
            train = ["--preset", preset, "--data", data, "--run-dir", run, *flags]
            run_printed(own_command("train", *train), output=sys.stderr)
            self.run("average", "--run-dir", run, "--last", 5, "--out", run / "model")
        return run / "model"

    def measure(self, part: str, *command: object) -> dict[str, Any]:
        """Run tools/benchmark.py with `command`, which has no --json, and return its result."""
        file = self.work / f"{part}.json"
        # Training flags, if there are any, must come last.
        self.run("tools/benchmark.py", command[0], "--json", file, *command[1:])
        return read_json(file)

    def run(self, name: str, *arguments: object) -> None:
        """Print a command of dist-transformer, or a script of tools/, and run it."""
        is_script = name.endswith(".py")
        command = [sys.executable, ROOT / name, *arguments] if is_script else own_command(name, *arguments)
        left = None if self.deadline is None else max(1.0, self.deadline - time.monotonic())
        run_printed(command, output=sys.stderr, seconds=left)


def brief_schedule(*, peak_lr: float = 7e-4, warmup_steps: int = 1000) -> list[object]:
    """Give the schedule flags of a training that lasts minutes, because the paper's warm-up takes longer."""
    rates = ["--optimizer.peak-lr", peak_lr, "--optimizer.warmup-steps", warmup_steps]
    return ["--optimizer.schedule", "inverse_sqrt", *rates]


def find_corpora(given: Path | None) -> Path | None:
    """Find the folder of corpora: the given one, or the environment's; None if neither is set.

    Raises:
        UserError: the folder is named but does not exist.
    """
    named = given or (Path(os.environ[CORPORA]) if os.environ.get(CORPORA) else None)
    if named is not None and not named.is_dir():
        raise UserError(f"{named} is not a folder: name the folder of corpora with --data or {CORPORA}")
    return named


def device_name() -> str:
    """Name the device briefly, for file names: `cpu-` and the processor, or the GPU's name in the table of GPUs."""
    import torch

    if not torch.cuda.is_available():
        processor = describe_environment()["processor"]
        return f"cpu-{short_name(f'{processor} {vector_units()}')}"
    properties = torch.cuda.get_device_properties(0)
    known = kind_of_device(f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB")
    return known or re.sub(r"[^a-z0-9]+", "-", properties.name.lower()).strip("-")


def short_name(processor: str) -> str:
    """Shorten the name of a processor: `Intel(R) Xeon(R) Gold 6338 CPU @ 2.00GHz` becomes `intel-xeon-gold-6338`.

    Machines whose processors do not give their model share a name, such as `AMD EPYC`, but for their vector units.
    """
    name = re.sub(r"\((?:r|tm)\)|@.*|\b(?:cpu|processor|[0-9]+-core)\b", " ", processor.lower())
    return re.sub(r"[^a-z0-9]+", "-", name).strip("-")


def machine_load() -> str | None:
    """Describe the load if other work uses the machine, otherwise return None. Call it before the first part."""
    # The load is that of the whole machine, whatever cores this process may use.
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load <= 0.25 * cores:
        return None
    return f"shared with other work, load {load:.1f} on {cores} {'core' if cores == 1 else 'cores'} at the start"


def merge(file: Path, parts: dict[str, dict[str, Any]], *, what: str, load: str | None = None) -> None:
    """Merge results into the parts of `file` and draw its rates next to it. Other parts of the same machine stay.

    The file's figures are those of its parts, by the part's name; the layout is that of tools/results_table.py.
    FILE-history.jsonl gets a line per part, with which later commits can be compared.
    """
    _remember(file.with_name(f"{file.stem}-history.jsonl"), parts, load)
    machine = next(iter(parts.values()))["machine"]
    before = read_json(file)["figures"] if file.exists() else {}
    figures = {name: part for name, part in before.items() if part["machine"] == machine}
    figures.update((name, _as_part(name, result, load)) for name, result in parts.items())
    # Parts without text do not describe the corpus.
    texts = [part for part in figures.values() if part["corpus"] != NO_CORPUS]
    loads = sorted({part["load"] for part in figures.values() if part["load"]})
    result = {
        "what": what,
        "corpus": "; ".join(dict.fromkeys(part["corpus"] for part in texts)) or NO_CORPUS,
        "synthetic": all(part["synthetic"] for part in texts),
        "date": max(part["date"] for part in figures.values()),
        "machine": "; ".join([machine, *loads]),
        "commands": [command for part in figures.values() for command in part["commands"]],
        "seeds": sorted({seed for part in figures.values() for seed in part["seeds"]}),
        "wall_seconds": round(sum(part["wall_seconds"] for part in figures.values()), 1),
        "figures": figures,
        "rows": [row for part in figures.values() for row in part["rows"]],
    }
    write_result(file, result)
    if groups := bar_groups(figures):
        file.with_suffix(".png").write_bytes(as_png(bar_picture(groups, note=result["machine"])))
    for part in (part for part in figures.values() if "modelled_scaling" in part):
        scaling = [(row["devices"], row["target_tokens_per_second"]) for row in part["modelled_scaling"]["rows"]]
        picture = cost_picture(curves(part), scaling, unit=part["unit"], note=result["machine"])
        file.with_name(f"{file.stem}-cost.png").write_bytes(as_png(picture))


def _remember(file: Path, parts: dict[str, dict[str, Any]], load: str | None) -> None:
    """Append the medians of each part's rates, with the commit; a commit with local changes ends in `+`."""
    commit = _git("rev-parse", "--short", "HEAD") + (
        "+" if _git("status", "--porcelain", "--untracked-files=no") else ""
    )
    with file.open("a", encoding="utf-8") as history:
        for name, part in parts.items():
            if rates := median_rates(part["figures"]):
                entry = {"commit": commit, "date": part["date"], "machine": part["machine"], "load": load}
                history.write(json.dumps({**entry, "part": name, "rates": rates}, ensure_ascii=False) + "\n")


def median_rates(figures: dict[str, Any]) -> dict[str, float]:
    """Give the median rate of each contender, or of the part itself as `ours`, in its unit; of waits, the seconds."""
    if "waits" in figures:
        return {name: wait["seconds"]["median"] for name, wait in figures["waits"].items()}
    found = {"ours": figures, **figures.get("contenders", {})}
    rates = {name: each.get("rates", each.get("sentences_per_second")) for name, each in found.items()}
    return {name: rate["median"] for name, rate in rates.items() if isinstance(rate, dict) and "median" in rate}


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, check=False, capture_output=True, text=True)
    return done.stdout.strip()


def _as_part(name: str, result: dict[str, Any], load: str | None) -> dict[str, Any]:
    """Convert a result to a part: its rows name figures of the merged file."""

    def moved(row: dict[str, Any]) -> dict[str, Any]:
        return {**row, "cells": [text.replace("{figures[", f"{{figures[{name}][") for text in row["cells"]]}

    shared = {field: result[field] for field in _SHARED}
    return {**result["figures"], **shared, "load": load, "rows": [moved(row) for row in result["rows"]]}
