"""Adam compared with Muon: recipes are chosen on the validation text, then each trains with every seed."""

import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.charts import race_picture
from benchmarks.measure import Measured, Part, columns, require_known, say, spread
from benchmarks.race.lane import Kind, RaceText, Recipe
from benchmarks.race.race import key_of, note_of, spread_of_times, time_to, train, wall_seconds
from benchmarks.race.toolkits import Ours
from benchmarks.rows import optimizer_rows
from dist_transformer.averaging.mean import average
from dist_transformer.base.files import write_file
from dist_transformer.config.plain import read_json
from dist_transformer.data.folder.format import INDEX_FILE
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.data.text.lines import read_lines
from dist_transformer.runtime.launch import own_command, run_printed

PEAKS: dict[Kind, tuple[float, ...]] = {"adam": (2e-3, 4e-3, 8e-3), "muon": (3e-3, 6e-3, 1.2e-2)}
"""Peaks to choose from, with the first warm-up."""
TUNING_PEAKS = (5e-4, 1e-3, 2e-3, 4e-3)
"""Peaks to choose from, with both optimizers, for a model that is trained further."""
WARM_UPS = (100, 60, 300)
"""Steps of warm-up to choose from, with the best peak."""
GOALS = (20, 25)
"""BLEU scores."""
STAGES = ("multi30k", "two_packs", "variations", "captions", "few", "many", "base_width")
_TUNED = ("few", "many")
_TIMES = {"steps_to_bleu": "step", "cpu_seconds_to_bleu": "cpu_seconds"}
_FEW = 1000
_TEXTS = {"captions": ("captions_en_zh/train", "captions_en_zh/valid", "captions_en_zh/test", "zh")}
_MULTI30K = ("multi30k/train", "multi30k/val", "multi30k/test_2016_flickr", "de")
_VOCABULARIES: dict[str, tuple[object, ...]] = {"captions": ("--vocab-size", 8000, "--normalization", "clean-nfc")}


@dataclass(frozen=True, kw_only=True)
class Tuned(Ours):
    """Our toolkit with the preset `finetune`, which trains a model further."""

    init: Path
    """Model folder."""

    def command(self, recipe: Recipe, lane: Path, *, batch: int) -> list[str]:
        flags = f"""
            --optimizer.kind {recipe.kind} --optimizer.peak-lr {recipe.peak_lr} --seed {recipe.seed}
            --optimizer.warmup-steps {recipe.warmup_steps} --batch.packs-per-step {recipe.packs}
            --max-steps {recipe.steps} --save-every {recipe.every} --keep-weights {recipe.steps}
            --ema-decay 0 --validate-every 0 --patience 0
        """
        files = ("--init-from", self.init, "--data", self.text.data.path, "--run-dir", lane / "run")
        command = [sys.executable, "-m", "dist_transformer", "train", "--preset", "finetune"]
        return [*command, *flags.split(), *map(str, files)]


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerStudy(Part):
    """BLEU by steps and CPU seconds with Adam and with Muon: two corpora, further training, width 512."""

    data: Path
    """Folder of corpora: multi30k, captions_en_zh and mix_en_de."""
    work: Path
    """Folder of the trainings; what is in it is not done again."""
    stages: tuple[str, ...] = STAGES
    """Stages; a call with those that are done reports them while others run."""
    seeds: tuple[int, ...] = (1, 2, 3)
    """Seeds; the first chooses the recipes."""

    def measure(self) -> Measured:
        require_known("--stages", self.stages, STAGES)
        multi30k = self.text("multi30k").data
        figures: dict[str, Any] = {
            "goals": list(GOALS),
            "grid": {kind: [*self.chosen(kind)[1].values()] for kind in PEAKS},
            "stages": {stage: self.stage(stage) for stage in self.stages},
        }
        if self.json is not None and "multi30k" in self.stages:
            drawn = {"goals": GOALS, "toolkits": figures["stages"]["multi30k"]}
            write_file(self.json.with_suffix(".png"), race_picture(drawn, note=note_of(multi30k), by="tokens"))
        rows = optimizer_rows(figures["stages"], [*map(key_of, GOALS)])
        return Measured(
            what="Adam compared with Muon: greedy BLEU of the validation text by the weights that train saves, without "
            "averaging, and BLEU of the test text with beam 4. CPU seconds are those of a training from its start, "
            "beside other work. One seed chooses the peak, then the warm-up, then whether steps of half as many tokens "
            "are better, with twice the steps and warm-up and the peak divided by the root of 2; and the peak of "
            "further training.",
            figures=figures,
            table="\n".join(columns([[text.format(figures=figures) for text in row["cells"]] for row in rows])),
            rows=rows,
            text=multi30k.index,
            seeds=self.seeds,
            wall_seconds=wall_seconds(self.work),
        )

    def stage(self, name: str) -> dict[str, Any]:
        """Train what is missing of a stage, its recipes in turns, and summarise the seeds of each."""
        plans, found = self.plans(name), dict[str, Any]()
        corpus = name if name in (*_TUNED, "captions") else "multi30k"
        if name in _TUNED:
            found["before"] = {**summary([self.lane("general", self.general())]), "label": "before"}
        for recipes in zip(*plans.values(), strict=True):
            for recipe in recipes:
                self.lane(corpus, recipe)
        found |= {label: summary([self.lane(corpus, each) for each in recipes]) for label, recipes in plans.items()}
        if {"adam", "muon"} <= found.keys():
            times = {key: ratios(found["muon"][key], found["adam"][key]) for key in _TIMES}
            found["muon_to_adam"] = {"label": "Muon ÷ Adam", **times}
        return found

    def plans(self, stage: str) -> dict[str, list[Recipe]]:
        """List a stage's trainings by what is compared."""
        adam, muon = (self.chosen(kind, halved=stage != "two_packs")[0] for kind in PEAKS)
        if stage == "variations":
            return {
                "adam, dropout": [replace(adam, dropout=0.05)],
                "muon, dropout": [replace(muon, dropout=0.05)],
                "muon, momentum": [replace(muon, momentum=0.9)],
            }
        if stage == "base_width":
            wide = replace(adam, size=stage, peak_lr=2e-3, warmup_steps=200, packs=2, steps=400, every=50)
            # The lower peak is that of the preset base.
            return {"adam": [wide], "adam, low": [replace(wide, peak_lr=7e-4)], "muon": [replace(wide, kind="muon")]}
        if stage in _TUNED:
            tuned = replace(adam, warmup_steps=50, packs=2 - (stage == "few"), steps=200, every=50)
            tried = {kind: [replace(tuned, kind=kind, peak_lr=peak) for peak in TUNING_PEAKS] for kind in PEAKS}
            return {
                kind: [max(recipes, key=lambda recipe: self.lane(stage, recipe)["points"][-1]["bleu"])]
                for kind, recipes in tried.items()
            }
        return {
            recipe.kind: [replace(scaled(recipe, 1000, 50), seed=seed) for seed in self.seeds]
            for recipe in (adam, muon)
        }

    def chosen(self, kind: Kind, *, halved: bool = True) -> tuple[Recipe, dict[str, Any]]:
        """Choose a recipe by the BLEU of short trainings; also return what was tried, by names.

        Args:
            halved: also try steps of one pack.
        """
        tried: dict[str, Any] = {}

        def best(recipes: Sequence[Recipe]) -> Recipe:
            for recipe in recipes:
                bleu = self.lane("multi30k", recipe)["points"][-1]["bleu"]
                tried[recipe.name] = {"recipe": dataclasses.asdict(recipe), "bleu": bleu}
            return max(recipes, key=lambda recipe: tried[recipe.name]["bleu"])

        fixed: dict[str, Any] = {"size": "tiny", "kind": kind, "seed": self.seeds[0], "steps": 400, "every": 400}
        found = best([Recipe(peak_lr=peak, warmup_steps=WARM_UPS[0], **fixed) for peak in PEAKS[kind]])
        found = best([replace(found, warmup_steps=steps) for steps in WARM_UPS])
        if not halved:
            return found, tried
        half = replace(found, packs=1, peak_lr=round(found.peak_lr / 2**0.5, 5), warmup_steps=2 * found.warmup_steps)
        return best([found, scaled(half, 400, 400)]), tried

    def general(self) -> Recipe:
        """Return the recipe of the model that is trained further."""
        return scaled(self.chosen("adam")[0], 600, 600)

    def general_model(self) -> Path:
        return self.folder("general", self.general()) / "model"

    def folder(self, corpus: str, recipe: Recipe) -> Path:
        return self.work / corpus / recipe.size / recipe.name

    def lane(self, corpus: str, recipe: Recipe) -> dict[str, Any]:
        """Train and score, unless this was done, and return the record."""
        folder = self.folder(corpus, recipe)
        if (folder / "record.json").exists():
            return read_json(folder / "record.json")
        text = self.text(corpus)
        toolkit = Tuned(text=text, init=self.general_model()) if corpus in _TUNED else Ours(text=text)
        peak_mib, readings = train(toolkit, recipe, folder, batch=0)
        saved, tokens, points = toolkit.saved(folder), toolkit.step_tokens(folder), []
        for step, reading in sorted(readings.items()):
            bleu = text.bleu(toolkit.translate(saved[step], recipe, beam=1))
            points.append({"step": step, "tokens": step * tokens, "bleu": bleu, **dataclasses.asdict(reading)})
        sources, references = ([*read_lines(path)] for path in self.sides(corpus)[2])
        average([saved[recipe.steps]], folder / "model")
        test = text.bleu(toolkit.translate_lines(sources, saved[recipe.steps], recipe, beam=4), references)
        record = {"recipe": dataclasses.asdict(recipe), "points": points, "test_bleu": test, "peak_mib": peak_mib}
        write_file(folder / "record.json", json.dumps(record, indent=1) + "\n")
        say(f"{corpus} {recipe.kind} {recipe.name}: BLEU {points[-1]['bleu']:.1f}, test {test:.1f}")
        return record

    def text(self, corpus: str) -> RaceText:
        """Return a corpus, which is prepared if it is not yet."""
        out = self.work / "data" / corpus
        if not (out / INDEX_FILE).exists():
            (source, target), (valid_source, valid_target), _ = self.sides(corpus)
            files = ("--src", source, "--tgt", target, "--valid-src", valid_source, "--valid-tgt", valid_target)
            vocabulary = _VOCABULARIES.get(corpus, ("--vocab-size", 6000))
            if corpus in _TUNED:
                vocabulary = ("--tokenizer", self.text("general").data.path)
            run_printed(own_command("prepare", *files, *vocabulary, "--out", out), output=sys.stderr)
        return RaceText(DataFolder.open(out), self.work / "text")

    def sides(self, corpus: str) -> list[tuple[Path, Path]]:
        """Return the files of training, validation and test text."""
        *names, target = _TEXTS.get(corpus, _MULTI30K)
        train_text, *others = ((self.data / f"{name}.en", self.data / f"{name}.{target}") for name in names)
        if corpus in ("general", "few"):
            train_text = self.drawn(corpus)
        return [train_text, *others]

    def drawn(self, corpus: str) -> tuple[Path, Path]:
        """Write the first pairs of Multi30k, or the pairs of the mix whose source is not in Multi30k."""
        files = self.work / f"{corpus}.en", self.work / f"{corpus}.de"
        if not files[1].exists():
            few, folder = corpus == "few", self.data / ("multi30k" if corpus == "few" else "mix_en_de")
            known = {line for source, _ in self.sides("multi30k") for line in read_lines(source) if not few}
            pairs = zip(read_lines(folder / "train.en"), read_lines(folder / "train.de"), strict=True)
            taken = [pair for pair in pairs if pair[0] not in known][: _FEW if few else None]
            for file, lines in zip(files, zip(*taken, strict=True), strict=True):
                write_file(file, "".join(f"{line}\n" for line in lines))
        return files


def scaled(recipe: Recipe, steps: int, every: int) -> Recipe:
    """Set the steps of a recipe, in steps of two packs."""
    factor = 2 // recipe.packs
    return replace(recipe, steps=factor * steps, every=factor * every)


def summary(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Summarise the trainings of a recipe."""
    points = [record["points"] for record in records]
    times = {
        name: {key_of(goal): spread_of_times([time_to(goal, each, key) for each in points]) for goal in GOALS}
        for name, key in _TIMES.items()
    }
    return {
        "label": records[0]["recipe"]["kind"].capitalize(),
        "recipe": records[0]["recipe"],
        **times,
        **{key: spread(each[-1][key] for each in points) for key in ("cpu_seconds", "bleu")},
        "test_bleu": spread(record["test_bleu"] for record in records),
        "curves": [{key: [point[key] for point in each] for key in points[0][0]} for each in points],
    }


def ratios(times: dict[str, Any], others: dict[str, Any]) -> dict[str, float | None]:
    """Divide medians of times to scores, where both are known."""
    known = {goal for goal in times if times[goal] and others[goal]}
    return {goal: times[goal]["median"] / others[goal]["median"] if goal in known else None for goal in times}
