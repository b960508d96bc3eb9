"""Folders of MarianMTModel, as transformers writes them, become model folders that give the same outputs."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import sentencepiece
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from dist_transformer.base.checks import Check
from dist_transformer.base.errors import UserError
from dist_transformer.data.vocabulary.kinds import load_vocabulary
from dist_transformer.data.vocabulary.tokenizer import BOS_ID, PAD_ID, SPECIALS
from dist_transformer.export import huggingface
from dist_transformer.export.checked_export import export_model
from dist_transformer.export.libraries import ExportSettings, Target
from dist_transformer.importing import checked_import, marian_folder
from dist_transformer.inference.decoding import Decoding
from dist_transformer.inference.translator import Translator
from dist_transformer.model_folder import load_model, write_model_folder
from tests.importing.marian_folders import CPU, ROWS, SILENT, Lines, edit_weights, run, write_folder

LANGUAGES = (">>de<<", ">>nl<<")
SHAPES: dict[str, dict[str, Any]] = {
    "as published": {},
    "deep, languages": {"layers": (3, 1), "width": 16, "heads": 2, "activation": "relu", "languages": LANGUAGES},
    "one head, gelu": {"heads": 1, "activation": "gelu", "positions": 100},
    "BPE": {"model_type": "bpe", "layers": (1, 2), "ffn": 24},
    "two vocabularies": {"two": True},
    "two vocabularies, an output apart": {"two": True, "tied": False, "languages": LANGUAGES},
}


@pytest.fixture(scope="module", params=SHAPES)
def folder(request: pytest.FixtureRequest, toy_lines: Lines, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("marian") / "opus-mt-en-de"
    write_folder(path, toy_lines, **SHAPES[request.param])
    return path


def test_a_folder_of_any_shape(folder: Path, tmp_path: Path) -> None:
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    checks = run(folder, tmp_path / "model")
    assert [(check.name, check.state) for check in checks] == [(name, "ok") for name in ROWS]
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    model, tokenizer, info = load_model(tmp_path / "model", CPU)
    # By the files themselves.
    files = [folder / name for name in ("vocab.json", "target_vocab.json") if (folder / name).exists()]
    tables = [json.loads(file.read_text()) for file in files]
    table = tables[-1]
    theirs = safetensors.torch.load_file(folder / "model.safetensors")
    for side, entries in ((tokenizer.source, tables[0]), (tokenizer.target, table)):
        assert side.pieces[: len(SPECIALS)] == [*SPECIALS]
        assert {*side.pieces} == {*entries, "<s>"}
    assert tokenizer.source.library_file == (folder / "source.spm").read_bytes()
    assert tokenizer.target.library_file == (folder / "target.spm").read_bytes()
    assert model.output_bias is not None
    for ours, piece in enumerate(tokenizer.target.pieces):
        if ours != BOS_ID:
            assert model.output_bias[ours] == theirs["final_logits_bias"][0, table[piece]]
    for name, weight in model.embedding_weights().items():
        assert torch.equal(weight[BOS_ID], weight[PAD_ID]), name
    languages = [piece for piece in table if piece.startswith(">>")]
    assert [*tokenizer.source.tags] == languages
    names = [f"en-{language.strip('<>')}" for language in languages] or ["en-de"]
    assert [direction.name for direction in info.all_directions] == names
    assert info.model.max_positions == json.loads((folder / "config.json").read_text())["max_position_embeddings"]
    tags = info.facing(info.all_directions[0].name).direction.tags
    translator = Translator(model, tokenizer, CPU, Decoding(), tags=tags)
    assert len(translator.translate(["Our guests sing.", ""])) == 2
    # Back: the same weights, tokenizer and generations.
    (out := tmp_path / "back").mkdir()
    huggingface.write_huggingface(out, model, tokenizer, info.facing(info.all_directions[0].name))
    again = safetensors.torch.load_file(out / "model.safetensors")
    assert again.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(again[name], tensor), name
    for name in ("source.spm", "target.spm", *(file.name for file in files)):
        assert (out / name).read_bytes() == before[name]
    assert generated(out, table) == generated(folder, table)
    stated = json.loads((out / "tokenizer_config.json").read_text())
    assert f"{stated['source_lang']}-{stated['target_lang']}" == names[0]


def generated(folder: Path, table: dict[str, int]) -> list[str]:
    """Translate as a user of transformers does, by greedy search without special tokens and tags."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForSeq2SeqLM.from_pretrained(folder)
    inputs = tokenizer(["Our hungry guests sing.", "The old doctor"], return_tensors="pt", padding=True)
    never = [number for piece, number in table.items() if piece in SPECIALS[:3] or piece.startswith(">>")]
    search = {"num_beams": 1, "early_stopping": False, "length_penalty": 1.0}
    rows = model.generate(**inputs, max_new_tokens=20, suppress_tokens=never, **search)
    # Theirs has </s> at the limit.
    return tokenizer.batch_decode(rows[:, :19], skip_special_tokens=True)


@pytest.mark.parametrize("target", ["hf", "ctranslate2"])
def test_a_tuned_model_is_exported_again(target: Target, plain: Path, tmp_path: Path) -> None:
    run(plain, tmp_path / "imported")
    model, tokenizer, info = load_model(tmp_path / "imported", CPU)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            # As training does, but for the output <s>, which has no probability and so no gradient.
            parameter.add_(torch.randn_like(parameter) * 0.05)
    weights = dict(model.state_dict())
    write_model_folder(tmp_path / "model", info=info, weights=weights, tokenizer_json=tokenizer.content)
    lines = [f"Our {word} guests sing." for word in ("hungry", "old", "young", "tired")]
    for name in ("dev.en", "dev.de"):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))
    dev = {"source": tmp_path / "dev.en", "reference": tmp_path / "dev.de"}
    checks: list[Check] = []
    settings = ExportSettings(model=tmp_path / "model", to=target, out=tmp_path / "out", **dev)
    export_model(settings, CPU, progress=SILENT, show=checks.extend)
    assert {check.name: check.state for check in checks if check.name in ROWS} == dict.fromkeys(ROWS, "ok")
    if target == "hf":
        assert "ct2-transformers-converter" not in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
        assert converted(tmp_path / "out", lines) == generated_greedily(tmp_path / "out", lines)


def converted(folder: Path, lines: list[str]) -> list[list[str]]:
    """Tokens of greedy search by CTranslate2, after its own conversion of a folder of transformers."""
    import ctranslate2
    from ctranslate2.converters import TransformersConverter

    TransformersConverter(str(folder)).convert(str(folder.with_name("converted")))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    sources = [tokenizer.convert_ids_to_tokens(tokenizer(line)["input_ids"]) for line in lines]
    translator = ctranslate2.Translator(str(folder.with_name("converted")), compute_type="float32")
    found = translator.translate_batch(sources, beam_size=1, max_decoding_length=12, disable_unk=True)
    return [each.hypotheses[0] for each in found]


def generated_greedily(folder: Path, lines: list[str]) -> list[list[str]]:
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForSeq2SeqLM.from_pretrained(folder)
    rows = model.generate(**tokenizer(lines, padding=True, return_tensors="pt"), num_beams=1, max_new_tokens=12)
    special = {*tokenizer.all_special_tokens}
    return [[token for token in tokenizer.convert_ids_to_tokens(row) if token not in special] for row in rows.tolist()]


def test_a_short_comparison_says_so(plain: Path, tmp_path: Path) -> None:
    (tmp_path / "six.en").write_text("Our guests , who sing , are hungry .\n" * 6)
    checks = run(plain, tmp_path / "model", source=tmp_path / "six.en")
    assert [(check.name, check.state) for check in checks] == [("dev text", "warn"), *((name, "ok") for name in ROWS)]
    assert checks[0].found == "only 6 lines were compared, so rare differences may be missed"


def test_the_limit_grows_with_the_logits(plain: Path, tmp_path: Path) -> None:
    """Rounding is in proportion to the logits: 200 times the embeddings, and 200 times the bias."""
    shutil.copytree(plain, tmp_path / "theirs")
    edit_weights(lambda weights: [weights[name].mul_(200) for name in ("model.shared.weight", "final_logits_bias")])(
        tmp_path / "theirs"
    )
    checks = {check.name: check for check in run(tmp_path / "theirs", tmp_path / "model")}
    allowed = float(checks["log-probabilities"].found.split("; ")[1].split()[0])
    assert (checks["log-probabilities"].state, allowed > 1e-3) == ("ok", True)


def test_the_vocabulary_splits_each_side_by_its_own_model(folder: Path, tmp_path: Path) -> None:
    vocabulary = marian_folder.read_vocabulary(folder)
    vocabulary.save(tmp_path / "tokenizer.json")
    again = load_vocabulary(tmp_path / "tokenizer.json")
    for name, side in (("source", again.source), ("target", again.target)):
        file = folder / "target_vocab.json"
        table = json.loads((file if name == "target" and file.exists() else folder / "vocab.json").read_text())
        library = sentencepiece.SentencePieceProcessor(model_file=str(folder / f"{name}.spm"))
        for text in ("Our hungry guests sing.", "Unsere Gäste singen 北京!", "</s> <pad> >>de<<"):
            pieces = library.encode(text, out_type=str)
            expected = [piece if piece in table and piece not in SPECIALS else "<unk>" for piece in pieces]
            assert [side.pieces[token] for token in side.encode(text)] == expected
            assert len(side.token_starts(side.normalize(text))) == len(side.encode(side.normalize(text)))
        word = {"source": "hungry", "target": "Gäste"}[name]
        assert side.decode(side.encode(word)) == word
    assert again.source.encode("Our guests") != again.target.encode("Our guests")


@pytest.mark.parametrize(
    ("change", "rows"),
    [
        (lambda model: model.output_bias.zero_(), {"log-probabilities", "greedy search"}),
        # The decoder does not begin with the vector of <pad>.
        (lambda model: model.embedding[PAD_ID].fill_(0.5), {"log-probabilities"}),
        # <pad> does not take part in the softmax, <s> does.
        (lambda model: model.output_bias[PAD_ID].fill_(-100), {"log-probabilities"}),
        (lambda model: model.output_bias[BOS_ID].fill_(5), {"log-probabilities"}),
        (lambda model: model.embedding.copy_(model.embedding.roll(1, 0)), {"log-probabilities", "greedy search"}),
    ],
    ids=["bias", "begin", "pad", "masked", "rows"],
)
def test_the_gate_refuses_other_weights(
    change: Callable[[Any], object], rows: set[str], plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert = checked_import.our_weights

    def wrongly(*given: Any) -> Any:
        model = convert(*given)
        with torch.no_grad():
            change(model)
        return model

    monkeypatch.setattr(checked_import, "our_weights", wrongly)
    failed = ", ".join(row for row in ROWS if row in rows)
    with pytest.raises(UserError, match=rf"model was not written, because its outputs differ .* \({failed}\): see"):
        run(plain, tmp_path / "model")
    assert not (tmp_path / "model").exists()
