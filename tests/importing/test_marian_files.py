"""Marian's own files become models that compute what Marian computes."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import torch

from dist_transformer.base.errors import UserError
from dist_transformer.data.vocabulary.tokenizer import EOS_ID
from dist_transformer.importing.marian_files import MarianWeights, find_marian_files, read_marian_vocabulary
from dist_transformer.importing.marian_folder import our_weights
from dist_transformer.inference.scoring import score_ids
from tests.importing.marian_npz import SETTINGS, Kind, learn, log_probabilities, write_decoder, write_model, write_npz

CPU = torch.device("cpu")
Lines = tuple[list[str], list[str]]


@pytest.mark.parametrize(
    ("kind", "two", "ties"),
    [
        ("spm", False, "all"),
        ("yml", False, "all"),
        ("spm", False, "target"),
        ("spm", True, "target"),
        ("yml", True, "none"),
        ("spm", True, "none, older"),
    ],
)
def test_log_probabilities_are_those_of_the_formulas(
    kind: Kind, two: bool, ties: str, toy_lines: Lines, tmp_path: Path
) -> None:
    arrays = write_model(tmp_path / "model", toy_lines, kind, two=two, ties=ties)
    files = find_marian_files(tmp_path / "model")
    weights, vocabulary = MarianWeights(files.weights), read_marian_vocabulary(files)
    assert (vocabulary.sizes[1] > 0) == two
    config = weights.config(has_two=two)
    assert config.tie_embeddings == ties.split(",", maxsplit=1)[0]
    model = our_weights(weights.tensors(config), config.for_vocabularies(*vocabulary.sizes), vocabulary)
    texts = ("Our hungry guests sing.", "Die alten Ärzte 北京!")
    pair = (vocabulary.source.encode(texts[0]), vocabulary.target.encode(texts[1]))
    theirs = [[ids[token] for token in (*row, EOS_ID)] for ids, row in zip(vocabulary.their_ids, pair, strict=True)]
    # Their ids, by the library and the file alone.
    names = ("joint", "joint") if kind == "spm" and not two else ("source", "target")
    for name, file, text, row in zip(names, files.vocabularies, texts, theirs, strict=True):
        library = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "model" / f"{name}.spm"))
        if kind == "spm":
            assert row == [*library.encode(text), 0]
        else:
            entries = [line.rpartition(": ")[0].strip('"') for line in file.read_text().splitlines()]
            assert [entries[i] for i in row] == [
                piece if piece in entries else "<unk>" for piece in [*library.encode(text, out_type=str), "</s>"]
            ]
    found = score_ids(model, [pair], device=CPU)[0].token_log_probabilities
    np.testing.assert_allclose(found, log_probabilities(arrays, *theirs), atol=2e-5)


def edit(**changes: Any) -> Callable[[Path], object]:
    """Change settings of `model.npz`; None removes them."""

    def change(folder: Path) -> None:
        arrays = dict(np.load(folder / "model.npz"))
        del arrays["special:model.yml"]
        entries = len(arrays["Wemb"])
        settings = SETTINGS | {"dim-vocabs": [entries, entries]}
        for name, value in changes.items():
            settings[name.replace("_", "-")] = value
        write_npz(folder / "model.npz", arrays, {name: value for name, value in settings.items() if value is not None})

    return change


def edit_arrays(change: Callable[[dict[str, np.ndarray]], object]) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        arrays = dict(np.load(folder / "model.npz"))
        change(arrays)
        np.savez(folder / "model.npz", **arrays)

    return write


def rename(vocabulary: str) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        (folder / "joint.spm").rename(folder / vocabulary)
        file = folder / "decoder.yml"
        file.write_text(file.read_text().replace("joint.spm", vocabulary))

    return change


def as_bergamot(folder: Path) -> None:
    (folder / "decoder.yml").unlink()
    (folder / "model.npz").rename(folder / "model.ende.intgemm.alphas.bin")


def test_weights_of_bergamot_are_named_as_those(tmp_path: Path) -> None:
    (tmp_path / "model.intgemm.bin").write_bytes(b"\1\0")
    with pytest.raises(UserError, match="has an 8-bit Bergamot model with a recurrent decoder, which cannot be"):
        find_marian_files(tmp_path / "model.intgemm.bin")


def name_two(folder: Path) -> None:
    for name in "ab":
        write_decoder(folder, [folder / "joint.spm"] * 2).rename(folder / f"{name}.decoder.yml")


def take_other_target(folder: Path) -> None:
    (folder / "other.spm").write_bytes(learn(["Ganz andere Worte."] * 20))
    file = folder / "decoder.yml"
    file.write_text(file.read_text().replace("joint.spm\nbeam", "other.spm\nbeam"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (edit(type="s2s"), "has type: s2s, which a model here cannot express"),
        (edit(tied_embeddings_all=False, tied_embeddings_src=True), "has one embedding and an output apart from it"),
        (edit(dim_vocabs=[3, 4]), "has a vocabulary of two sizes, ['3', '4'], which"),
        (edit(input_types=["sequence", "class"]), "has input-types: ['sequence', 'class'], which"),
        (edit(transformer_preprocess="n"), "has transformer-preprocess: n, which"),
        (edit(transformer_decoder_dim_ffn=8), "feed-forward layers of different widths"),
        (edit(transformer_heads=None), "has settings that are incomplete ('transformer-heads')"),
        (edit(dec_depth=2), "has no weights decoder_l2_self_Wq, which its settings demand"),
        (edit_arrays(lambda arrays: arrays.update(Wpos=np.ones(3))), "has the weights Wpos, which"),
        (edit_arrays(lambda arrays: arrays.update(Wemb=np.ones((3, 3)))), "has Wemb as float64 of shape (3, 3), not"),
        (edit_arrays(lambda arrays: arrays.update(Wemb=np.array([object()]))), "read (Object arrays cannot be loaded"),
        (edit_arrays(lambda arrays: arrays.pop("special:model.yml")), "has no embedded settings"),
        (lambda folder: (folder / "model.npz").write_bytes(b"PK\3\4 no"), "model.npz cannot be read (File is not"),
        (lambda folder: (folder / "joint.spm").unlink(), "joint.spm cannot be read (No such file"),
        (lambda folder: (folder / "joint.spm").write_bytes(b"\nno"), "nor a SentencePiece model"),
        (lambda folder: (folder / "decoder.yml").unlink(), "has neither a config.json nor a decoder.yml"),
        (as_bergamot, "joint.spm, and what it translates is text for a student"),
        (lambda folder: (folder / "decoder.yml").write_text("a: [b"), "cannot be read as YAML"),
        (lambda folder: (folder / "decoder.yml").write_text("models: [a, b]"), "names 2 models and 0 vocabularies"),
        (name_two, "has 2 models: name one of them, such as"),
        (rename("joint.fsv"), "is a vocabulary of a kind that a model here cannot express, such as factors"),
        (take_other_target, "has two vocabularies with one embedding, which"),
    ],
)
def test_what_cannot_be_expressed_is_named(
    change: Callable[[Path], object], said: str, whole: Path, tmp_path: Path
) -> None:
    shutil.copytree(whole, tmp_path / "model")
    change(tmp_path / "model")
    with pytest.raises(UserError) as refused:
        read_all(tmp_path / "model")
    assert said in str(refused.value)


@pytest.fixture(scope="module")
def whole(toy_lines: Lines, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("marian") / "model"
    write_model(folder, toy_lines)
    return folder


def read_all(path: Path) -> None:
    files = find_marian_files(path)
    has_two = read_marian_vocabulary(files).sizes[1] > 0
    weights = MarianWeights(files.weights)
    weights.tensors(weights.config(has_two=has_two))


def test_paths_of_another_machine_are_found_beside_the_file(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "model")
    file = tmp_path / "model" / "decoder.yml"
    file.write_text(file.read_text().replace("- ", "- /home/nobody/"))
    read_all(file)


def test_a_text_vocabulary_needs_the_models_that_split_text(toy_lines: Lines, tmp_path: Path) -> None:
    write_model(tmp_path / "model", toy_lines, "yml")
    (tmp_path / "model" / "source.spm").unlink()
    with pytest.raises(UserError, match=r"source.spm cannot be read \(No such file"):
        read_all(tmp_path / "model")
