"""Folders of MarianMTModel, as transformers writes them, become model folders that give the same outputs."""

import io
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import sentencepiece
import torch
from tqdm import tqdm
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, MarianConfig, MarianMTModel

from dist_transformer.base.checks import Check
from dist_transformer.base.errors import UserError
from dist_transformer.data.vocabulary.kinds import load_vocabulary
from dist_transformer.data.vocabulary.tokenizer import BOS_ID, PAD_ID, SPECIALS
from dist_transformer.export import gate, huggingface, libraries
from dist_transformer.export.checked_export import export_model
from dist_transformer.export.libraries import ExportSettings, Target
from dist_transformer.importing import checked_import, marian_folder
from dist_transformer.importing.checked_import import import_model
from dist_transformer.importing.settings import ImportSettings
from dist_transformer.inference.decoding import Decoding
from dist_transformer.inference.translator import Translator
from dist_transformer.model_folder import load_model, write_model_folder

CPU = torch.device("cpu")
SILENT = tqdm(disable=True)
Lines = tuple[list[str], list[str]]
SHARED = ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight")
ROWS = ["token ids", "decoding", "log-probabilities", "greedy search"]

LANGUAGES = (">>de<<", ">>nl<<")
SHAPES: dict[str, dict[str, Any]] = {
    "as published": {},
    "deep, languages": {"layers": (3, 1), "width": 16, "heads": 2, "activation": "relu", "languages": LANGUAGES},
    "one head, gelu": {"heads": 1, "activation": "gelu", "positions": 100},
    "BPE": {"model_type": "bpe", "layers": (1, 2), "ffn": 24},
    "two vocabularies": {"two": True},
    "two vocabularies, an output apart": {"two": True, "tied": False, "languages": LANGUAGES},
}


def write_folder(
    folder: Path,
    lines: Lines,
    *,
    width: int = 32,
    layers: tuple[int, int] = (2, 2),
    heads: int = 4,
    ffn: int = 48,
    activation: str = "swish",
    languages: tuple[str, ...] = (),
    positions: int = 512,
    model_type: str = "unigram",
    two: bool = False,
    tied: bool = True,
) -> MarianMTModel:
    """Write a folder with random weights, large biases too, and `.spm` files that SentencePiece learned."""
    folder.mkdir()
    pieces: list[set[str]] = []
    for side, text in zip(("source", "target"), lines, strict=True):
        written = io.BytesIO()
        settings = {"vocab_size": 150, "model_type": model_type, "hard_vocab_limit": False, "minloglevel": 2}
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(text), model_writer=written, **settings)
        (folder / f"{side}.spm").write_bytes(written.getvalue())
        library = sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())
        pieces.append({library.id_to_piece(i) for i in range(3, library.get_piece_size())})
    # <pad> has another id in each table.
    tables = [
        ["</s>", "<unk>", *languages, *sorted(one), "<pad>"] for one in (pieces if two else [pieces[0] | pieces[1]])
    ]
    for file, table in zip(("vocab.json", "target_vocab.json"), tables, strict=False):
        (folder / file).write_text(json.dumps({piece: i for i, piece in enumerate(table)}, ensure_ascii=False))
    names: dict[str, object] = {"source_lang": "en", "target_lang": "de", "tokenizer_class": "MarianTokenizer"}
    # As transformers up to 4.40 wrote it.
    names["clean_up_tokenization_spaces"] = True
    (folder / "tokenizer_config.json").write_text(json.dumps(names | ({"separate_vocabs": True} if two else {})))
    torch.manual_seed(0)
    pads = [len(table) - 1 for table in tables]
    pad = pads[-1]
    model = MarianMTModel(
        MarianConfig(
            vocab_size=len(tables[0]),
            decoder_vocab_size=len(tables[-1]),
            share_encoder_decoder_embeddings=not two,
            tie_word_embeddings=tied,
            d_model=width,
            encoder_layers=layers[0],
            decoder_layers=layers[1],
            encoder_attention_heads=heads,
            decoder_attention_heads=heads,
            encoder_ffn_dim=ffn,
            decoder_ffn_dim=ffn,
            activation_function=activation,
            max_position_embeddings=positions,
            scale_embedding=True,
            pad_token_id=min(pads),
            eos_token_id=0,
            forced_eos_token_id=0,
            decoder_start_token_id=pad,
            bad_words_ids=[[pad]],
        )
    ).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "shared" not in name and "embed" not in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
        embeddings = [model.model.encoder.embed_tokens.weight, model.model.decoder.embed_tokens.weight]
        for weight, zeros in zip(embeddings if two else embeddings[:1], pads, strict=True):
            weight.mul_(8)
            weight[zeros] = 0
        model.final_logits_bias.normal_(std=2)
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module", params=SHAPES)
def folder(request: pytest.FixtureRequest, toy_lines: Lines, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("marian") / "opus-mt-en-de"
    write_folder(path, toy_lines, **SHAPES[request.param])
    return path


@pytest.fixture(scope="module")
def plain(toy_lines: Lines, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plain") / "theirs"
    write_folder(path, toy_lines)
    return path


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "COMPARED_LINES", 30)
    monkeypatch.setattr(libraries, "_LONGEST_OUTPUT", 12)


def run(folder: Path, out: Path, **more: Any) -> list[Check]:
    checks: list[Check] = []
    import_model(ImportSettings(folder=folder, out=out, **more), CPU, progress=SILENT, show=checks.extend)
    return checks


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


def edit(name: str, **changes: object) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        values = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
        (folder / name).write_text(json.dumps({**values, **changes}))

    return change


def remove(name: str, *keys: str) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        values = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({key: value for key, value in values.items() if key not in keys}))

    return change


def add_entry(name: str) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        table = json.loads((folder / "vocab.json").read_text())
        (folder / "vocab.json").write_text(json.dumps({**table, name: len(table)}))

    return change


def give_second_table(folder: Path) -> None:
    """Give the targets a table of their own."""
    table = json.loads((folder / "vocab.json").read_text())
    other = next(piece for piece, number in table.items() if number == 0)
    table["</s>"], table[other] = table[other], table["</s>"]
    (folder / "target_vocab.json").write_text(json.dumps(table))
    edit("tokenizer_config.json", separate_vocabs=True)(folder)


FC1 = "model.decoder.layers.1.fc1.weight"


def edit_weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        weights = safetensors.torch.load_file(folder / "model.safetensors")
        change(weights)
        safetensors.torch.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    return write


class Command:
    """A pickle of it runs a command when it is read."""

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return os.system, ("echo nothing may run this",)


def as_pickle(more: object = None) -> Callable[[Path], object]:
    """Replace the weights by `pytorch_model.bin`, with the tied matrix under all its names, as older folders have."""

    def write(folder: Path) -> None:
        weights: dict[str, Any] = safetensors.torch.load_file(folder / "model.safetensors")
        weights |= {name: weights["model.shared.weight"].clone() for name in SHARED}
        (folder / "model.safetensors").unlink()
        torch.save(weights | ({} if more is None else {"more": more}), folder / "pytorch_model.bin")

    return write


POSITIONS = [f"model.{side}.embed_positions.weight" for side in ("encoder", "decoder")]


def add_positions(weights: dict[str, torch.Tensor]) -> None:
    """Add Marian's tables, which older versions saved."""
    angles = torch.arange(512)[:, None] / 10000 ** (torch.arange(0, 32, 2) / 32)
    weights.update({name: torch.cat([angles.sin(), angles.cos()], 1) for name in POSITIONS})


def add_learned_positions(weights: dict[str, torch.Tensor]) -> None:
    add_positions(weights)
    weights[POSITIONS[1]][7, 3] += 0.01


def test_a_folder_of_an_older_version_in_half_precision(plain: Path, tmp_path: Path) -> None:
    shutil.copytree(plain, tmp_path / "theirs")
    edit_weights(add_positions)(tmp_path / "theirs")
    edit_weights(lambda weights: weights.update({name: tensor.half() for name, tensor in weights.items()}))(
        tmp_path / "theirs"
    )
    as_pickle()(tmp_path / "theirs")
    edit("config.json", torch_dtype="float16", dtype="float16")(tmp_path / "theirs")
    checks = run(tmp_path / "theirs", tmp_path / "model")
    assert [(check.name, check.state) for check in checks] == [(name, "ok") for name in ROWS]


OF_SLOW = {"sp_model_kwargs": {}, "separate_vocabs": False, "model_max_length": 512, "special_tokens_map_file": None}
"""Entries of `tokenizer_config.json` by every version."""
ADDED = {"content": "<unk>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
HABITS: dict[str, list[Callable[[Path], object]]] = {
    "published": [
        lambda folder: (folder / "tokenizer_config.json").write_text('{"source_lang": "en", "target_lang": "de"}'),
        lambda folder: (folder / "generation_config.json").unlink(),
        remove("config.json", "decoder_vocab_size", "share_encoder_decoder_embeddings", "tie_word_embeddings", "dtype"),
        edit("config.json", num_beams=6, max_length=512, extra_pos_embeddings=9, normalize_before=False),
    ],
    "4.30": [
        as_pickle(),
        edit("tokenizer_config.json", **OF_SLOW, eos_token="</s>", unk_token={"__type": "AddedToken", **ADDED}),
        edit("special_tokens_map.json", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"),
        edit("config.json", num_beams=4, num_hidden_layers=2, torch_dtype="float32"),
    ],
    "4.57": [
        edit("tokenizer_config.json", **OF_SLOW, added_tokens_decoder={"1": {**ADDED, "special": True}}),
        edit("tokenizer_config.json", clean_up_tokenization_spaces=False, extra_special_tokens={}),
    ],
    "5": [
        edit("tokenizer_config.json", **OF_SLOW, backend="custom", additional_special_tokens=None),
        remove("tokenizer_config.json", "clean_up_tokenization_spaces"),
        remove("config.json", "forced_eos_token_id"),
    ],
    "its own search": [
        edit("generation_config.json", do_sample=True, no_repeat_ngram_size=2, forced_bos_token_id=7, min_length=9),
        edit("tokenizer_config.json", padding_side="left", model_max_length=5),
    ],
}


def test_folders_of_every_version_give_the_same_model(plain: Path, tmp_path: Path) -> None:
    """Import what transformers 4.30, 4.57 and 5 wrote of one model; a folder of 4.40 has parts of 4.30 and of 4.57."""
    run(plain, tmp_path / "model")
    for habit, changes in HABITS.items():
        shutil.copytree(plain, tmp_path / habit)
        for change in changes:
            change(tmp_path / habit)
        run(tmp_path / habit, tmp_path / f"of {habit}")
        for name in ("model.safetensors", "tokenizer.json"):
            found, expected = ((tmp_path / folder / name).read_bytes() for folder in (f"of {habit}", "model"))
            assert found == expected, habit


def test_a_model_of_the_hub_is_named_with_its_commit(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(plain, tmp_path / "0123")
    monkeypatch.setattr(checked_import, "find_folder", {Path("org/en-de"): tmp_path / "0123"}.__getitem__)
    run(Path("org/en-de"), tmp_path / "model")
    assert load_model(tmp_path / "model", CPU)[2].corpus == "imported from org/en-de at 0123"


@pytest.mark.parametrize("two", [False, True])
def test_rows_without_an_entry_are_dropped(two: bool, toy_lines: Lines, tmp_path: Path) -> None:
    model = write_folder(tmp_path / "exact", toy_lines, two=two)
    run(tmp_path / "exact", tmp_path / "expected")
    shutil.copytree(tmp_path / "exact", tmp_path / "larger")
    names = ["vocab_size", "decoder_vocab_size"][: 1 + two]
    rows = [getattr(model.config, name) for name in names]
    resize = [model.resize_token_embeddings, model.resize_decoder_token_embeddings]
    for size, enlarge in zip(rows, resize, strict=False):
        # As `pad_to_multiple_of=8` does; three rows more, so that there always are some.
        enlarge(-(-(size + 3) // 8) * 8)
    surplus = sum(getattr(model.config, name) for name in names) - sum(rows)
    with torch.no_grad():
        # Rows that take part in the softmax.
        model.final_logits_bias[:, rows[-1] :] = 20
    model.save_pretrained(tmp_path / "larger")
    checks = run(tmp_path / "larger", tmp_path / "model")
    assert [(check.name, check.state) for check in checks] == [(name, "ok") for name in ("surplus rows", *ROWS)]
    assert checks[0].found.startswith(f"{surplus} without an entry in the vocabulary were dropped")
    found, expected = (load_model(tmp_path / name, CPU)[0].state_dict() for name in ("model", "expected"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_without_settings_of_the_tokenizer_the_languages_are_given(plain: Path, tmp_path: Path) -> None:
    shutil.copytree(plain, tmp_path / "theirs")
    (tmp_path / "theirs" / "tokenizer_config.json").unlink()
    with pytest.raises(UserError, match="does not name its languages: pass them with --src-lang"):
        run(tmp_path / "theirs", tmp_path / "model")
    checks = run(tmp_path / "theirs", tmp_path / "model", source_language="en", target_language="de")
    assert [(check.name, check.state) for check in checks] == [(name, "ok") for name in ROWS]
    # They also replace those that a folder names.
    run(plain, tmp_path / "other", source_language="eng", target_language="nds")
    assert load_model(tmp_path / "other", CPU)[2].direction.name == "eng-nds"


def test_a_path_that_is_no_folder_of_a_model_is_named(plain: Path, tmp_path: Path) -> None:
    run(plain, tmp_path / "model")
    for path, said in (
        (tmp_path / "thiers", "thiers does not exist: pass the folder of a model, or ORG/NAME, a name of the hub"),
        (plain / "config.json", "config.json is one file of a model: pass the folder, or Marian's decoder.yml"),
        (tmp_path / "model", "model is a model folder already: it needs no import"),
    ):
        with pytest.raises(UserError, match=said):
            run(path, tmp_path / "no")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (edit("config.json", model_type="bart"), "is of a model of type 'bart', not marian"),
        (edit("config.json", scale_embedding=False), "has scale_embedding = False, which a model here cannot express"),
        (edit("config.json", activation_function="tanh"), "has the activation 'tanh', which"),
        (edit("config.json", tie_word_embeddings=False), "has one embedding and an output apart from it, which"),
        (edit("config.json", share_encoder_decoder_embeddings=False), "do not fit its config.json (missing: "),
        (edit("config.json", decoder_attention_heads=8), "different numbers of heads"),
        (edit("tokenizer_config.json", separate_vocabs=True), "target_vocab.json cannot be read (No such file"),
        (give_second_table, "has two vocabularies with one embedding, which"),
        (edit("config.json", decoder_start_token_id=0), "does not begin with <pad>"),
        (edit("config.json", vocab_size=9, decoder_vocab_size=9), "has 9 entries in its settings and"),
        (lambda folder: (folder / "config.json").write_text("{"), "cannot be read as JSON"),
        (lambda folder: (folder / "target.spm").unlink(), "target.spm cannot be read (No such file"),
        (lambda folder: (folder / "source.spm").write_bytes(b"\nno"), "nor a SentencePiece model"),
        (add_entry("<s>"), "has a vocab.json that has <s>"),
        (edit("vocab.json", more=9999), "do not have the ids 0 to"),
        (edit_weights(lambda weights: weights.pop(FC1)), f"do not fit its config.json (missing: {FC1})"),
        (
            edit_weights(add_learned_positions),
            "has positions that are not its own sinusoids, which a model here cannot",
        ),
        (edit_weights(lambda weights: weights[FC1].fill_(torch.inf)), f"in {FC1} that are not finite"),
        (lambda folder: (folder / "model.safetensors").unlink(), "Error no file named model.safetensors"),
        (as_pickle(Command()), "has weights that hold more than tensors: nothing of them was run"),
        (edit("tokenizer_config.json", source_lang=None), "does not name its languages: pass them with --src-lang"),
    ],
)
def test_what_cannot_be_imported_is_named(
    change: Callable[[Path], object], said: str, plain: Path, tmp_path: Path
) -> None:
    shutil.copytree(plain, tmp_path / "theirs")
    change(tmp_path / "theirs")
    with pytest.raises(UserError) as refused:
        run(tmp_path / "theirs", tmp_path / "model")
    assert said in str(refused.value)
    assert not (tmp_path / "model").exists()


def test_only_vocabularies_of_many_languages_are_cut(plain: Path, tmp_path: Path) -> None:
    settings = ImportSettings(folder=plain, out=tmp_path / "out", keep_text=(plain / "vocab.json",))
    with pytest.raises(UserError, match=r"keep_text is for M2M100 and NLLB, and .* leave --keep-text out"):
        import_model(settings, CPU, progress=SILENT, show=list)
