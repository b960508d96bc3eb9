"""Run the benchmarks that this machine supports, and write results/speed/bench-DEVICE.json and a picture of the rates.

A part that has peers measures them in the same run. The text comes from a folder of corpora, which --data or the
environment variable DIST_TRANSFORMER_DATA names:

    mix_en_de/train.{en,de}                          to measure training
    multi30k/{train,val,test_2016_flickr}.{en,de}    to train the models that decode, and to decode

DEVICE is `cpu-` and the processor, or the GPU's short name. A part that is measured again replaces its figures in the
file. Without a GPU, rates are per second of CPU time, because other work on the machine changes that only a little.
tools/results_table.py updates the tables of README.md and docs/.
"""

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.charts import bar_groups, bar_picture
from benchmarks.measure import NO_CORPUS, ROOT, device_name, read_flags, require_known, write_result
from dist_transformer.base.errors import UserError
from dist_transformer.config.plain import read_json
from dist_transformer.runtime.device import load_of_machine
from dist_transformer.runtime.launch import own_command, run_printed

CORPORA = "DIST_TRANSFORMER_DATA"
"""The environment variable that names the folder of corpora."""
TEXTS = {
    "mix_en_de": {"train": ("--src", "--tgt")},
    "multi30k": {"train": ("--src", "--tgt"), "val": ("--valid-src", "--valid-tgt")},
}
"""Texts of a data folder, and the flags of `prepare` for their two sides."""
TEST_SETS = {"newstest2014": "newstest/newstest2014", "test_2016_flickr": "multi30k/test_2016_flickr"}
_SHARED = ("corpus", "synthetic", "date", "machine", "commands", "seeds", "wall_seconds")
PARTS = ("start", "data", "train-tiny", "train-base", "decode-tiny", "decode-base")
# The models that decode, trained on Multi30k: a vocabulary, and flags of training. They end their sentences.
_TRANSLATORS: dict[str, tuple[int, list[object]]] = {
    "tiny": (6000, ["--max-steps", 1600]),
    # Small steps without dropout, because a core of a CPU computes 480 tokens per second.
    "base": (
        8000,
        [
            *("--max-steps", 7500, "--save-every", 100, "--validate-every", 750, "--validate-sentences", 100),
            *("--batch.max-target-tokens", 512, "--batch.packs-per-step", 1, "--model.dropout", 0),
            *("--optimizer.schedule", "cosine", "--optimizer.peak-lr", 2e-4, "--optimizer.min-lr", 1e-5),
            *("--optimizer.warmup-steps", 100),
        ],
    ),
}
# One pack per step, because a step of the preset's 25,088 tokens takes a core of a CPU most of a minute.
_CPU_STEP: list[object] = ["--batch.packs-per-step", 1, "--batch.max-target-tokens", 2048]
# All peers except DeepSpeed's own defaults, which the part for `tiny` measures.
_CPU_PEERS = ("plain", "torch", "trainer", "compiled", "loop")


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Flags."""

    data: Path | None = None
    """Folder of corpora; default: DIST_TRANSFORMER_DATA."""
    parts: tuple[str, ...] = PARTS
    """Parts to measure."""
    work: Path = Path("runs/bench")
    """Folder for data and models."""
    out: Path = Path("results/speed")
    """Folder of the result."""


def main() -> None:
    arguments = read_flags(Settings)
    require_known("--parts", arguments.parts, PARTS)
    corpora = find_corpora(arguments.data)
    if corpora is None:
        remedy = f"name the folder of corpora with --data or {CORPORA}"
        print(f"nothing is measured, because there is no corpus: {remedy}", file=sys.stderr)
        return
    device, load = device_name(), machine_load()
    suite = Suite(corpora=corpora, work=arguments.work)
    arguments.out.mkdir(parents=True, exist_ok=True)
    for part in arguments.parts:
        result = suite.measure(part, *command_of(part, suite, on_cpu=device.startswith("cpu-")))
        file = arguments.out / f"bench-{device}.json"
        merge(file, part, result, what="`make bench`: compared with peers, in turns, in the same run", load=load)


def command_of(part: str, suite: "Suite", *, on_cpu: bool) -> list[object]:
    """Give the flags of tools/benchmark.py. A CPU measures few steps of base."""
    name, _, preset = part.partition("-")
    if name == "start":
        return [name]
    if name == "decode":
        vocab_size, flags = _TRANSLATORS[preset]
        model = suite.model(preset, suite.data("multi30k", vocab_size), flags)
        sentences = 200 if on_cpu and preset == "base" else 1000
        return ["decode", "--model", model, *suite.test_set("test_2016_flickr"), "--sentences", sentences]
    command: list[object] = [name, "--data", suite.data("mix_en_de", 8000 if on_cpu else 37000)]
    if name == "data":
        return [*command, "--seconds", 1]
    if on_cpu and preset == "base":
        return [*command, "--preset", preset, "--steps", 4, "--rounds", 4, "--peers", *_CPU_PEERS, "--", *_CPU_STEP]
    # A GPU computes a whole step at once.
    at_once = ["--", "--batch.packs-per-micro-batch", 2] if preset == "tiny" and not on_cpu else []
    return [*command, "--preset", preset, *at_once]


@dataclass(frozen=True, kw_only=True, slots=True)
class Suite:
    corpora: Path
    """Folder with the texts above, `.en` and `.de`."""
    work: Path
    """Work folder for data folders, runs and results of parts; existing content is reused."""
    deadline: float | None = None
    """Value of time.monotonic() at which a part that still runs is stopped."""

    def pairs(self, name: str, *flags: str) -> list[object]:
        """Give the flags that name the two sides of a text.

        Raises:
            UserError: a file is missing.
        """
        files = [self.corpora / f"{name}.{language}" for language in ("en", "de")]
        for file in files:
            if not file.is_file():
                raise UserError(f"{file} does not exist: add it, or name another folder with --data or {CORPORA}")
        return [flags[0], files[0], flags[1], files[1]]

    def test_set(self, name: str) -> list[object]:
        """Give the flags that name a test set, for tools that translate."""
        return self.pairs(TEST_SETS[name], "--src", "--ref")

    def data(self, corpus: str, vocab_size: int) -> Path:
        """Return a data folder, which is made unless it exists."""
        folder = self.work / f"{corpus}-{vocab_size}"
        if not (folder / "index.json").exists():
            texts = [word for text, flags in TEXTS[corpus].items() for word in self.pairs(f"{corpus}/{text}", *flags)]
            self.run("prepare", *texts, "--vocab-size", vocab_size, "--corpus", corpus, "--out", folder)
        return folder

    def model(self, preset: str, data: Path, flags: Sequence[object]) -> Path:
        """Train a model that translates, or resume that, unless its folder exists; return the folder."""
        run = self.work / f"run-{preset}"
        if not (run / "model").exists():
            self.run("train", "--preset", preset, "--data", data, "--run-dir", run, *flags)
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
        self.work.mkdir(parents=True, exist_ok=True)
        is_script = name.endswith(".py")
        command = [sys.executable, ROOT / name, *arguments] if is_script else own_command(name, *arguments)
        left = None if self.deadline is None else max(1.0, self.deadline - time.monotonic())
        run_printed(command, output=sys.stderr, seconds=left)


def find_corpora(given: Path | None) -> Path | None:
    """Find the folder of corpora: the given one, or the environment's; None if neither is set.

    Raises:
        UserError: the folder is named but does not exist.
    """
    named = given or (Path(os.environ[CORPORA]) if os.environ.get(CORPORA) else None)
    if named is not None and not named.is_dir():
        raise UserError(f"{named} is not a folder: name the folder of corpora with --data or {CORPORA}")
    return named


def machine_load() -> str | None:
    """Describe the load if other work uses the machine, otherwise return None. Call it before the first part."""
    load, cores = load_of_machine() or (0.0, 1)
    if load <= 0.25 * cores:
        return None
    return f"shared with other work, load {load:.1f} on {cores} {'core' if cores == 1 else 'cores'} at the start"


def merge(file: Path, name: str, result: dict[str, Any], *, what: str, load: str | None = None) -> None:
    """Merge a result into the parts of `file` and draw its rates next to it. Other parts of the same machine stay.

    The file's figures are those of its parts, by the part's name; the layout is that of tools/results_table.py.
    """
    before = read_json(file)["figures"] if file.exists() else {}
    figures = {each: part for each, part in before.items() if part["machine"] == result["machine"]}
    # The rows name figures of the merged file.
    rows = [
        {**row, "cells": [text.replace("{figures[", f"{{figures[{name}][") for text in row["cells"]]}
        for row in result["rows"]
    ]
    shared = {field: result[field] for field in _SHARED}
    figures[name] = {**result["figures"], **shared, "load": load, "rows": rows}
    parts = [*figures.values()]
    # Parts without text do not describe the corpus.
    texts = [part for part in parts if part["corpus"] != NO_CORPUS]
    merged = {
        "what": what,
        "corpus": "; ".join(dict.fromkeys(part["corpus"] for part in texts)) or NO_CORPUS,
        "synthetic": all(part["synthetic"] for part in texts),
        "date": max(part["date"] for part in parts),
        "machine": "; ".join([result["machine"], *sorted({part["load"] for part in parts if part["load"]})]),
        "commands": [command for part in parts for command in part["commands"]],
        "seeds": sorted({seed for part in parts for seed in part["seeds"]}),
        "wall_seconds": round(sum(part["wall_seconds"] for part in parts), 1),
        "figures": figures,
        "rows": [row for part in parts for row in part["rows"]],
    }
    write_result(file, merged)
    if groups := bar_groups(figures):
        file.with_suffix(".png").write_bytes(bar_picture(groups, note=merged["machine"]))
