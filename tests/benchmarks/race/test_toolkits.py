"""Commands of each toolkit, and the files that it leaves."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import MarianMTModel

from benchmarks.race.lane import SIZES, Recipe
from benchmarks.race.text import RaceText
from benchmarks.race.toolkits import CompiledHuggingFace, Eole, HuggingFace, Marian, Ours
from dist_transformer.config.flags import parse_training
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.export.marian import marian_model
from dist_transformer.model.transformer import Transformer

RECIPE = Recipe(size="tiny", peak_lr=2e-3, warmup_steps=300, seed=7, steps=800, every=50)


@pytest.fixture
def text(toy_data: DataFolder, tmp_path: Path) -> RaceText:
    (tmp_path / "text").mkdir()
    return RaceText(toy_data, tmp_path / "text")


def test_ours_takes_the_recipe(text: RaceText, tmp_path: Path) -> None:
    command = Ours(text=text).command(RECIPE, tmp_path, batch=1)
    config, _ = parse_training(command[4:], prog="train")
    assert config == RECIPE.config(text.data.path, tmp_path / "run")
    assert (config.model, config.optimizer.peak_lr, config.seed) == (SIZES["tiny"], 2e-3, 7)


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


def test_tokens_are_read_from_their_logs(text: RaceText, tmp_path: Path) -> None:
    (tmp_path / "log").write_text(
        "[2026-11-27 13:39:37] Ep. 1 : Up. 10 : Sen. 1,177 : Cost 9.07 : Time 2.00s : 10000.00 words/s : gNorm 2.5\n"
        "[2026-11-27 13:39:52] Ep. 1 : Up. 1,020 : Sen. 2,693 : Cost 8.31 : Time 4.00s : 502000.00 words/s : gNorm 2\n"
    )
    assert Marian(text=text).step_tokens(tmp_path) == (20_000 + 2_008_000) / 1020
    (tmp_path / "log").write_text(
        "INFO] Step  5/   10; acc: 0.0; sents:     722; bsz: 1741/1885/144; 212/230 tok/s;     41 sec;\n"
        "INFO] Step 10/   10; acc: 0.4; sents:     530; bsz: 1642/1919/106; 1438/1682 tok/s;     47 sec;\n"
    )
    assert Eole(text=text).step_tokens(tmp_path) == 1902


def test_only_finished_weights_of_a_step_are_found(text: RaceText, tmp_path: Path) -> None:
    for name in ("model.iter50.npz", "model.npz", "model.iter50.npz.decoder.yml", "model/step_7/model.00.safetensors"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert Marian(text=text).saved(tmp_path) == {50: tmp_path / "model.iter50.npz"}
    assert Eole(text=text).saved(tmp_path) == {7: tmp_path / "model/step_7/model.00.safetensors"}
    assert HuggingFace(text=text).saved(tmp_path) == CompiledHuggingFace(text=text).saved(tmp_path) == {}


def test_weights_of_hugging_face_are_read_as_our_network(text: RaceText, tmp_path: Path) -> None:
    torch.manual_seed(1)
    config = RECIPE.model(text.data.index.vocab_size)
    theirs = MarianMTModel(marian_model(Transformer(config)).config).eval()
    file = tmp_path / "step-1.safetensors"
    save_file({name: tensor.clone() for name, tensor in theirs.state_dict().items()}, file)
    ours = HuggingFace(text=text).read(file, config)
    back = marian_model(ours).state_dict()
    assert all(torch.equal(tensor, back[name]) for name, tensor in theirs.state_dict().items())
