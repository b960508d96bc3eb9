"""Models from which a run may begin, in one process: no engine."""

import copy
import dataclasses
import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_transformer.base.errors import UserError
from dist_transformer.config.presets import PRESETS
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.data.vocabulary.byte_bpe import learn_byte_bpe
from dist_transformer.data.vocabulary.kinds import wrap_pair
from dist_transformer.data.vocabulary.tokenizer import Tokenizer
from dist_transformer.model.transformer import Transformer
from dist_transformer.model_folder import ModelInfo, write_model_folder
from dist_transformer.preflight.dry_run import run_dry_run
from dist_transformer.run.warm_start import InitialWeights, read_initial_weights
from dist_transformer.runtime.world import World
from tests.support.damage import flip

Read = Callable[..., InitialWeights]


@pytest.fixture
def read(model_folder: Path, toy_tokenizer: Tokenizer, random_model: Transformer) -> Read:
    """Read the folder of the random model, or another one, for a run that differs by some settings."""

    def read(path: Path = model_folder, tokenizer: Tokenizer = toy_tokenizer, **changes: Any) -> InitialWeights:
        config = dataclasses.replace(random_model.config, **changes)
        return read_initial_weights(path, config, tokenizer, vocabulary="same")

    return read


def test_the_weights_are_those_of_the_folder(read: Read, model_folder: Path, random_model: Transformer) -> None:
    initial = read()
    assert initial.sha256 == hashlib.sha256((model_folder / "model.safetensors").read_bytes()).hexdigest()
    model = Transformer(random_model.config)
    initial.put_into(model)
    for name, parameter in random_model.named_parameters():
        assert torch.equal(model.get_parameter(name), parameter)


def test_dropout_and_length_may_differ(read: Read) -> None:
    free = {"dropout": 0.4, "attention_dropout": 0.1, "ffn_dropout": 0.2, "embedding_init": "xavier"}
    assert read(**free, max_positions=500).rows is None


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"width": 32, "head_width": 8}, "model.width = 16, not 32; model.head_width = None, not 8"),
        ({"heads": 4}, "model.heads = 2, not 4"),
        ({"decoder_layers": 3}, "model.decoder_layers = 1, not 3"),
        ({"norm": "pre"}, "model.norm = 'post', not 'pre'"),
        ({"positions": "learned"}, "model.positions = 'sinusoidal', not 'learned'"),
        ({"tie_embeddings": "all"}, "model.tie_embeddings = 'none', not 'all'"),
        # Learned positions must be as many as the run has.
        (
            {"positions": "learned", "max_positions": 161},
            "model.positions = 'sinusoidal', not 'learned'; model.max_positions = 160, not 161",
        ),
    ],
)
def test_another_network_is_refused_by_the_fields(
    read: Read, model_folder: Path, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(UserError) as refused:
        read(**changes)
    remedy = "leave these settings out, because the model sets them, or leave --init-from out"
    assert str(refused.value) == f"--init-from {model_folder} has {named}: {remedy}"


@pytest.fixture
def other_tokenizer() -> Tokenizer:
    """A tokenizer with all bytes, like `toy_tokenizer`; its merges are of other words, except for `the`."""
    return learn_byte_bpe(["the quick brown fox jumps"] * 3 + ["a zebra, the zoo"] * 3, vocab_size=300)


def test_another_vocabulary_is_refused_with_the_command(
    read: Read, model_folder: Path, other_tokenizer: Tokenizer
) -> None:
    with pytest.raises(UserError) as refused:
        read(tokenizer=other_tokenizer)
    assert f"dist-transformer prepare --tokenizer {model_folder / 'tokenizer.json'}, copy" in str(refused.value)
    assert "--init-vocabulary shared_pieces, or leave --init-from out" in str(refused.value)


def test_pieces_of_both_vocabularies_keep_their_vectors(
    model_folder: Path, random_model: Transformer, toy_tokenizer: Tokenizer, other_tokenizer: Tokenizer
) -> None:
    config = dataclasses.replace(random_model.config, vocab_size=other_tokenizer.vocab_size)
    initial = read_initial_weights(model_folder, config, other_tokenizer, vocabulary="shared_pieces")
    torch.manual_seed(5)
    drawn = Transformer(config)
    model = copy.deepcopy(drawn)
    initial.put_into(model)
    # By the files themselves: piece to id.
    own, theirs = (json.loads(one._backend.to_str())["model"]["vocab"] for one in (other_tokenizer, toy_tokenizer))
    shared, new = own.keys() & theirs.keys(), own.keys() - theirs.keys()
    assert {"the", "<pad>", "</s>"} <= {piece.removeprefix("Ġ") for piece in shared}
    assert len(shared) > 256
    assert new
    assert f"{len(shared)} of {len(own)} pieces are in its vocabulary of {len(theirs)}" in initial.note
    assert f"{len(new)} are drawn from the seed" in initial.note
    expected = dict(random_model.named_parameters())
    for name, parameter in model.named_parameters():
        if name not in ("embedding", "target_embedding", "output_projection"):
            assert torch.equal(parameter, expected[name])
            continue
        for piece, i in own.items():
            origin = expected[name][theirs[piece]] if piece in shared else dict(drawn.named_parameters())[name][i]
            assert torch.equal(parameter[i], origin), (name, piece)


@pytest.mark.parametrize("ties", ["target", "none"])
def test_pieces_of_each_side_keep_their_vectors(
    ties: Any, toy_tokenizer: Tokenizer, other_tokenizer: Tokenizer, model_info: ModelInfo, tmp_path: Path
) -> None:
    """One vocabulary, whose matrix is that of all uses, becomes two."""
    torch.manual_seed(6)
    theirs = Transformer(dataclasses.replace(model_info.model, tie_embeddings="all"))
    info = dataclasses.replace(model_info, model=theirs.config)
    weights = {name: parameter.detach() for name, parameter in theirs.named_parameters()}
    write_model_folder(tmp_path / "model", info=info, weights=weights, tokenizer_json=toy_tokenizer.content)
    pair = wrap_pair(other_tokenizer, toy_tokenizer)
    config = dataclasses.replace(theirs.config, tie_embeddings=ties).for_vocabularies(*pair.sizes)
    initial = read_initial_weights(tmp_path / "model", config, pair, vocabulary="shared_pieces")
    assert initial.note.startswith("sources: ")
    assert f"targets: {toy_tokenizer.vocab_size} of {toy_tokenizer.vocab_size} pieces" in initial.note
    model = Transformer(config)
    drawn = model.embedding.detach().clone()
    initial.put_into(model)
    for name in ("target_embedding", *(["output_projection"] if ties == "none" else [])):
        assert torch.equal(model.get_parameter(name), theirs.embedding), name
    places = {piece: i for i, piece in enumerate(toy_tokenizer.pieces)}
    assert set(other_tokenizer.pieces) - set(places)
    for i, piece in enumerate(other_tokenizer.pieces):
        assert torch.equal(model.embedding[i], theirs.embedding[places[piece]] if piece in places else drawn[i])


@pytest.mark.parametrize("name", ["", "config.json", "nothing"])
def test_what_is_no_model_folder(read: Read, tmp_path: Path, model_folder: Path, name: str) -> None:
    """A run folder has a config.json too."""
    shutil.copy(model_folder / "config.json", tmp_path)
    with pytest.raises(UserError, match=r"is not a model folder \(it has no model.safetensors\): make one"):
        read(tmp_path / name)


def test_a_damaged_model_folder_is_named(read: Read, tmp_path: Path, model_folder: Path) -> None:
    damaged = Path(shutil.copytree(model_folder, tmp_path / "model"))
    file = damaged / "model.safetensors"
    flip(file)
    with pytest.raises(UserError, match=re.escape(f"{file} is damaged")):
        read(damaged)


def test_test_mode_finds_it_before_a_job_is_queued(tmp_path: Path, toy_data: DataFolder, model_folder: Path) -> None:
    """It begins with drawn weights itself, but says at once when the run could not begin with these."""
    config = PRESETS["tiny"].changed(data=(str(toy_data.path),), run_dir=tmp_path / "run", init_from=model_folder)
    with pytest.raises(UserError, match=r"^--init-from .* was trained with another vocabulary"):
        run_dry_run(config, World(), torch.device("cpu"))
    assert not (tmp_path / "run").exists()
