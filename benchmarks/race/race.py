"""A race of toolkits to BLEU scores: rates are chosen on the validation text, then each trains with every seed."""

import dataclasses
import itertools
import json
import math
import os
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from benchmarks.charts import race_picture
from benchmarks.measure import ALLOCATOR, ROOT, Measured, Part, columns, processor_name, require_known, say, spread
from benchmarks.race.lane import Kind, RaceText, Recipe
from benchmarks.race.meter import Reading, run_metered
from benchmarks.race.toolkits import TOOLKITS, Toolkit
from benchmarks.rows import race_rows
from dist_transformer.base.errors import UserError
from dist_transformer.base.files import remove, remove_tree, write_file
from dist_transformer.config.plain import read_json
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.data.loading.loader import open_training_data

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
    rates: tuple[str, ...] = ("2e-3/100", "2e-3/300", "3e-3/200", "4e-3/100", "4e-3/300", "8e-3/100")
    """Learning rates to choose from, with each optimizer of a toolkit: peak/warm-up."""
    alike: str = "3e-3/200"
    """Rate with which all toolkits train by Adam, besides their best recipes."""
    seeds: tuple[int, ...] = (1, 2, 3)
    """Seeds; the first chooses the rates."""
    grid_steps: int = 400
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
            best = {name: figures["toolkits"][name] for name in self.toolkits}
            picture = race_picture({**figures, "toolkits": best}, note=note_of(text.data))
            write_file(self.json.with_suffix(".png"), picture)
        return Measured(
            what="how long toolkits train until greedy translations of the validation text reach a BLEU score",
            figures=figures,
            table=race_table(figures),
            rows=race_rows(figures, SHOWN_GOALS),
            wall_seconds=wall_seconds(self.work),
            text=text.data.index,
            seeds=self.seeds,
        )


@dataclass(frozen=True, slots=True)
class Race:
    settings: RaceBenchmark
    toolkits: Mapping[str, Toolkit]

    def run(self) -> None:
        """Train what is missing. Toolkits alternate, so that what slows the machine for a while slows all of them."""
        for name, toolkit in self.toolkits.items():
            self.failure(name).parent.mkdir(parents=True, exist_ok=True)
            remove(self.failure(name))
            self.attempt(name, toolkit.setup)
        self.alternate({name: self.grid(name) for name in self.toolkits})
        self.alternate({name: self.lanes_of(self.alike()) for name in self.toolkits})
        while waiting := [name for name in self.running() if not self.raced(name, self.chosen(name))]:
            self.alternate({name: self.lanes_of(self.chosen(name)) for name in waiting})

    def attempt(self, name: str, act: Callable[[], object]) -> None:
        """Do something with a toolkit, which leaves the race if it fails."""
        try:
            act()
        except UserError as error:
            write_file(self.failure(name), json.dumps(str(error)))
            say(f"{name}: {error}")

    def alternate(self, lanes: Mapping[str, list[Recipe]]) -> None:
        """Train the first lane of each toolkit, then the second of each, and so on."""
        for recipes in itertools.zip_longest(*lanes.values()):
            for name, recipe in zip(lanes, recipes, strict=True):
                if recipe is not None and name in self.running():
                    self.attempt(name, partial(self.lane, name, recipe))

    def running(self) -> list[str]:
        """List the toolkits that have not failed."""
        return [name for name in self.toolkits if not self.failure(name).exists()]

    def failure(self, name: str) -> Path:
        """Return the file that says why a toolkit failed, if it did."""
        return self.folder(name) / "failure.json"

    def folder(self, name: str) -> Path:
        return self.settings.work / self.settings.size / name

    def grid(self, name: str) -> list[Recipe]:
        """List the recipes to choose from."""
        return [self.recipe(rate, kind) for kind in self.toolkits[name].kinds for rate in self.settings.rates]

    def alike(self) -> Recipe:
        """Return the recipe that all toolkits train with."""
        return self.recipe(self.settings.alike, "adam")

    def recipe(self, rate: str, kind: Kind) -> Recipe:
        peak, warm_up = rate.split("/")
        return Recipe(
            size=self.settings.size,
            kind=kind,
            peak_lr=float(peak),
            warmup_steps=int(warm_up),
            seed=self.settings.seeds[0],
            steps=self.settings.grid_steps,
            every=self.settings.every,
        )

    def ranked(self, name: str) -> list[Recipe]:
        """Sort the recipes of the grid by the scores of their last weights, best first."""
        return sorted(self.grid(name), key=lambda recipe: self.record(name, recipe)["points"][-1]["bleu"], reverse=True)

    def lanes_of(self, recipe: Recipe) -> list[Recipe]:
        """Return a recipe of the grid with all seeds and steps of the race."""
        return [dataclasses.replace(recipe, seed=seed, steps=self.settings.steps) for seed in self.settings.seeds]

    def raced(self, name: str, recipe: Recipe) -> bool:
        return all((self.folder(name) / lane.name / "record.json").exists() for lane in self.lanes_of(recipe))

    def fails(self, name: str, recipe: Recipe) -> bool:
        """Decide whether a recipe has raced, and did not reach the lowest goal with some seed."""
        return self.raced(name, recipe) and any(
            time_to(GOALS[0], self.record(name, lane)["points"]) is None for lane in self.lanes_of(recipe)
        )

    def chosen(self, name: str) -> Recipe:
        """Return the best recipe of the grid of which no seed has failed, or else the best."""
        ranked = self.ranked(name)
        return next((recipe for recipe in ranked if not self.fails(name, recipe)), ranked[0])

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
        """Collect what is done: for each toolkit its best recipe, and the one of all."""
        found: dict[str, Any] = {}
        for name, toolkit in self.toolkits.items():
            if self.failure(name).exists():
                found[name] = {"label": toolkit.label, "failure": json.loads(self.failure(name).read_text())}
                continue
            grid = [self.record(name, recipe) for recipe in self.grid(name)]
            found[name] = {
                **self._figures_of(name, self.chosen(name)),
                "better_in_the_grid_but_failed_with_some_seed": self.failed(name),
                "grid": [{**record["recipe"], "bleu": record["points"][-1]["bleu"]} for record in grid],
            }
            found[f"{name}_alike"] = self._figures_of(name, self.alike())
            found[f"{name}_alike"]["label"] += ", the recipe of all"
        return {
            "size": self.settings.size,
            "steps": self.settings.steps,
            "unit": "CPU seconds of all processes, start-up included",
            "goals": list(GOALS),
            "toolkits": found,
        }

    def _figures_of(self, name: str, recipe: Recipe) -> dict[str, Any]:
        records = [self.record(name, lane) for lane in self.lanes_of(recipe)]
        return {
            "label": self.toolkits[name].label + (", Muon" if recipe.kind == "muon" else ""),
            "recipe": records[0]["recipe"],
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

    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    environment = {**os.environ, **ALLOCATOR, **threads, "PYTHONPATH": str(ROOT)}
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


def note_of(data: DataFolder) -> str:
    """Describe what a picture was measured with."""
    return f"{processor_name()}; one thread; {data.index.corpus}"


def wall_seconds(work: Path) -> float:
    """Return the time of all trainings in a folder, without that of their scores."""
    return sum(float(read_json(file)["points"][-1]["wall_seconds"]) for file in work.rglob("record.json"))


def key_of(goal: int) -> str:
    """Return a key that a row's text can name; it would take digits alone for a place in a list."""
    return f"bleu_{goal}"


SHOWN_GOALS = tuple(map(key_of, GOALS[:3]))
"""Keys of the scores in the table of docs/race.md."""


def spread_of_times(values: list[float | None]) -> dict[str, Any] | None:
    """Summarise values of all seeds, where None is later than all others; return None if the median is.

    A value that is not known is null in the result.
    """
    found = spread(math.inf if value is None else value for value in values)
    if math.isinf(found["median"]):
        return None
    return {**found, "highest": None if None in values else found["highest"], "values": values}


def time_to(goal: float, points: list[dict[str, Any]], key: str = "cpu_seconds") -> float | None:
    """Return the CPU seconds to a score, on a line between the first weights that have it and those before.

    Args:
        key: what is counted instead, such as `step`.
    """
    before = {key: 0.0, "bleu": 0.0}
    for point in points:
        if point["bleu"] >= goal:
            share = (goal - before["bleu"]) / (point["bleu"] - before["bleu"])
            return float(before[key] + share * (point[key] - before[key]))
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
