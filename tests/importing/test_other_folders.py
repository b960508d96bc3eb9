"""Folders of MarianMTModel as other versions and other people left them are imported alike, or refused by name."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from dist_transformer.base.errors import UserError
from dist_transformer.importing import checked_import
from dist_transformer.model_folder import load_model
from tests.importing.marian_folders import CPU, ROWS, Lines, edit_weights, run, write_folder

SHARED = ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight")


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
        (
            remove("config.json", "encoder_layers", "d_model"),
            "lacks d_model, encoder_layers: use the whole",
        ),
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
    with pytest.raises(UserError, match=r"keep_text is for M2M100 and NLLB, and .* leave --keep-text out"):
        run(plain, tmp_path / "out", keep_text=(plain / "vocab.json",))
