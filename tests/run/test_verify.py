"""A run folder damaged in one place at a time: which check finds it, and what it says."""

import dataclasses
import hashlib
import pickle
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dist_transformer.base.errors import UserError
from dist_transformer.base.locks import exclusive
from dist_transformer.config.plain import read_json, to_plain
from dist_transformer.model.transformer import parameter_shapes
from dist_transformer.run.folder import settings_of
from dist_transformer.run.verify import verify_run
from tests.run.small_run import MODEL, SmallRun
from tests.run.sound_run import NEWEST, PART, WEIGHTS, edit_json, failures, seal
from tests.support.damage import flip

Damage = Callable[[Path], object]


def test_a_sound_run(run: Path) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    checks = verify_run(run)
    assert [check.name for check in checks if check.passed] == [
        "settings",
        "files",
        "ledger",
        "checkpoint step-00000002",
        "checkpoint step-00000004",
        "latest",
        "weights",
    ]
    assert len(checks) == 7
    details = {check.name: check.found for check in checks}
    assert details["ledger"] == "unbroken from step 1 to 5, 515 target tokens, shards left out 1 times"
    assert details["latest"] == "names step-00000004, which is intact"
    assert details["weights"].startswith("2 file(s)")
    assert details["weights"].endswith("; 2 equal to a checkpoint's")
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


@pytest.fixture
def model(run: Path, model_folder: Path) -> Path:
    """A trained model inside the run."""
    return Path(shutil.copytree(model_folder, run / "model"))


def test_a_sound_model_inside_the_run(run: Path, model: Path) -> None:
    shutil.copytree(model, run / "models" / "best")
    shutil.copytree(model, run / ".model.0123")
    checks = verify_run(run)
    assert [check.name for check in checks[7:]] == ["model/", "models/best/"]
    assert failures(run) == {}
    assert checks[7].found == ("model of steps 100, 200: 24,768 parameters, all finite, hashes match config.json")


@pytest.mark.parametrize(
    ("damage", "name"),
    [(flip, "model.safetensors"), (flip, "tokenizer.json"), (flip, "config.json"), (Path.unlink, "tokenizer.json")],
)
def test_a_file_of_a_model_is_damaged_or_missing(run: Path, model: Path, damage: Damage, name: str) -> None:
    damage(model / name)
    found = failures(run)
    assert found.keys() == {"model/"}
    assert str(model / name) in found["model/"]


def test_an_export_for_transformers_is_no_model_of_ours(run: Path, model: Path) -> None:
    (model / "config.json").write_text('{"model_type": "marian"}')
    assert failures(run) == {}
    assert len(verify_run(run)) == 7


def test_what_is_no_run_folder(tmp_path: Path, run: Path) -> None:
    (run / "model.safetensors").touch()
    with pytest.raises(UserError, match=r"is not a run folder but a model folder .* use the --run-dir of a training"):
        verify_run(run)
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(UserError, match=r"is not a run folder .* use the --run-dir of a training"):
            verify_run(path)


def test_a_flipped_byte_of_a_checkpoint(run: Path) -> None:
    flip(run / PART)
    found = failures(run)
    assert found.keys() == {"checkpoint step-00000004", "latest"}
    assert f"{run / PART} is damaged" in found["checkpoint step-00000004"]
    assert "names step-00000004, which is not intact" in found["latest"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ledger_chain": "0" * 64}, "does not continue the ledger at step 4"),
        ({"target_tokens": 409}, "does not continue the ledger at step 4 (409 target tokens, the ledger has 410)"),
        ({"left_out": []}, "lists other left-out shards than the ledger"),
        ({"model": {**to_plain(MODEL), "dropout": 0.5}}, "states another model than config.json"),
        ({"tokenizer_sha256": "0" * 64}, "states another tokenizer"),
    ],
)
def test_a_state_that_is_not_this_runs(run: Path, changes: dict[str, Any], message: str) -> None:
    edit_json(run / NEWEST / "state.json", **changes)
    seal(run / NEWEST)
    assert message in failures(run)["checkpoint step-00000004"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("step-00000009\n", "names step-00000009, which does not exist"),
        ("step-00000002\n", None),
        ("../checkpoints/step-00000004\n", "not the name of a checkpoint"),
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


def test_an_edited_ledger_and_one_that_lost_its_end(run: Path) -> None:
    ledger = run / "ledger.jsonl"
    lines = ledger.read_text().splitlines(keepends=True)
    ledger.write_text("".join(lines).replace('"target_tokens": 103', '"target_tokens": 104'))
    found = failures(run)
    assert "is broken at line 3: the file was edited or damaged" in found["ledger"]
    assert "not checked against the ledger" in found["checkpoint step-00000002"]
    ledger.write_text("".join(lines[:4]))
    assert failures(run) == {}
    ledger.write_text("".join(lines[:3]))
    found = failures(run)
    assert found.keys() == {"checkpoint step-00000004", "latest"}
    assert "is of step 4, but the ledger ends at step 3" in found["checkpoint step-00000004"]


def test_a_data_folder_that_is_none(run: Path, tmp_path: Path) -> None:
    found = {check.name: check.found for check in verify_run(run, [str(tmp_path / "none")]) if not check.passed}
    assert found.keys() == {"data", "sentences"}
    assert found["sentences"] == "not compared: the data folder cannot be read (see above)"


def test_another_number_of_data_folders_is_refused(run: Path, tmp_path: Path) -> None:
    found = {check.name: check.found for check in verify_run(run, ["a", "b"]) if not check.passed}
    assert found["data"] == "the run was trained on 1 data folder(s), not 2: pass its --data"


def test_a_run_in_progress_is_checked_as_far_as_it_is_committed(run: Path) -> None:
    """Its lock is held; a checkpoint, a ledger line and other files are being written."""
    (run / "checkpoints" / ".step-00000006.0.tmp").mkdir()
    (run / "checkpoints" / ".step-00000006.0.tmp" / "part-00000.safetensors").write_bytes(b"half")
    (run / ".config.json.0.tmp").touch()
    with (run / "ledger.jsonl").open("a") as ledger:
        ledger.write('{"step": 6, "ha')
    assert failures(run).keys() >= {"files", "ledger"}
    with exclusive(run / "lock"):
        checks = verify_run(run)
        assert [check.name for check in checks if not check.passed] == []
        assert checks[0].found == "in progress: only committed files are checked"
        flip(run / PART)
        assert failures(run).keys() == {"checkpoint step-00000004", "latest"}
    assert "files" in failures(run)


def test_the_shapes_of_a_model_by_hand() -> None:
    shapes = parameter_shapes(MODEL)
    assert shapes["embedding"] == (5, 8)
    assert shapes["encoder_norm.weight"] == (8,)
    assert "positions.table" not in shapes
    assert parameter_shapes(dataclasses.replace(MODEL, positions="learned"))["positions.table"] == (16, 8)
    assert parameter_shapes(dataclasses.replace(MODEL, tie_embeddings="none"))["output_projection"] == (5, 8)


def record(file: Path) -> None:
    """Record the hash of a weight file as a save does."""
    line = f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n"
    sums = file.parent / "SHA256SUMS"
    others = [each for each in sums.read_text().splitlines(keepends=True) if not each.endswith(f" {file.name}\n")]
    sums.write_text("".join([*others, line]))


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-5])


def flip_and_record(file: Path) -> None:
    """One bit of one weight in a file with its hash, as of another run."""
    flip(file, -4)
    record(file)


def replace_letter(file: Path) -> None:
    """Change what the file says of itself, which no tensor shows."""
    file.write_bytes(file.read_bytes().replace(b"pre", b"pro"))


# Each kind of damage, the file, the check that finds it, and what that says.
DAMAGES: list[tuple[Damage, str, str, str]] = [
    *(
        (damage, f"{NEWEST}/{name}", "checkpoint step-00000004", name.partition(".")[0])
        for name in ("state.json", "part-00000.safetensors", "manifest.json")
        for damage in (cut, Path.unlink)
    ),
    (Path.unlink, "checkpoints/latest", "latest", "cannot be read (FileNotFoundError: "),
    (shutil.rmtree, "checkpoints", "latest", "holds no checkpoint: nothing can be resumed"),
    (Path.unlink, "ledger.jsonl", "ledger", "ledger.jsonl is missing"),
    (lambda file: file.write_text(""), "ledger.jsonl", "ledger", "no step of this run is proven"),
    (lambda file: file.write_text("{"), "config.json", "settings", "cannot be read as JSON"),
    (Path.unlink, "weights/SHA256SUMS", "weights", "is not in SHA256SUMS, so no save of this run wrote it"),
    (replace_letter, WEIGHTS, "weights", "its SHA-256 is not what SHA256SUMS states"),
    (flip_and_record, WEIGHTS, "weights", " from the checkpoint of the same step"),
    (
        lambda file: record(file.rename(file.with_name("step-00000003.safetensors"))),
        *(WEIGHTS, "weights", "step-00000003.safetensors states step 4"),
    ),
]


@pytest.mark.parametrize(("damage", "name", "check", "message"), DAMAGES)
def test_damage_is_found_by_its_check(run: Path, damage: Damage, name: str, check: str, message: str) -> None:
    damage(run / name)
    assert message in failures(run)[check]


@pytest.mark.parametrize("value", ["nan", "-inf"])
def test_values_that_are_not_finite(run: Path, value: str) -> None:
    """A training that diverged wrote them, with their hash."""
    tensors = load_file(run / WEIGHTS)
    tensors[min(tensors)].view(-1)[-1] = float(value)
    save_file(tensors, run / WEIGHTS, metadata={"step": "4"})
    record(run / WEIGHTS)
    assert "holds values that are not finite" in failures(run)["weights"]


def test_averaged_weights(run: Path) -> None:
    config = settings_of(read_json(run / "config.json"), run / "config.json")
    with ExitStack() as held:
        training = SmallRun(config.changed(run_dir=run, ema_decay=0.9), held, keep=9)
        training.save()
        training.reporter.close()
    details = {check.name: check.found for check in verify_run(run) if check.passed}
    assert len(details) == 7
    assert details["weights"].startswith("3 file(s)")
    assert details["weights"].endswith("; 3 equal to a checkpoint's")
    file = run / "weights" / "ema-00000004.safetensors"
    flip(file, -4)
    assert f"{file} is damaged" in failures(run)["weights"]
    record(file)
    assert f"{file} differs in " in failures(run)["weights"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("optimizer.pt", b"anything"),
        ("samples/notes.json", pickle.dumps({"a": 1})),
        ("tensorboard/events", pickle.dumps([1], protocol=2)),
        ("model.bin", None),
    ],
)
def test_a_pickle(run: Path, name: str, content: bytes | None) -> None:
    """One is in a zip, as torch writes its checkpoints."""
    (run / name).parent.mkdir(exist_ok=True)
    if content is None:
        torch.save({}, run / name)
    else:
        (run / name).write_bytes(content)
    found = failures(run)
    assert found.keys() == {"files"}
    assert f"{run / name} is a pickle" in found["files"]


def test_the_record_that_torch_writes_of_a_hang_may_be_a_pickle(run: Path) -> None:
    (run / "hangs").mkdir()
    (run / "hangs" / "nccl-rank-0").write_bytes(pickle.dumps({}))
    assert failures(run) == {}


KILLED = "is being written now, or a killed process left it"
NAMES = {
    **dict.fromkeys(["checkpoints/.step-00000006.tmp", "weights/.step-6.safetensors.tmp", "config.json.tmp"], KILLED),
    **dict.fromkeys(["checkpoints/step-4", "checkpoints/notes.txt"], "is not a file of a run"),
    **dict.fromkeys(["weights/best.safetensors", "weights/ema-4.safetensors"], "is not a file of a run"),
}


@pytest.mark.parametrize("name", NAMES)
def test_what_a_killed_writer_leaves_or_is_no_file_of_a_run(run: Path, name: str) -> None:
    (run / name).write_text("")
    assert f"{run / name} {NAMES[name]}" in failures(run)["files"]


def test_all_that_does_not_belong_is_named(run: Path) -> None:
    """Up to five, and how many more there are."""
    for number in range(7):
        (run / f"checkpoints/notes-{number}.txt").write_text("")
    found = failures(run)["files"]
    assert found.count("is not a file of a run: move it away") == 5
    assert found.endswith("; and 2 more")
