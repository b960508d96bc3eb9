"""Marian's own files, as `export --to marian` writes them, compute what our model does."""

import dataclasses
import json
from pathlib import Path

import ctranslate2
import numpy as np
import pytest
import sentencepiece
import torch
import yaml

from dist_transformer.base.errors import UserError
from dist_transformer.config.settings import ModelConfig
from dist_transformer.data.vocabulary.byte_bpe import learn_byte_bpe
from dist_transformer.data.vocabulary.sentence_piece import learn_sentence_piece
from dist_transformer.data.vocabulary.tokenizer import EOS_ID, Tokenizer, Vocabulary
from dist_transformer.export import marian_program
from dist_transformer.export.checked_export import export_model
from dist_transformer.export.ctranslate2 import save_for_ctranslate2
from dist_transformer.export.libraries import ExportSettings
from dist_transformer.export.marian_files import refuse_what_the_program_lacks, write_marian
from dist_transformer.importing.marian_files import MarianWeights, find_marian_files, read_marian_vocabulary
from dist_transformer.importing.marian_folder import our_weights
from dist_transformer.inference.scoring import score_ids
from dist_transformer.model.transformer import Transformer
from dist_transformer.model_folder import ModelInfo, write_model_folder
from tests.importing.marian_folders import SILENT
from tests.importing.marian_npz import HEADS, INNER, SIDES, WIDTH, Kind, log_probabilities, write_model

CPU = torch.device("cpu")
Lines = tuple[list[str], list[str]]
TEXTS = ("Our hungry guests sing.", "Die alten Ärzte 北京!")
EXPRESSIBLE = ModelConfig(
    width=WIDTH,
    heads=HEADS,
    ffn_width=INNER,
    encoder_layers=2,
    decoder_layers=1,
    activation="swish",
    positions="sinusoidal_t2t",
    norm_epsilon=1e-6,
    output_bias=True,
    begin_with_zeros=True,
)


def imported(folder: Path) -> tuple[Transformer, Vocabulary]:
    files = find_marian_files(folder)
    weights, vocabulary = MarianWeights(files.weights), read_marian_vocabulary(files)
    config = weights.config(has_two=vocabulary.sizes[1] > 0)
    return our_weights(weights.tensors(config), config.for_vocabularies(*vocabulary.sizes), vocabulary), vocabulary


def train(model: Transformer) -> None:
    """Change the weights, also the vectors of `<pad>` and `<s>`, as label smoothing does."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name != "output_bias":
                parameter.add_(torch.randn_like(parameter) * 0.05)


def assert_marian_computes_the_same(folder: Path, model: Transformer, vocabulary: Vocabulary) -> None:
    """Compare with formulas in float64, on ids by the libraries and the files alone."""
    ours = (vocabulary.source.encode(TEXTS[0]), vocabulary.target.encode(TEXTS[1]))
    found = score_ids(model, [ours], device=CPU)[0].token_log_probabilities
    theirs = []
    names = json.loads((folder / "decoder.yml").read_text())["vocabs"]
    for name, text, side in zip(names, TEXTS, SIDES, strict=True):
        if name.endswith(".spm"):
            library = sentencepiece.SentencePieceProcessor(model_file=str(folder / name))
            theirs.append([*library.encode(text), library.eos_id()])
        else:
            library = sentencepiece.SentencePieceProcessor(model_file=str(folder / f"{side}.spm"))
            table = yaml.safe_load((folder / name).read_text(encoding="utf-8"))
            pieces = [*library.encode(text, out_type=str), "</s>"]
            theirs.append([table.get(piece, table["<unk>"]) for piece in pieces])
    arrays = dict(np.load(folder / "model.npz"))
    settings = json.loads(arrays.pop("special:model.yml").tobytes().rstrip(b"\0"))
    assert settings["dim-vocabs"] == [
        len(arrays.get("Wemb", arrays.get(f"{side}_Wemb"))) for side in ("encoder", "decoder")
    ]
    np.testing.assert_allclose(found, log_probabilities(arrays, *theirs), atol=2e-5)


@pytest.mark.parametrize(
    ("kind", "two", "ties"),
    [("spm", False, "all"), ("yml", False, "all"), ("spm", True, "target"), ("yml", True, "none")],
)
def test_a_model_goes_back_as_it_came_and_after_training(
    kind: Kind, two: bool, ties: str, toy_lines: Lines, model_info: ModelInfo, tmp_path: Path
) -> None:
    arrays = write_model(tmp_path / "theirs", toy_lines, kind, two=two, ties=ties)
    model, vocabulary = imported(tmp_path / "theirs")
    (tmp_path / "back").mkdir()
    write_marian(tmp_path / "back", model, vocabulary, model_info)
    again = dict(np.load(tmp_path / "back" / "model.npz"))
    del again["special:model.yml"]
    assert again.keys() == arrays.keys()
    assert all(np.array_equal(again[name], arrays[name]) for name in arrays)
    theirs, ours = (find_marian_files(tmp_path / name).vocabularies for name in ("theirs", "back"))
    for before, after in zip(theirs, ours, strict=True):
        assert before.suffix == after.suffix
        if kind == "spm":
            assert before.read_bytes() == after.read_bytes()
    train(model)
    (tmp_path / "tuned").mkdir()
    write_marian(tmp_path / "tuned", model, vocabulary, model_info)
    assert_marian_computes_the_same(tmp_path / "tuned", model, vocabulary)
    # Read again, it is the same model, but for the vectors of what Marian lacks.
    state, other = (each.state_dict() for each in (model, imported(tmp_path / "tuned")[0]))
    for name, tensor in other.items():
        rows = slice(4 if "embed" in name or "output" in name else 0, None)
        assert torch.equal(tensor[rows], state[name][rows]), name


@pytest.mark.parametrize("tags", [(), ("<2de>", "<2fr>")])
def test_a_model_of_ours_that_marian_can_express(
    tags: tuple[str, ...], toy_lines: Lines, model_info: ModelInfo, tmp_path: Path
) -> None:
    vocabulary = learn_sentence_piece(
        [*toy_lines[0], *toy_lines[1]],
        vocab_size=200,
        model_type="unigram",
        byte_fallback=False,
        character_coverage=1.0,
        normalization="nfkc",
        tags=tags,
    )
    model = Transformer(EXPRESSIBLE.for_vocabularies(*vocabulary.sizes)).eval()
    train(model)
    (out := tmp_path / "out").mkdir()
    write_marian(out, model, vocabulary, model_info)
    # No text has a tag, so a table has them.
    assert find_marian_files(out).vocabularies == (out / ("vocab.yml" if tags else "vocab.spm"),) * 2
    assert_marian_computes_the_same(out, model, vocabulary)
    # Our own export for CTranslate2 begins with zeros, too.
    pieces, (source, target) = vocabulary.pieces, map(vocabulary.encode, TEXTS)
    save_for_ctranslate2(model, (pieces, pieces), tmp_path / "ctranslate2")
    translator = ctranslate2.Translator(str(tmp_path / "ctranslate2"), compute_type="float32")
    spelled = [[pieces[token] for token in row] for row in ([*source, EOS_ID], target)]
    found = translator.score_batch(spelled[:1], spelled[1:])[0].log_probs
    expected = score_ids(model, [(source, target)], device=CPU)[0].token_log_probabilities
    np.testing.assert_allclose(found, expected, atol=2e-5)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"norm": "pre"}, "Marian does not support norm = 'pre': only 'post'"),
        ({"norm_epsilon": 1e-5}, "Marian does not support norm_epsilon = 1e-05: only 1e-06"),
        ({"positions": "sinusoidal"}, "Marian does not support positions = 'sinusoidal': only 'sinusoidal_t2t'"),
        ({"begin_with_zeros": False}, "Marian does not support begin_with_zeros = False: only True"),
        ({"activation": "gelu"}, "Marian has another gelu, an approximation: model.activation must be relu or swish"),
    ],
)
def test_what_marian_cannot_express_is_named(values: dict[str, object], said: str) -> None:
    refuse_what_the_program_lacks(EXPRESSIBLE)
    with pytest.raises(UserError) as refused:
        refuse_what_the_program_lacks(dataclasses.replace(EXPRESSIBLE, **values))
    assert str(refused.value) == said


def test_a_vocabulary_that_marian_cannot_read_is_named(toy_lines: Lines, model_info: ModelInfo, tmp_path: Path) -> None:
    vocabulary = learn_byte_bpe([*toy_lines[0], *toy_lines[1]], vocab_size=400)
    model = Transformer(EXPRESSIBLE.for_vocabularies(*vocabulary.sizes))
    with pytest.raises(UserError, match="Marian reads vocabularies of SentencePiece: prepare the data with"):
        write_marian(tmp_path, model, vocabulary, model_info)


def test_without_marian_nothing_is_written(
    toy_tokenizer: Tokenizer, model_info: ModelInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that Marian cannot express is refused before the program is needed."""
    monkeypatch.setattr(marian_program.shutil, "which", lambda _: None)
    settings = ExportSettings(model=tmp_path / "model", to="marian", out=tmp_path / "out")
    for changes, said in (
        ({"begin_with_zeros": False}, "Marian does not support begin_with_zeros"),
        ({}, "is compared with Marian itself, which is not here: pip install pymarian"),
    ):
        config = dataclasses.replace(EXPRESSIBLE, **changes).for_vocabularies(*toy_tokenizer.sizes)
        info = dataclasses.replace(model_info, model=config)
        weights = dict(Transformer(config).state_dict())
        write_model_folder(settings.model, info=info, weights=weights, tokenizer_json=toy_tokenizer.content)
        with pytest.raises(UserError, match=said):
            export_model(settings, CPU, progress=SILENT, show=print)
    assert not (tmp_path / "out").exists()
