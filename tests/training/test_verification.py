"""A run folder made by hand, then damaged in one place at a time: which check finds it, and what it says."""

import dataclasses
import hashlib
import io
import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dist_transformer.config import PRESETS, ModelConfig, to_plain
from dist_transformer.errors import UserError
from dist_transformer.files import sha256_of
from dist_transformer.model.transformer import Transformer
from dist_transformer.training.checkpoint import Retention, save_checkpoint
from dist_transformer.training.engine import EMA, MOMENTS, ParameterState
from dist_transformer.training.ledger import Ledger, read_ledger
from dist_transformer.training.progress import Progress
from dist_transformer.training.run_folder import describe_run, write_settings
from dist_transformer.training.stored_tensors import parameter_shapes
from dist_transformer.training.verification import verify_run

MODEL = ModelConfig(
    width=8, heads=2, ffn_width=8, encoder_layers=1, decoder_layers=1, max_positions=16, vocab_size=5, norm="pre"
)
NEWEST = "checkpoints/step-00000004"
PART, WEIGHTS = f"{NEWEST}/part-00000.safetensors", "weights/step-00000004.safetensors"


@pytest.fixture(scope="module")
def sound_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five steps, saved after two and four of them."""
    data = tmp_path_factory.mktemp("data")
    path = data.with_name("sound run")
    (data / "index.json").write_text("{}")
    (data / "tokenizer.json").write_text('{"pieces": []}')
    config = dataclasses.replace(PRESETS["tiny"], data=(str(data),), run_dir=path, model=MODEL)
    write_settings(path, describe_run(config, [data], {"zero_optimization": {"stage": 1}}), data / "tokenizer.json")
    ledger = Ledger(path / "ledger.jsonl")
    for step in range(1, 6):
        ledger.add(step, pair_hash=7 * step, target_tokens=100 + step)
        ledger.flush()
        if step % 2 == 0:
            save(path, step, ledger.chain, target_tokens=sum(range(101, 101 + step)))
    return path


@pytest.fixture
def run(sound_run: Path, tmp_path: Path) -> Path:
    """One to damage."""
    return Path(shutil.copytree(sound_run, tmp_path / "a run"))


def save(path: Path, step: int, chain: str, *, target_tokens: int, ema_decay: float = 0.0) -> None:
    torch.manual_seed(step)
    kept = (*MOMENTS, EMA) if ema_decay > 0 else MOMENTS
    described = {
        "model": to_plain(MODEL),
        "tokenizer_sha256": hashlib.sha256(b'{"pieces": []}').hexdigest(),
        "ema_decay": ema_decay,
    }
    save_checkpoint(
        path,
        [
            ParameterState(name=name, weight=parameter.data, moments=dict.fromkeys(kept, parameter.data * 0))
            for name, parameter in Transformer(MODEL).named_parameters()
        ],
        {**Progress(step=step, ledger_chain=chain, target_tokens=target_tokens).to_json(), **described},
        retention=Retention(checkpoints=9, weights=9),
        weights_metadata={"step": json.dumps(step)},
    )


def failures(run: Path) -> dict[str, str]:
    return {check.what: check.detail for check in verify_run(run) if not check.passed}


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def seal(checkpoint: Path) -> None:
    """State in the manifest what is there, as a damaged writer, or somebody with bad intent, would."""
    files = {
        file.name: {"bytes": file.stat().st_size, "sha256": sha256_of(file)}
        for file in checkpoint.iterdir()
        if file.name != "manifest.json"
    }
    edit_json(checkpoint / "manifest.json", files=files)


def flip(path: Path, at: int = -1) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_a_sound_run(run: Path) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    checks = verify_run(run)
    assert [check.what for check in checks if check.passed] == [
        "settings",
        "files",
        "ledger",
        "checkpoint step-00000002",
        "checkpoint step-00000004",
        "latest",
        "weights",
    ]
    assert len(checks) == 7
    details = {check.what: check.detail for check in checks}
    assert details["ledger"] == "unbroken from step 1 to 5, 515 target tokens"
    assert details["latest"] == "names step-00000004, which is whole"
    assert details["weights"].startswith("2 file(s)")
    assert details["weights"].endswith("; 2 equal to a checkpoint's")
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_the_shapes_of_a_model_by_hand() -> None:
    shapes = parameter_shapes(MODEL)
    assert shapes["embedding"] == (5, 8)
    assert shapes["encoder_norm.weight"] == (8,)
    assert "positions.table" not in shapes
    assert parameter_shapes(dataclasses.replace(MODEL, positions="learned"))["positions.table"] == (16, 8)
    assert parameter_shapes(dataclasses.replace(MODEL, tie_embeddings=False))["output_projection"] == (5, 8)


def test_what_is_no_run_folder(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(UserError, match=r"is not a run folder .* give the --run-dir of a training"):
            verify_run(path)


def test_a_flipped_byte_of_a_checkpoint(run: Path) -> None:
    flip(run / PART)
    found = failures(run)
    assert found.keys() == {"checkpoint step-00000004", "latest"}
    assert f"{run / PART} is damaged" in found["checkpoint step-00000004"]
    assert "names step-00000004, which is not whole" in found["latest"]


@pytest.mark.parametrize("name", ["state.json", "part-00000.safetensors", "manifest.json"])
def test_a_file_of_a_checkpoint_is_missing_or_cut(run: Path, name: str) -> None:
    content = (run / NEWEST / name).read_bytes()
    (run / NEWEST / name).write_bytes(content[:-5])
    assert name.partition(".")[0] in failures(run)["checkpoint step-00000004"]
    (run / NEWEST / name).unlink()
    assert name.partition(".")[0] in failures(run)["checkpoint step-00000004"]


@pytest.mark.parametrize("name", ["../../../secret", "..", "/etc/hostname", "", ".", "sub/part", "a\0b"])
def test_a_manifest_that_leads_elsewhere(run: Path, name: str) -> None:
    (run.parent / "secret").write_text("x")
    entry = {"bytes": 1, "sha256": hashlib.sha256(b"x").hexdigest()}
    manifest = json.loads((run / NEWEST / "manifest.json").read_text())
    edit_json(run / NEWEST / "manifest.json", files={**manifest["files"], name: entry})
    assert "is missing or not a plain file" in failures(run)["checkpoint step-00000004"]


@pytest.mark.parametrize(
    "place", [PART, f"{NEWEST}/manifest.json", NEWEST, "checkpoints/latest", "checkpoints", "ledger.jsonl"]
)
def test_a_link_is_not_followed(run: Path, place: str) -> None:
    """What it leads to is sound, and still refused, by the general check and where it would be read."""
    (run / place).rename(run.parent / "elsewhere")
    (run / place).symlink_to(run.parent / "elsewhere")
    found = failures(run)
    assert f"{run / place} is a link" in found["files"]
    assert len(found) >= 2


@pytest.mark.parametrize("place", ["config.json", "tokenizer.json"])
def test_settings_or_tokenizer_behind_a_link(run: Path, place: str) -> None:
    (run / place).rename(run.parent / "elsewhere")
    (run / place).symlink_to(run.parent / "elsewhere")
    assert f"{run / place} is a link, a folder or no plain file" in "".join(failures(run).values())


def rewrite(file: Path, change: Callable[[dict[str, torch.Tensor]], None], **metadata: str) -> None:
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata=metadata or None)


def set_nan(tensors: dict[str, torch.Tensor]) -> None:
    tensors[min(tensors)].view(-1)[-1] = float("nan")


def set_infinite(tensors: dict[str, torch.Tensor]) -> None:
    tensors[min(tensors)].view(-1)[0] = float("-inf")


def remove(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[min(tensors)]


def add(tensors: dict[str, torch.Tensor]) -> None:
    tensors["weight/extra"] = torch.zeros(2)


def reshape(tensors: dict[str, torch.Tensor]) -> None:
    tensors[min(tensors)] = tensors[min(tensors)].unsqueeze(0)


def halve(tensors: dict[str, torch.Tensor]) -> None:
    tensors[min(tensors)] = tensors[min(tensors)].bfloat16()


TENSORS = [
    (set_nan, "holds values that are not finite"),
    (set_infinite, "holds values that are not finite"),
    (remove, "is in none of the files"),
    (add, "is no parameter of the model in config.json"),
    (reshape, "where config.json gives"),
    (halve, "is torch.bfloat16, not torch.float32"),
]


@pytest.mark.parametrize(("change", "message"), TENSORS)
def test_tensors_of_a_checkpoint_with_a_true_manifest(
    run: Path, change: Callable[[dict[str, torch.Tensor]], None], message: str
) -> None:
    rewrite(run / PART, change)
    seal(run / NEWEST)
    assert message in failures(run)["checkpoint step-00000004"]


@pytest.mark.parametrize(("change", "message"), TENSORS)
def test_tensors_of_a_weight_file(run: Path, change: Callable[[dict[str, torch.Tensor]], None], message: str) -> None:
    rewrite(run / WEIGHTS, change, step="4")
    found = failures(run)
    assert found.keys() == {"weights"}
    assert message in found["weights"]


def test_a_tensor_in_two_parts(run: Path) -> None:
    save_file({"weight/embedding": load_file(run / PART)["weight/embedding"]}, run / NEWEST / "part-00001.safetensors")
    seal(run / NEWEST)
    assert "'weight/embedding', and so does" in failures(run)["checkpoint step-00000004"]


@pytest.mark.parametrize("content", [b"", b"x" * 100, b"\xff" * 8 + b"{}", b"\x02" + b"\0" * 7 + b"{]"])
def test_a_weight_file_that_is_none(run: Path, content: bytes) -> None:
    (run / WEIGHTS).write_bytes(content)
    assert "cannot be read as safetensors" in failures(run)["weights"]


def test_a_weight_file_is_compared_with_the_checkpoint(run: Path) -> None:
    """One bit of one weight: nothing else tells, for weight files have no hash."""
    flip(run / WEIGHTS, -4)
    assert "is not what the checkpoint of the step holds" in failures(run)["weights"]


def test_averaged_weights(run: Path) -> None:
    chain = read_ledger(run / "ledger.jsonl")[3]["chain"]
    save(run, 4, chain, target_tokens=410, ema_decay=0.9)
    details = {check.what: check.detail for check in verify_run(run) if check.passed}
    assert len(details) == 7
    assert details["weights"].startswith("3 file(s)")
    assert details["weights"].endswith("; 3 equal to a checkpoint's")
    file = run / "weights" / "ema-00000004.safetensors"
    flip(file, -4)
    assert f"{file}: " in failures(run)["weights"]
    file.unlink()
    rewrite(run / PART, lambda tensors: [tensors.pop(name) for name in list(tensors) if name.startswith("ema/")])
    seal(run / NEWEST)
    assert "tensor 'ema/" in failures(run)["checkpoint step-00000004"]
    assert "is in none of the files" in failures(run)["checkpoint step-00000004"]


def test_a_weight_file_under_another_name(run: Path) -> None:
    (run / WEIGHTS).rename(run / "weights" / "step-00000003.safetensors")
    assert "step-00000003.safetensors states step '4'" in failures(run)["weights"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step": 3}, "states step 3: the folder was renamed"),
        ({"ledger_chain": "0" * 64}, "does not continue the ledger at step 4"),
        ({"target_tokens": 409}, "does not continue the ledger at step 4 (409 target tokens, the ledger has 410)"),
        ({"model": {}}, "states another model than config.json"),
        ({"tokenizer_sha256": "0" * 64}, "states another tokenizer"),
    ],
)
def test_a_state_that_is_not_this_runs(run: Path, changes: dict[str, Any], message: str) -> None:
    edit_json(run / NEWEST / "state.json", **changes)
    seal(run / NEWEST)
    assert message in failures(run)["checkpoint step-00000004"]


def test_a_state_without_its_fields(run: Path) -> None:
    (run / NEWEST / "state.json").write_text("{}")
    seal(run / NEWEST)
    assert "cannot be read (KeyError: 'step')" in failures(run)["checkpoint step-00000004"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("step-00000009\n", "names step-00000009, which does not exist"),
        ("step-00000002\n", None),
        ("../checkpoints/step-00000004\n", "not the name of a checkpoint"),
        ("step-00000004/../step-00000004\n", "not the name of a checkpoint"),
        ("step-00000004\nstep-00000002\n", "not the name of a checkpoint"),
        ("", "not the name of a checkpoint"),
        (b"\xff\xfe", "cannot be read (UnicodeDecodeError"),
    ],
)
def test_the_pointer(run: Path, content: str | bytes, message: str | None) -> None:
    """An older whole checkpoint is right: a run that is killed between renaming and pointing leaves it so."""
    (run / "checkpoints/latest").write_bytes(content.encode() if isinstance(content, str) else content)
    found = failures(run)
    assert found.keys() == ({"latest"} if message else set())
    assert message is None or message in found["latest"]


def test_no_pointer_and_no_checkpoints(run: Path) -> None:
    (run / "checkpoints/latest").unlink()
    assert "latest is missing" in failures(run)["latest"]
    (run / "checkpoints").rename(run.parent / "gone")
    assert "holds no checkpoint: nothing can be resumed" in failures(run)["latest"]


def ledger_lines(run: Path) -> list[str]:
    return (run / "ledger.jsonl").read_text().splitlines(keepends=True)


@pytest.mark.parametrize(
    ("change", "broken"),
    [
        (lambda lines: [*lines[:2], lines[2].replace('"target_tokens": 103', '"target_tokens": 104'), *lines[3:]], 3),
        (lambda lines: [lines[0], *lines[2:]], 2),
        (lambda lines: lines[1:], 1),
        (lambda lines: [*lines[:4], lines[4][:20]], 5),
    ],
)
def test_an_edited_ledger(run: Path, change: Callable[[list[str]], list[str]], broken: int) -> None:
    (run / "ledger.jsonl").write_text("".join(change(ledger_lines(run))))
    found = failures(run)
    assert f"line {broken}: the chain is broken" in found["ledger"]
    assert "not checked against the ledger" in found["checkpoint step-00000002"]


def test_a_ledger_that_lost_its_end(run: Path) -> None:
    lines = ledger_lines(run)
    (run / "ledger.jsonl").write_text("".join(lines[:4]))
    assert failures(run) == {}
    (run / "ledger.jsonl").write_text("".join(lines[:3]))
    found = failures(run)
    assert found.keys() == {"checkpoint step-00000004", "latest"}
    assert "is of step 4, and the ledger ends at step 3" in found["checkpoint step-00000004"]


def test_a_ledger_rewritten_with_a_chain_of_its_own(run: Path) -> None:
    """Its chain holds: only the checkpoints tell."""
    (run / "ledger.jsonl").unlink()
    ledger = Ledger(run / "ledger.jsonl")
    for step in range(1, 6):
        ledger.add(step, pair_hash=7 * step + (step == 3), target_tokens=100 + step)
    ledger.flush()
    found = failures(run)
    assert found.keys() == {"checkpoint step-00000004", "latest"}
    assert "does not continue the ledger at step 4" in found["checkpoint step-00000004"]


def test_an_empty_ledger_and_none(run: Path) -> None:
    (run / "ledger.jsonl").write_text("")
    assert "no step of this run is proven" in failures(run)["ledger"]
    (run / "ledger.jsonl").unlink()
    assert "ledger.jsonl is missing" in failures(run)["ledger"]


def zipped_pickle() -> bytes:
    """As torch writes its checkpoints."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({}))
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("optimizer.pt", b"anything"),
        ("samples/notes.json", pickle.dumps({"a": 1})),
        ("tensorboard/events", pickle.dumps([1], protocol=2)),
        ("model.bin", zipped_pickle()),
    ],
)
def test_a_pickle(run: Path, name: str, content: bytes) -> None:
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).write_bytes(content)
    found = failures(run)
    assert found.keys() == {"files"}
    assert f"{run / name} is a pickle" in found["files"]


def test_a_zip_without_a_pickle_is_none(run: Path) -> None:
    with zipfile.ZipFile(run / "samples.zip", "w") as archive:
        archive.writestr("a.txt", "a")
    assert failures(run) == {}


@pytest.mark.parametrize(
    "name", ["checkpoints/.step-00000006.tmp", "weights/.step-00000006.safetensors.tmp", "config.json.tmp"]
)
def test_what_a_killed_writer_leaves(run: Path, name: str) -> None:
    (run / name).write_text("")
    assert f"{run / name} was left by a writer that was killed" in failures(run)["files"]


@pytest.mark.parametrize(
    "name", ["checkpoints/step-4", "checkpoints/notes.txt", "weights/best.safetensors", "weights/ema-4.safetensors"]
)
def test_what_is_no_file_of_a_run(run: Path, name: str) -> None:
    (run / name).write_text("")
    assert f"{run / name} is no file of a run" in failures(run)["files"]


def test_a_pipe_stops_nothing(run: Path) -> None:
    os.mkfifo(run / "pipe")
    assert "pipe is a link or no plain file" in failures(run)["files"]


def test_checks_that_need_the_settings_say_so(run: Path) -> None:
    (run / "config.json").write_text("{")
    found = failures(run)
    assert "cannot be read as JSON" in found["settings"]
    assert found["weights"] == "not checked, for config.json cannot be read (above)"
    edit = {"seed": "one"}
    (run / "config.json").write_text(json.dumps(edit))
    assert "config.json: seed must be int, not 'one'" in failures(run)["settings"]


def test_a_data_folder_that_is_none(run: Path, tmp_path: Path) -> None:
    found = {check.what: check.detail for check in verify_run(run, [str(tmp_path / "none")]) if not check.passed}
    assert found.keys() == {"data", "sentences"}
    assert found["sentences"] == "not compared, for the data folder cannot be read (above)"
