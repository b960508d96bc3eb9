"""Train a short recipe on Multi30k from scratch, and compare its figures with a band that was fixed beforehand.

tools/reproduce.py --multi30k DIR --out OUT
tools/reproduce.py --multi30k DIR --out OUT -- --optimizer.warmup-steps 1
tools/reproduce.py --multi30k DIR --out OUT --write

The recipe goes all the way: prepare, train on two processes under DeepSpeed's launcher in fp32, average, and translate
test_2016_flickr. Each figure gets one line: its value, its band, and whether it is in or out. The exit status is 0 if
all figures are in their bands, otherwise 1. Flags after `--` change the training, which shows what the bands find.

The band of a figure is the mean of seeds 1 to 5, plus and minus 4 standard deviations or the figure's floor, whichever
is larger. The floor allows for CPUs that round differently and for a spread that five seeds understate. The training
that is compared has seed 6, whose figures are in no mean, so that a band that is too narrow is noticed.

--write trains the five seeds and two deliberate defects, and writes bands and figures to the file of --band. Run it
again after an interruption: finished trainings stay.
"""

import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.launching import deepspeed_command, overridden
from benchmarks.measure import ROOT, children_seconds, read_flags, result_of, write_result
from benchmarks.results_table import read_result
from benchmarks.rows import markdown_table
from dist_transformer.base.errors import UserError, say
from dist_transformer.base.files import sha256_of, write_file
from dist_transformer.config.plain import read_json
from dist_transformer.config.schema import setting
from dist_transformer.data.folder.format import INDEX_FILE
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.run.layout import read_records
from dist_transformer.runtime.launch import own_command, run_printed

BAND_FILE = ROOT / "results/quality/reproduce.json"
# Names of the dataset's files, without the ending of the language.
_TRAIN, _DEV, _TEST = "train", "val", "test_2016_flickr"
_LANGUAGES = ("en", "de")

RECIPE = {
    "prepare": "--vocab-size 4000 --lowercase",
    "train": "--preset tiny --precision fp32 --max-steps 200 --batch.max-target-tokens 1024 "
    "--batch.packs-per-step 2 --optimizer.peak-lr 3e-3 --optimizer.warmup-steps 50 --validate-every 200 "
    "--validate-sentences 0 --save-every 20 --log-every 50",
    "average": "--last 3",
    "evaluate": "--beam 4",
}
"""Flags of each command. The bands hold for these, so a change here needs new bands (--write)."""
DEFECTS = {
    "no_warmup": "--optimizer.warmup-steps 1",
    "no_label_smoothing": "--optimizer.label-smoothing 0",
}
"""Flags that break the recipe, for --write to show that the bands find them."""
BAND_SEEDS = (1, 2, 3, 4, 5)
COMPARED_SEED = 6
_RANKS = 2
_DEVIATIONS = 4


FIGURES = {
    # Five seeds understate the spread of this one: seed 6 came 4.0 of their standard deviations below their mean.
    "train_loss": ("training loss, last 20 steps", 0.1),
    "dev_nll": ("dev NLL per token", 0.1),
    "test_chrf": ("test chrF", 1.0),
    "test_bleu": ("test BLEU", 1.0),
}
"""Figures of the recipe that have a band: label, and least half width of the band."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Band:
    """Values of a figure that count as reproduced: from `low` to `high`."""

    mean: float
    deviation: float
    """Standard deviation of the seeds, with n - 1."""
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float], *, floor: float) -> "Band":
        """Make the band of the seeds' values."""
        mean, deviation = statistics.fmean(values), statistics.stdev(values)
        half = max(_DEVIATIONS * deviation, floor)
        return cls(mean=mean, deviation=deviation, low=mean - half, high=mean + half)

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high

    def distance(self, value: float) -> float:
        """Return the distance of a value from the mean in half widths; above 1, it is out."""
        return abs(value - self.mean) / (self.high - self.mean)


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Flags."""

    multi30k: Path = Path(os.environ.get("MULTI30K") or "multi30k")
    """Folder with the text files of Multi30k, which the variable MULTI30K may also name."""
    out: Path = Path("runs/reproduce")
    """New folder for data and runs."""
    band: Path = BAND_FILE
    """File of the bands."""
    write: bool = False
    """Make new bands, in place of a comparison."""
    flags: tuple[str, ...] = setting(default=(), python_only=True)


def main() -> None:
    arguments = read_flags(Settings)
    # The two processes are meant for two cores. DeepSpeed's launcher passes this on.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    hashes = hash_corpus(arguments.multi30k)
    if arguments.write and arguments.flags:
        raise UserError(f"--write makes the bands of the recipe as it is: leave out {' '.join(arguments.flags)}")
    if arguments.write:
        write_bands(arguments, hashes)
        return
    bands = read_bands(arguments.band, hashes)
    if arguments.out.exists():
        raise UserError(f"{arguments.out} exists, and this training starts from scratch: remove it, or choose --out")
    prepare(arguments)
    values = measure("run", COMPARED_SEED, arguments.flags, arguments)
    out = []
    for name, (label, _) in FIGURES.items():
        band = bands[name]
        out += [] if band.holds(values[name]) else [label]
        say(f"{label}: {values[name]:.3f}, band {band.low:.3f} to {band.high:.3f}: {'out' if label in out else 'in'}")
    if out:
        raise UserError(
            f"{', '.join(out)} not reproduced: find the change that moved the figures (git bisect), and only if it is "
            "meant, make new bands with --write"
        )


def hash_corpus(folder: Path) -> dict[str, str]:
    """Hash the texts of Multi30k, by the names of their files.

    Raises:
        UserError: the folder lacks a file.
    """
    names = [f"{name}.{language}" for name in (_TRAIN, _DEV, _TEST) for language in _LANGUAGES]
    remedy = (
        f"download {', '.join((_TRAIN, _DEV, _TEST))} (.en and .de) from data/task1/raw of "
        "https://github.com/multi30k/dataset, unpack them into one folder, and set MULTI30K to it"
    )
    for name in names:
        if not (folder / name).is_file():
            raise UserError(f"{folder} has no file {name}: {remedy}")
    return {name: sha256_of(folder / name) for name in names}


def read_bands(file: Path, hashes: dict[str, str]) -> dict[str, Band]:
    """Read the bands of a file that --write wrote.

    Raises:
        UserError: its bands are those of another recipe or of other texts.
    """
    figures = read_result(file)["figures"]
    if figures["recipe"] != RECIPE:
        raise UserError(f"{file} has the bands of another recipe: restore the file, or write it again with --write")
    for name, sha256 in hashes.items():
        if figures["corpus_sha256"].get(name) != sha256:
            raise UserError(f"{name} is not the text that the bands of {file} were made with: download it again")
    return {name: Band(**band) for name, band in figures["bands"].items()}


def prepare(arguments: Settings) -> None:
    """Prepare OUT/data."""
    names = {"--src": f"{_TRAIN}.en", "--tgt": f"{_TRAIN}.de", "--valid-src": f"{_DEV}.en", "--valid-tgt": f"{_DEV}.de"}
    files = [word for flag, name in names.items() for word in (flag, arguments.multi30k / name)]
    flags = [*RECIPE["prepare"].split(), "--corpus", "Multi30k", "--out", arguments.out / "data"]
    run_printed(own_command("prepare", *files, *flags), output=sys.stderr)


def measure(name: str, seed: int, flags: Sequence[str], arguments: Settings) -> dict[str, float]:
    """Train the recipe with a seed and further flags, and score it. `name` is that of its run folder."""
    started, before = time.monotonic(), children_seconds()
    run = arguments.out / name
    places = ["--data", arguments.out / "data", "--run-dir", run, "--seed", seed]
    training = ["--module", "dist_transformer", "train", *overridden([*RECIPE["train"].split(), *places, *flags])]
    run_printed([*deepspeed_command(_RANKS), *training], output=sys.stderr)
    averaging = ["--run-dir", run, "--out", run / "model", *RECIPE["average"].split()]
    run_printed(own_command("average", *averaging), output=sys.stderr)
    source, reference = (arguments.multi30k / f"{_TEST}.{language}" for language in _LANGUAGES)
    texts = ["--src", source, "--ref", reference, "--json", run / "bleu.json"]
    scoring = ["--model", run / "model", *texts, *RECIPE["evaluate"].split(), "--processes", _RANKS]
    run_printed(own_command("evaluate", *scoring), output=sys.stderr)
    scores = read_json(run / "bleu.json")
    return {
        "train_loss": read_records(run, "train")[-1]["loss"],
        "dev_nll": read_records(run, "valid")[-1]["nll"],
        "test_chrf": scores["chrf"],
        "test_bleu": scores["bleu"],
        "cpu_seconds": children_seconds() - before,
        "wall_seconds": time.monotonic() - started,
    }


def measure_once(name: str, seed: int, flags: str, arguments: Settings) -> dict[str, float]:
    """Read the figures of a training that an earlier call finished with the same settings, or measure them."""
    record = arguments.out / name / "figures.json"
    settings = {"recipe": RECIPE, "seed": seed, "flags": flags}
    if record.exists() and (kept := read_json(record))["settings"] == settings:
        figures: dict[str, float] = kept["figures"]
        return figures
    figures = measure(name, seed, flags.split(), arguments)
    write_file(record, json.dumps({"settings": settings, "figures": figures}, indent=1) + "\n")
    return figures


def write_bands(arguments: Settings, hashes: dict[str, str]) -> None:
    """Train the seeds of the bands and the defects, and write the file of the bands."""
    if not (arguments.out / "data" / INDEX_FILE).exists():
        prepare(arguments)
    seeds = {str(seed): measure_once(f"seed-{seed}", seed, "", arguments) for seed in BAND_SEEDS}
    bands = {
        name: Band.of([values[name] for values in seeds.values()], floor=floor) for name, (_, floor) in FIGURES.items()
    }
    defects = {name: measure_once(name, COMPARED_SEED, flags, arguments) for name, flags in DEFECTS.items()}
    figures = {
        "recipe": RECIPE,
        "corpus_sha256": hashes,
        "bands": {name: dataclasses.asdict(band) for name, band in bands.items()},
        "seeds": seeds,
        "defects": {name: {"flags": DEFECTS[name], **values} for name, values in defects.items()},
        "steps": read_records(arguments.out / f"seed-{BAND_SEEDS[0]}", "end")[-1]["step"],
    }
    result = result_of(
        DataFolder.open(arguments.out / "data").index,
        what="a short recipe that make reproduce trains and compares: its figures with five seeds, the bands that "
        "follow from them, and two deliberate defects",
        command="python tools/reproduce.py --multi30k MULTI30K --out OUT --write",
        seeds=BAND_SEEDS,
        wall_seconds=sum(values["wall_seconds"] for values in (*seeds.values(), *defects.values())),
        figures=figures,
        rows=[],
    )
    write_result(arguments.band, result)
    say(make_table(figures))


def make_table(figures: dict[str, Any]) -> str:
    """Make the Markdown table of the bands and the defects, each with its distance from the mean in half widths."""
    titles = [name.replace("_", " ") for name in figures["defects"]]
    rows = []
    for name, (label, _) in FIGURES.items():
        band = Band(**figures["bands"][name])
        cells = [label, f"{band.mean:.3f} ± {band.deviation:.3f}", f"{band.low:.3f} to {band.high:.3f}"]
        cells += [f"{values[name]:.3f} ({band.distance(values[name]):.1f})" for values in figures["defects"].values()]
        rows.append(cells)
    return markdown_table(("figure", "five seeds", "band", *titles), rows)
