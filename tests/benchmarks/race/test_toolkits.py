"""Commands of each toolkit, and the files that it leaves."""

import dataclasses
import itertools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import MarianMTModel

from benchmarks.race.lane import RaceText, Recipe
from benchmarks.race.toolkits import Eole, HuggingFace, Marian, Ours
from dist_transformer.config.flags import parse_training
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.export.marian import marian_model
from dist_transformer.model.transformer import Transformer

pytestmark = pytest.mark.slice(name="benchmarks")

RECIPE = Recipe(size="tiny", peak_lr=2e-3, warmup_steps=300, seed=7, steps=800, every=50)


@pytest.fixture
def text(toy_data: DataFolder, tmp_path: Path) -> RaceText:
    (tmp_path / "text").mkdir()
    return RaceText(toy_data, tmp_path / "text")


def test_others_are_told_the_same(text: RaceText, tmp_path: Path) -> None:
    command = Marian(text=text, program=tmp_path).command(RECIPE, tmp_path, batch=1999)
    told = dict(itertools.pairwise(command))
    flags = ("--learn-rate", "--lr-warmup", "--lr-decay-inv-sqrt", "--mini-batch-words", "--seed", "--after")
    assert [told[flag] for flag in flags] == ["0.002", "300", "300", "1999", "7", "800u"]
    command = Eole(text=text, program=tmp_path).command(RECIPE, tmp_path, batch=1999)
    training = json.loads(Path(command[-1]).read_text())["training"]
    # Its noam: rate · width^-0.5 · min(step^-0.5, step · warmup^-1.5), which is highest at the warm-up's end.
    highest = training["learning_rate"] * 128**-0.5 * min(300**-0.5, 300 * 300**-1.5)
    assert highest == pytest.approx(2e-3)
    assert (training["batch_size"], training["warmup_steps"], training["train_steps"]) == (1999, 300, 800)


def test_ours_is_told_its_optimizer(text: RaceText, tmp_path: Path) -> None:
    """Only what differs from `base` is in the file, and `train` accepts it."""
    recipe = dataclasses.replace(RECIPE, kind="muon", momentum=0.9, packs=1, dropout=0.05)
    assert recipe.name == "0.002-300-7-800-kind-muon-momentum-0.9-packs-1-dropout-0.05"
    command = Ours(text=text).command(recipe, tmp_path, batch=0)
    config = parse_training(command[command.index("train") + 1 :])[0]
    optimizer = config.optimizer
    assert (optimizer.kind, optimizer.momentum, optimizer.peak_lr, optimizer.warmup_steps) == ("muon", 0.9, 2e-3, 300)
    assert (config.batch.packs_per_step, config.model.dropout, config.seed, config.max_steps) == (1, 0.05, 7, 800)


def test_weights_of_hugging_face_are_read_as_our_network(text: RaceText, tmp_path: Path) -> None:
    torch.manual_seed(1)
    config = RECIPE.model(text.data.index.vocab_size)
    theirs = MarianMTModel(marian_model(Transformer(config)).config).eval()
    file = tmp_path / "step-1.safetensors"
    save_file({name: tensor.clone() for name, tensor in theirs.state_dict().items()}, file)
    ours = HuggingFace(text=text).read(file, config)
    back = marian_model(ours).state_dict()
    assert all(torch.equal(tensor, back[name]) for name, tensor in theirs.state_dict().items())
