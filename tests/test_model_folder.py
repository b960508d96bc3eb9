import fcntl
import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from huggingface_hub import ModelCard

from dist_transformer import model_folder as module
from dist_transformer.base.errors import UserError
from dist_transformer.base.files import folder_beside, sha256_of
from dist_transformer.config.directions import Direction
from dist_transformer.config.registry import ATTENTIONS
from dist_transformer.data.vocabulary.tokenizer import Tokenizer
from dist_transformer.model.attention import MultiHeadAttention
from dist_transformer.model.transformer import Transformer
from dist_transformer.model_folder import ModelInfo, load_model, read_model_info, write_model_folder
from tests.hub_cache import as_hub_cache
from tests.small_model import restate

CPU = torch.device("cpu")


@pytest.fixture
def copy(model_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_folder, tmp_path / "model"))


def write_again(path: Path, info: ModelInfo, model: Transformer, tokenizer_json: bytes = b"{}") -> None:
    write_model_folder(path, info=info, weights=dict(model.state_dict()), tokenizer_json=tokenizer_json)


def test_what_is_written_comes_back(
    model_folder: Path, random_model: Transformer, toy_tokenizer: Tokenizer, model_info: ModelInfo
) -> None:
    model, tokenizer, info = load_model(model_folder, CPU)
    assert info == model_info
    assert tokenizer.sha256 == toy_tokenizer.sha256
    assert not model.training
    for name, tensor in random_model.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)
    assert sorted(file.name for file in model_folder.iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    config = json.loads((model_folder / "config.json").read_text())
    assert config["format_version"] == 2
    sha256 = sha256_of(model_folder / "model.safetensors")
    assert config["weights"] == {"sha256": sha256, "dtype": "fp32", "finite": True}


def test_files_may_be_links_to_files(model_folder: Path, random_model: Transformer, tmp_path: Path) -> None:
    model, _, _ = load_model(as_hub_cache(model_folder, tmp_path), CPU)
    for name, tensor in random_model.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)


def test_directions_come_back_and_are_chosen(
    model_folder: Path, model_info: ModelInfo, random_model: Transformer, tmp_path: Path
) -> None:
    # A folder of one plain direction is as it was before there were several.
    assert "directions" not in json.loads((model_folder / "config.json").read_text())
    assert read_model_info(model_folder).facing() == model_info
    assert model_info.direction == Direction(source_language="en", target_language="de")
    assert model_info.facing("en-de", ["<bt>"]).direction.tags == ("<bt>",)
    there, back = model_info.direction, Direction(source_language="de", target_language="en", tags=("<2en>",))
    write_again(tmp_path / "m", replace(model_info, directions=(there, back)), random_model)
    info = read_model_info(tmp_path / "m")
    assert info.all_directions == (there, back)
    facing = info.facing("de-en")
    assert (facing.source_language, facing.target_language, facing.direction) == ("de", "en", back)
    assert facing.facing() == facing
    assert info.facing("en-de").all_directions == (there,)
    with pytest.raises(UserError, match="several directions: choose one of en-de, de-en with --direction"):
        _ = info.direction
    card = (tmp_path / "m/README.md").read_text()
    assert ModelCard(card).data.language == ["en", "de"]
    assert "from `en` to `de`, from `de` to `en`." in card
    assert 'translate --model "$MODEL" --direction en-de < input.txt' in card


def test_a_tied_matrix_is_stored_once(model_info: ModelInfo, tmp_path: Path) -> None:
    config = replace(model_info.model, tie_embeddings="all")
    write_again(tmp_path / "m", replace(model_info, model=config), Transformer(config))
    stored = safetensors.torch.load_file(tmp_path / "m" / "model.safetensors")
    assert [name for name, tensor in stored.items() if tensor.shape[0] == config.vocab_size] == ["embedding"]


def test_a_model_with_code_from_outside_is_read_where_it_is_registered(
    distant: str, model_folder: Path, model_info: ModelInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(model_info.model, attention=distant)
    written = Transformer(config)
    tokenizer_json = (model_folder / "tokenizer.json").read_bytes()
    write_again(tmp_path / "m", replace(model_info, model=config), written, tokenizer_json)
    model, _, _ = load_model(tmp_path / "m", CPU)
    slopes = "decoder.0.cross_attention.slopes_H"
    assert torch.equal(model.state_dict()[slopes], written.state_dict()[slopes])
    monkeypatch.setattr(ATTENTIONS, "_entries", {"softmax": MultiHeadAttention})
    with pytest.raises(UserError) as refused:
        load_model(tmp_path / "m", CPU)
    assert str(refused.value) == (
        f"in {tmp_path / 'm' / 'config.json'}, model.attention is 'distant': "
        "pass the file that registers this attention with --import (docs/extending.md), or choose one of softmax"
    )


def test_half_precision_is_written_as_fp32_and_loaded_as_asked(
    model_folder: Path, model_info: ModelInfo, random_model: Transformer, tmp_path: Path
) -> None:
    weights = {name: tensor.bfloat16() for name, tensor in random_model.state_dict().items()}
    tokenizer_json = (model_folder / "tokenizer.json").read_bytes()
    write_model_folder(tmp_path / "m", info=model_info, weights=weights, tokenizer_json=tokenizer_json)
    stored = safetensors.torch.load_file(tmp_path / "m" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.float32}
    model, _, _ = load_model(tmp_path / "m", CPU, torch.bfloat16)
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.bfloat16}


def test_the_card_says_what_is_inside(
    model_folder: Path, model_info: ModelInfo, random_model: Transformer, tmp_path: Path
) -> None:
    card = (model_folder / "README.md").read_text()
    assert "Trained on synthetic text" in card
    assert "toy grammar" in card
    assert "steps 100, 200" in card
    write_again(tmp_path / "m", replace(model_info, synthetic=False, corpus="wmt14"), random_model)
    assert "synthetic" not in (tmp_path / "m" / "README.md").read_text()


def test_notes_are_lines_of_the_card(model_info: ModelInfo, random_model: Transformer, tmp_path: Path) -> None:
    weights = dict(random_model.state_dict())
    write_model_folder(tmp_path / "m", info=model_info, weights=weights, tokenizer_json=b"{}", notes=["one", "two"])
    card = (tmp_path / "m" / "README.md").read_text()
    assert "before it splits it into pieces\n- one\n- two\n\nSet `MODEL`" in card


def test_an_empty_folder_is_filled(tmp_path: Path, model_info: ModelInfo, random_model: Transformer) -> None:
    (tmp_path / "m").mkdir()
    write_again(tmp_path / "m", model_info, random_model)
    assert read_model_info(tmp_path / "m") == model_info


def test_other_content_is_refused_and_kept(copy: Path, model_info: ModelInfo, random_model: Transformer) -> None:
    (copy / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="holds files that are not of a model"):
        write_again(copy, model_info, random_model)
    assert (copy / "notes.txt").read_text() == "mine"
    file = copy / "notes.txt"
    with pytest.raises(UserError, match="is not a folder"):
        write_again(file, model_info, random_model)


@pytest.mark.parametrize("was_killed", [False, True])
def test_a_failed_write_leaves_the_older_model(
    was_killed: bool, copy: Path, model_info: ModelInfo, random_model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if a writer was killed between its renames: the next one puts the older model back."""

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    def kill() -> None:
        if was_killed:
            shutil.copytree(copy, copy.parent / ".model.x1y2")
            copy.rename(copy.parent / ".model.x1y2.old")

    kill()
    with monkeypatch.context() as patched:
        patched.setattr(module, "whole_path", fail)
        with pytest.raises(UserError, match="No space left"):
            write_again(copy, replace(model_info, steps=(7,)), random_model)
    assert load_model(copy, CPU)[2] == model_info
    assert [file.name for file in copy.parent.iterdir()] == ["model"]
    kill()
    write_again(copy, replace(model_info, steps=(7,)), random_model)
    assert read_model_info(copy).steps == (7,)
    assert [file.name for file in copy.parent.iterdir()] == ["model"]


IN_PLACE_OF_A_MODEL = (
    *("model/config.json", "model/model.safetensors", "outer/config.json"),
    *("outer/model/config.json", "outer/model/model.safetensors"),
    *("hub/config.json", "hub/model.safetensors", "data/index.json", "notes.txt"),
    *("run/metrics.jsonl", "run/weights/step-00000001.safetensors", "my run/config.json", "my run/weights/x"),
    *("early/config.json", "early/metrics.jsonl", "half/config.json", "empty/folder/x"),
    *(f"run/checkpoints/step-00000001/{name}" for name in ("manifest.json", "state.json", "part-0.safetensors")),
    *(f"other/{name}" for name in ("pytorch_model.bin", "model.npz", "checkpoint_best.pt")),
)
WRITE_AGAIN = r"write the folder again with dist-transformer average, or check the path$"
AVERAGE_RUN = r"make a model from that run with .* average --run-dir {place}/run --out .*/run/model$"
ONLY_OURS = r"only models that dist-transformer wrote are read, so train one with dist-transformer train, or convert a"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("modle", r"it does not exist\): check the path, or make a"),
        ("empty", rf"it has no config.json\): {WRITE_AGAIN}"),
        ("half", rf"it has no model.safetensors\): {WRITE_AGAIN}"),
        ("outer", r"it has no model.safetensors\): use the model folder in it, {place}/outer/model$"),
        ("early", r"it is a run folder without weights\): average the run after its first save$"),
        ("data", r"it is a data folder\): use a folder that dist-transformer average wrote$"),
        ("model/model.safetensors", r"it is a file of one\): use its folder, {place}/model$"),
        ("run/weights/step-00000001.safetensors", r"it is a weight file of a run\): .* average --checkpoints {given}"),
        ("run/checkpoints/step-00000001", r"it is a checkpoint\): .* average --checkpoints {given} --out MODEL$"),
        ("run/checkpoints", r"it is the checkpoints of a run\): " + AVERAGE_RUN),
        ("run", r"it has no config.json\): make one from this run with .* average --run-dir {place}/run"),
        # As a shell takes it, with the interpreter.
        ("my run", r".*(m dist_|dist-)transformer average --run-dir '{place}/my run' --out '{place}/my run/model'$"),
        ("other/pytorch_model.bin", rf"it is a weight file of another library\): {ONLY_OURS}"),
        ("other", rf"it holds checkpoint_best.pt, weights of another library\): {ONLY_OURS}"),
        ("hub", rf"it is a model for transformers\): {ONLY_OURS}"),
        ("notes.txt", r"it is a file\): use a folder that dist-transformer average wrote$"),
    ],
)
def test_what_people_have_in_place_of_a_model(given: str, message: str, tmp_path: Path) -> None:
    for name in IN_PLACE_OF_A_MODEL:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text('{"model_type": "marian"}' if name == "hub/config.json" else "{}")
    place, path = (re.escape(str(each)) for each in (tmp_path, tmp_path / given))
    message = message.replace("{place}", place).replace("{given}", path)
    with pytest.raises(UserError, match=rf"^{path} is not a model folder \({message}"):
        read_model_info(tmp_path / given)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("format_version", 3, "has format 3, and this version reads 2: update dist_transformer"),
        ("format_version", 1, "has format 1, .* has no hash of the weights, so write the folder again with dist"),
        ("surplus", 1, "surplus"),
        ("model", {"width": -1}, "width is -1"),
        ("weights", {}, "sha256"),
    ],
)
def test_a_wrong_config_is_refused(copy: Path, key: str, value: object, message: str) -> None:
    restate(copy, **{key: value})
    with pytest.raises(UserError, match=message):
        load_model(copy, CPU)


def test_what_killed_writers_left_goes(copy: Path, model_info: ModelInfo, random_model: Transformer) -> None:
    """Folders of their names, unless a writer holds them; of others nothing."""
    killed, held, foreign = (copy.parent / f".model.{mark * 32}" for mark in ("a", "b", "x"))
    for folder in (killed, held, foreign, killed.with_name(f"{killed.name}.old"), held.with_name(f"{held.name}.old")):
        folder.mkdir()
        (folder / "model.safetensors").touch()
    handle = os.open(held, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    write_again(copy, replace(model_info, steps=(7,)), random_model)
    left = {path.name for path in copy.parent.iterdir()}
    assert left == {"model", held.name, f"{held.name}.old", foreign.name}
    os.close(handle)
    write_again(copy, model_info, random_model)
    assert {path.name for path in copy.parent.iterdir()} == {"model", foreign.name}


def test_two_writers_at_once(copy: Path, model_info: ModelInfo, random_model: Transformer) -> None:
    """The second one begins when the first has written half, or when the older model has stepped aside."""
    with folder_beside(copy) as first:
        (first / "model.safetensors").touch()
        write_again(copy, replace(model_info, steps=(7,)), random_model)
        assert (first / "model.safetensors").exists()
        copy.rename(first.with_name(f"{first.name}.old"))
        write_again(copy, replace(model_info, steps=(8,)), random_model)
        assert first.with_name(f"{first.name}.old").exists() or read_model_info(copy).steps == (8,)
        assert (first / "model.safetensors").exists()
    assert not first.exists()


def test_names_have_no_power_over_the_card(tmp_path: Path, model_info: ModelInfo, random_model: Transformer) -> None:
    hostile = 'de\n---\nlicense: "mit"\x1b[2J'
    info = replace(model_info, source_language="nor", target_language=hostile, corpus="a\n# b <script> [x](y) \x1b")
    write_again(tmp_path / "m", info, random_model)
    card = (tmp_path / "m/README.md").read_text()
    assert ModelCard(card).data.to_dict() == {
        "language": ["no", hostile],
        "library_name": "dist_transformer",
        "pipeline_tag": "translation",
    }
    assert r"- Training data: `a # b <script> [x](y) \x1b` (synthetic)" in card
    assert "\x1b" not in card


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("config.json", "config.json"),
        ("model.safetensors", r"model.safetensors is damaged \(its SHA-256 is not what config.json states\)"),
        ("tokenizer.json", "tokenizer.json is not the tokenizer"),
    ],
)
def test_one_flipped_bit_anywhere_and_a_missing_file_are_found(copy: Path, name: str, message: str) -> None:
    """In the header and in the numbers, of names and of values."""
    whole = (copy / name).read_bytes()
    for place in np.linspace(0, len(whole) - 1, 40).astype(int):
        content = bytearray(whole)
        content[place] ^= 1
        (copy / name).write_bytes(content)
        with pytest.raises(UserError, match=message):
            load_model(copy, CPU)
    (copy / name).write_bytes(whole)
    load_model(copy, CPU)
    (copy / name).unlink()
    with pytest.raises(UserError, match=name):
        load_model(copy, CPU)


def test_weights_that_are_not_finite_are_not_written(
    tmp_path: Path, model_info: ModelInfo, random_model: Transformer
) -> None:
    """1e300 is finite until it is fp32."""
    for number in (float("nan"), 1e300):
        weights = {name: tensor.double() for name, tensor in random_model.state_dict().items()}
        weights["embedding"] = weights["embedding"].clone()
        weights["embedding"][2, 3] = number
        with pytest.raises(UserError, match="is not written, because 'embedding' holds numbers that are not finite"):
            write_model_folder(tmp_path / "m", info=model_info, weights=weights, tokenizer_json=b"{}")
    assert list(tmp_path.iterdir()) == []
