"""A run folder damaged in one place at a time: which check finds it, and what it says."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from dist_transformer.base.errors import UserError
from dist_transformer.base.locks import exclusive
from dist_transformer.config.plain import to_plain
from dist_transformer.run.verify import verify_run
from tests.run.small_run import MODEL
from tests.run.sound_run import NEWEST, PART, edit_json, failures, seal
from tests.support.damage import flip


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


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_flipped_bit_of_a_model(run: Path, model: Path, name: str) -> None:
    file = model / name
    flip(file)
    found = failures(run)
    assert found.keys() == {"model/"}
    assert str(file) in found["model/"]


def test_a_model_without_a_file(run: Path, model: Path) -> None:
    (model / "tokenizer.json").unlink()
    assert "tokenizer.json" in failures(run)["model/"]


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


@pytest.mark.parametrize("name", ["state.json", "part-00000.safetensors", "manifest.json"])
def test_a_file_of_a_checkpoint_is_missing_or_cut(run: Path, name: str) -> None:
    content = (run / NEWEST / name).read_bytes()
    (run / NEWEST / name).write_bytes(content[:-5])
    assert name.partition(".")[0] in failures(run)["checkpoint step-00000004"]
    (run / NEWEST / name).unlink()
    assert name.partition(".")[0] in failures(run)["checkpoint step-00000004"]


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


def test_no_pointer_and_no_checkpoints(run: Path) -> None:
    (run / "checkpoints/latest").unlink()
    assert "cannot be read (FileNotFoundError: " in failures(run)["latest"]
    (run / "checkpoints").rename(run.parent / "gone")
    assert "holds no checkpoint: nothing can be resumed" in failures(run)["latest"]


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


def test_an_empty_ledger_and_none(run: Path) -> None:
    (run / "ledger.jsonl").write_text("")
    assert "no step of this run is proven" in failures(run)["ledger"]
    (run / "ledger.jsonl").unlink()
    assert "ledger.jsonl is missing" in failures(run)["ledger"]


def test_checks_that_need_the_settings_say_so(run: Path) -> None:
    (run / "config.json").write_text("{")
    found = failures(run)
    assert "cannot be read as JSON" in found["settings"]


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
