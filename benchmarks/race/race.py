"""A race of toolkits to BLEU scores: rates are chosen on the validation text, then each trains with every seed."""

import dataclasses
import itertools
import json
import math
import os
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.charts import race_picture
from benchmarks.measure import ROOT, Measured, Part, columns, require_known, say, spread, vector_units
from benchmarks.race.lane import RaceText, Recipe
from benchmarks.race.meter import Reading, run_metered
from benchmarks.race.toolkits import TOOLKITS, Toolkit
from benchmarks.rows import race_rows
from dist_transformer.base.errors import UserError
from dist_transformer.base.files import remove, remove_tree, write_file
from dist_transformer.config.plain import read_json
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.data.loading.loader import open_training_data
from dist_transformer.run.environment import describe_environment

GOALS = (15, 20, 25, 30)
"""BLEU scores."""
_BEAM = 4
# A batch's size is adjusted until a step has the wanted number of real target tokens, to this share.
_PRECISION, _TRIALS = 0.015, 6
_TRIED_STEPS, _COUNTED_STEPS = 100, 200


@dataclass(frozen=True, kw_only=True, slots=True)
class RaceBenchmark(Part):
    """CPU seconds until translations reach a BLEU score, compared with other toolkits."""

    data: Path
    """Data folder."""
    work: Path
    """Folder of the trainings; what is in it is not done again."""
    size: Literal["tiny", "base_width"] = "tiny"
    """Network."""
    toolkits: tuple[str, ...] = tuple(TOOLKITS)
    """Toolkits."""
    pymarian: Path | None = None
    """Marian's program, of the package pymarian."""
    eole: Path | None = None
    """Eole's program."""
    rates: tuple[str, ...] = ("2e-3/100", "2e-3/300", "4e-3/100", "4e-3/300", "8e-3/100")
    """Learning rates to choose from: peak/warm-up."""
    seeds: tuple[int, ...] = (1, 2, 3)
    """Seeds; the first chooses the rates."""
    grid_steps: int = 300
    """Steps of a training that chooses rates."""
    steps: int = 800
    """Steps of each training of the race."""
    every: int = 50
    """Steps between weights that are scored."""

    def measure(self) -> Measured:
        require_known("--toolkits", self.toolkits, TOOLKITS)
        text = RaceText(DataFolder.open(self.data), self.work / "text")
        if not text.valid.exists():
            text.write()
        programs = {"marian": self.pymarian, "eole": self.eole}
        race = Race(self, {name: TOOLKITS[name](text=text, program=programs.get(name)) for name in self.toolkits})
        race.run()
        figures = race.figures()
        if self.json is not None:
            processor = describe_environment()["processor"]
            machine = f"{processor} with {vector_units()}; one thread; {text.data.index.corpus}"
            write_file(self.json.with_suffix(".png"), race_picture(figures, note=machine))
        return Measured(
            what="how long toolkits train until greedy translations of the validation text reach a BLEU score",
            figures=figures,
            table=race_table(figures),
            rows=race_rows(figures, SHOWN_GOALS),
            wall_seconds=sum(found.get("wall_seconds", 0) for found in figures["toolkits"].values()),
            text=text.data.index,
            seeds=self.seeds,
        )


@dataclass(frozen=True, slots=True)
class Race:
    settings: RaceBenchmark
    toolkits: Mapping[str, Toolkit]

    def run(self) -> None:
        """Train what is missing, one lane after the other."""
        for name, toolkit in self.toolkits.items():
            failure = self.folder(name) / "failure.json"
            failure.parent.mkdir(parents=True, exist_ok=True)
            remove(failure)
            try:
                toolkit.setup()
                for recipe in self.grid():
                    self.lane(name, recipe)
                for recipe in self.ranked(name):
                    for lane in self.lanes_of(recipe):
                        self.lane(name, lane)
                    if self.trains(name, recipe):
                        break
            except UserError as error:
                write_file(failure, json.dumps(str(error)))
                say(f"{name}: {error}")

    def folder(self, name: str) -> Path:
        return self.settings.work / self.settings.size / name

    def grid(self) -> list[Recipe]:
        settings, recipes = self.settings, []
        for peak, warm_up in (rate.split("/") for rate in settings.rates):
            recipe = Recipe(
                size=settings.size,
                peak_lr=float(peak),
                warmup_steps=int(warm_up),
                seed=settings.seeds[0],
                steps=settings.grid_steps,
                every=settings.every,
            )
            recipes.append(recipe)
        return recipes

    def ranked(self, name: str) -> list[Recipe]:
        """Sort the recipes of the grid by the scores of their last weights, best first."""
        return sorted(self.grid(), key=lambda recipe: self.record(name, recipe)["points"][-1]["bleu"], reverse=True)

    def lanes_of(self, recipe: Recipe) -> list[Recipe]:
        """Return a recipe of the grid with all seeds and steps of the race."""
        return [dataclasses.replace(recipe, seed=seed, steps=self.settings.steps) for seed in self.settings.seeds]

    def trains(self, name: str, recipe: Recipe) -> bool:
        """Decide whether a recipe was trained with all seeds, and reached the lowest goal with each."""
        lanes = self.lanes_of(recipe)
        return all((self.folder(name) / lane.name / "record.json").exists() for lane in lanes) and all(
            time_to(GOALS[0], self.record(name, lane)["points"]) is not None for lane in lanes
        )

    def chosen(self, name: str) -> Recipe:
        """Return the best recipe of the grid that trains with all seeds, or else the best."""
        ranked = self.ranked(name)
        return next((recipe for recipe in ranked if self.trains(name, recipe)), ranked[0])

    def failed(self, name: str) -> list[str]:
        """List the better recipes that did not train with all seeds."""
        ranked = self.ranked(name)
        return [recipe.name for recipe in ranked[: ranked.index(self.chosen(name))]]

    def record(self, name: str, recipe: Recipe) -> dict[str, Any]:
        return read_json(self.folder(name) / recipe.name / "record.json")

    def lane(self, name: str, recipe: Recipe) -> None:
        """Train and score, unless this was done."""
        toolkit, folder = self.toolkits[name], self.folder(name) / recipe.name
        if (folder / "record.json").exists():
            return
        batch = self.batch(name, recipe)
        peak_mib, readings = train(toolkit, recipe, folder, batch=batch)
        saved, points = toolkit.saved(folder), []
        for step, reading in sorted(readings.items()):
            bleu = toolkit.text.bleu(toolkit.translate(saved[step], recipe, beam=1))
            points.append({"step": step, "bleu": bleu, **dataclasses.asdict(reading)})
        record = {
            "recipe": dataclasses.asdict(recipe),
            "batch": batch,
            "step_tokens": toolkit.step_tokens(folder),
            "points": points,
            "bleu_of_beam": toolkit.text.bleu(toolkit.translate(saved[recipe.steps], recipe, beam=_BEAM)),
            "peak_mib": peak_mib,
        }
        write_file(folder / "record.json", json.dumps(record, indent=1) + "\n")
        last = points[-1]
        say(f"{name} {recipe.name}: BLEU {last['bleu']:.1f} after {last['cpu_seconds']:.0f} CPU seconds")

    def batch(self, name: str, recipe: Recipe) -> int:
        """Find the size of a batch with as many real target tokens per step as ours, by short trainings of little."""
        file = self.folder(name) / "batch.json"
        if file.exists():
            return int(json.loads(file.read_text()))
        toolkit = self.toolkits[name]
        wanted = our_step_tokens(toolkit.text.data.path, recipe)
        size = round(wanted)
        for _ in range(_TRIALS if toolkit.pads else 0):
            trial = dataclasses.replace(recipe, size="trial", steps=_TRIED_STEPS, every=_TRIED_STEPS)
            folder = self.folder(name) / "trial"
            train(toolkit, trial, folder, batch=size)
            ratio = toolkit.step_tokens(folder) / wanted
            say(f"{name}: batches of {size} have {ratio:.3f} times our tokens")
            if abs(ratio - 1) < _PRECISION:
                break
            size = round(size / ratio)
        write_file(file, json.dumps(size))
        return size

    def figures(self) -> dict[str, Any]:
        """Collect what is done."""
        return {
            "size": self.settings.size,
            "steps": self.settings.steps,
            "unit": "CPU seconds of all processes, start-up included",
            "goals": list(GOALS),
            "toolkits": {name: self._figures_of(name) for name in self.toolkits},
        }

    def _figures_of(self, name: str) -> dict[str, Any]:
        failure = self.folder(name) / "failure.json"
        if failure.exists():
            return {"label": self.toolkits[name].label, "failure": json.loads(failure.read_text())}
        records = [self.record(name, lane) for lane in self.lanes_of(self.chosen(name))]
        grid = [self.record(name, recipe) for recipe in self.grid()]
        return {
            "label": self.toolkits[name].label,
            "recipe": records[0]["recipe"],
            "better_in_the_grid_but_failed_with_some_seed": self.failed(name),
            "grid": [
                {
                    "peak_lr": record["recipe"]["peak_lr"],
                    "warmup_steps": record["recipe"]["warmup_steps"],
                    "bleu": record["points"][-1]["bleu"],
                }
                for record in grid
            ],
            "cpu_seconds_to_bleu": {
                key_of(goal): spread_of_times([time_to(goal, record["points"]) for record in records]) for goal in GOALS
            },
            "tokens_per_cpu_second": spread(map(rate_of, records)),
            "step_tokens": statistics.mean(record["step_tokens"] for record in records),
            "end": {
                key: statistics.median(record["points"][-1][key] for record in records)
                for key in ("cpu_seconds", "bleu")
            },
            "bleu_of_beam": spread(record["bleu_of_beam"] for record in records),
            "peak_mib": max(record["peak_mib"] for record in records),
            "wall_seconds": sum(record["points"][-1]["wall_seconds"] for record in (*grid, *records)),
            "curves": [
                {key: [point[key] for point in record["points"]] for key in ("step", "cpu_seconds", "bleu")}
                for record in records
            ],
        }


def train(toolkit: Toolkit, recipe: Recipe, folder: Path, *, batch: int) -> tuple[float, dict[int, Reading]]:
    """Train a lane from its start, on one thread; return its peak MiB, and its time to each weights by step."""
    remove_tree(folder)
    folder.mkdir(parents=True)
    readings: dict[int, Reading] = {}

    def watch(read: Callable[[], Reading]) -> None:
        if new := toolkit.saved(folder).keys() - readings.keys():
            readings.update(dict.fromkeys(new, read()))

    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    command = toolkit.command(recipe, folder, batch=batch)
    _, peak_mib = run_metered(command, log=folder / "log", environment=environment, watch=watch)
    if recipe.steps not in readings:
        raise UserError(f"{toolkit.label} ended without weights of step {recipe.steps}: see {folder / 'log'}")
    return peak_mib, readings


def our_step_tokens(data: Path, recipe: Recipe) -> float:
    """Return the mean number of target tokens of a step of ours."""
    config = recipe.config(data, Path("unused"))
    training = open_training_data(config.corpora, config.batch, seed=config.seed)
    steps = training.plan.steps(training.plan.start(), config.batch.packs_per_step)
    return statistics.mean(step.target_tokens for step in itertools.islice(steps, _COUNTED_STEPS))


def key_of(goal: int) -> str:
    """Return a key that a row's text can name; it would take digits alone for a place in a list."""
    return f"bleu_{goal}"


SHOWN_GOALS = tuple(map(key_of, GOALS[:3]))
"""Keys of the scores in the table of docs/benchmarks.md."""


def spread_of_times(values: list[float | None]) -> dict[str, Any] | None:
    """Summarise values of all seeds, where None is later than all others; return None if the median is.

    A value that is not known is null in the result.
    """
    found = spread(math.inf if value is None else value for value in values)
    if math.isinf(found["median"]):
        return None
    return {**found, "highest": None if None in values else found["highest"], "values": values}


def time_to(goal: float, points: list[dict[str, Any]]) -> float | None:
    """Return the CPU seconds to a score, on a line between the first weights that have it and those before."""
    before = {"cpu_seconds": 0.0, "bleu": 0.0}
    for point in points:
        if point["bleu"] >= goal:
            share = (goal - before["bleu"]) / (point["bleu"] - before["bleu"])
            return float(before["cpu_seconds"] + share * (point["cpu_seconds"] - before["cpu_seconds"]))
        before = point
    return None


def rate_of(record: dict[str, Any]) -> float:
    """Return the real target tokens per CPU second between the first and the last weights."""
    first, last = record["points"][0], record["points"][-1]
    seconds = last["cpu_seconds"] - first["cpu_seconds"]
    return float(record["step_tokens"] * (last["step"] - first["step"]) / seconds)


def race_table(figures: dict[str, Any]) -> str:
    heads = ("CPU seconds to BLEU", *map(str, GOALS), "tokens per CPU second", "last BLEU, beam 4", "MiB")
    return "\n".join(columns([heads, *map(_cells, figures["toolkits"].values())]))


def _cells(found: dict[str, Any]) -> tuple[str, ...]:
    if "failure" in found:
        return (found["label"], *("–" for _ in GOALS), "–", "–", "–")
    times = found["cpu_seconds_to_bleu"]
    return (
        found["label"],
        *(f"{times[key_of(goal)]['median']:,.0f}" if times[key_of(goal)] else "–" for goal in GOALS),
        f"{found['tokens_per_cpu_second']['median']:,.0f}",
        f"{found['bleu_of_beam']['median']:.1f}",
        f"{found['peak_mib']:,.0f}",
    )
