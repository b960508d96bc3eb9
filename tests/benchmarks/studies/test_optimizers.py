"""tools/benchmark.py optimizers: its choices and ratios, by hand, and the texts and commands of its trainings."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from benchmarks.race.lane import RaceText, Recipe
from benchmarks.studies.optimizers import OptimizerStudy, Tuned
from dist_transformer.config.flags import parse_training
from dist_transformer.config.presets import PRESETS
from dist_transformer.data.folder.reader import DataFolder

pytestmark = pytest.mark.slice(name="benchmarks")


def study(tmp_path: Path, **settings: Any) -> OptimizerStudy:
    return OptimizerStudy(data=tmp_path / "texts", work=tmp_path / "work", **settings)


def test_the_best_recipes_train_with_every_seed_and_are_compared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """BLEU is best at Adam's lowest peak, at Muon's highest, with the longest warm-up, and for Muon with one pack."""
    order = list[tuple[str, str]]()

    def lane(self: OptimizerStudy, corpus: str, recipe: Recipe) -> dict[str, Any]:
        is_muon = recipe.kind == "muon"
        if recipe.steps >= 1000:
            order.append((recipe.kind, recipe.name))
        # A score of 20 after 40% of the steps, and of 30 after 60%.
        bleu = 30 + recipe.warmup_steps / 100 + (100 if is_muon else -100) * recipe.peak_lr
        bleu += 5 * (recipe.packs == 1) if is_muon else -5 * (recipe.packs == 1)
        seconds = recipe.steps * recipe.packs * (0.15 if is_muon else 0.2) + recipe.seed
        shares, scores = (0.2, 0.4, 0.6, 1.0), (10, 20, 30, bleu)
        points = [
            {"step": share * recipe.steps, "cpu_seconds": share * seconds, "tokens": share, "bleu": score}
            for share, score in zip(shares, scores, strict=True)
        ]
        return {"recipe": dataclasses.asdict(recipe), "points": points, "test_bleu": bleu + recipe.seed}

    monkeypatch.setattr(OptimizerStudy, "lane", lane)
    found = study(tmp_path).stage("multi30k")
    adam, muon = ("0.002-300-{}-1000", "0.00849-600-{}-2000-kind-muon-packs-1")
    assert order[:6] == [
        (kind, name.format(seed)) for seed in (1, 2, 3) for kind, name in (("adam", adam), ("muon", muon))
    ]
    assert found["adam"]["steps_to_bleu"]["bleu_20"]["median"] == pytest.approx(400)
    # Half of the way from 20 to 30.
    assert found["muon"]["steps_to_bleu"]["bleu_25"]["median"] == pytest.approx(1000)
    assert found["adam"]["cpu_seconds_to_bleu"]["bleu_25"]["values"] == pytest.approx([200.5, 201, 201.5])
    ratios = found["muon_to_adam"]["cpu_seconds_to_bleu"]
    assert ratios == pytest.approx({"bleu_20": 302 / 402, "bleu_25": 302 / 402})
    assert [len(each) for each in study(tmp_path).plans("variations").values()] == [1, 1, 1]
    chosen = {
        stage: [recipes[0].name for recipes in study(tmp_path).plans(stage).values()] for stage in ("two_packs", "few")
    }
    assert chosen == {
        "two_packs": ["0.002-300-1-1000", "0.012-300-1-1000-kind-muon"],
        "few": ["0.0005-50-1-200-packs-1", "0.004-50-1-200-kind-muon-packs-1"],
    }


def test_the_model_that_is_trained_further_knows_no_line_of_the_new_text(tmp_path: Path) -> None:
    texts = {
        "multi30k/train": "a b c",
        "multi30k/val": "d",
        "multi30k/test_2016_flickr": "e",
        "mix_en_de/train": "x a e y d",
    }
    for name, words in texts.items():
        for side in ("en", "de"):
            file = tmp_path / "texts" / f"{name}.{side}"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("".join(f"{word if side == 'en' else word.upper()}\n" for word in words.split()))
    (tmp_path / "work").mkdir()
    found = {corpus: [file.read_text() for file in study(tmp_path).drawn(corpus)] for corpus in ("general", "few")}
    assert found == {"general": ["x\ny\n", "X\nY\n"], "few": ["a\nb\nc\n", "A\nB\nC\n"]}


def test_further_training_is_the_preset_with_the_recipe(toy_data: DataFolder, tmp_path: Path) -> None:
    recipe = Recipe(size="tiny", kind="muon", peak_lr=5e-4, warmup_steps=50, seed=3, steps=200, every=50, packs=1)
    toolkit = Tuned(text=RaceText(toy_data, tmp_path), init=tmp_path / "model")
    command = toolkit.command(recipe, tmp_path / "lane", batch=0)
    config = parse_training(command[command.index("train") + 1 :])[0]
    preset = PRESETS["finetune"]
    optimizer = dataclasses.replace(preset.optimizer, kind="muon", peak_lr=5e-4, warmup_steps=50)
    assert config.optimizer == optimizer
    assert config.batch == dataclasses.replace(preset.batch, packs_per_step=1)
    assert (config.seed, config.max_steps, config.checkpoints.init_from) == (3, 200, tmp_path / "model")
