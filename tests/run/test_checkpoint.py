"""Checkpoints in one process, of parameters made by hand, without an engine: what is in them, and which are kept."""

import hashlib
import json
import shutil
import subprocess
import threading
from pathlib import Path

import pytest
import safetensors.torch
import torch

from dist_transformer.run.checkpoint import writer as module
from dist_transformer.run.checkpoint.reader import (
    CheckpointReader,
    checkpoint_problem,
    newest_checkpoint,
    weight_hashes,
    weights_problem,
)
from dist_transformer.run.checkpoint.state import EMA, MOMENTS, ParameterState, copy_tensors
from dist_transformer.run.checkpoint.writer import CheckpointWriter, Retention
from tests.rights import wrong_rights
from tests.run.saving import PART, SHAPES, names, pointer, save, states
from tests.support.damage import flip


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "a run's folder"


def test_what_is_written(run: Path) -> None:
    writer = CheckpointWriter(run, config={"seed": 7})
    described = {"step": 20, "position": {"epoch": 1}, "tokenizer_sha256": "ab"}
    retention = Retention(checkpoints=1, weights=1)
    writer.start(states(20), described, retention=retention, weights_metadata={"step": "20"})
    assert writer.wait() is not None
    path = run / "checkpoints" / "step-00000020"
    assert names(run / "checkpoints") == ["latest", "step-00000020"]
    assert names(path) == ["manifest.json", PART, "state.json"]
    assert names(run / "weights") == ["SHA256SUMS", "step-00000020.safetensors"]
    assert pointer(run) == "step-00000020\n"
    state, manifest = (json.loads((path / name).read_text()) for name in ("state.json", "manifest.json"))
    for found in (state, manifest):
        assert {key: found[key] for key in described} == described
        assert found["format_version"] == 3
        assert set(found["versions"]) == {"python", "dist_transformer", "torch", "deepspeed"}
    assert manifest["config"] == {"seed": 7}
    contents = {name: (path / name).read_bytes() for name in (PART, "state.json")}
    assert manifest["files"] == {
        name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in contents.items()
    }
    assert checkpoint_problem(path) is None
    stored = safetensors.torch.load_file(path / PART)
    assert set(stored) == {f"{kind}/{name}" for kind in ("weight", *MOMENTS) for name in SHAPES}
    with safetensors.safe_open(run / "weights" / "step-00000020.safetensors", framework="pt") as opened:
        assert opened.metadata() == {"step": "20"}
        assert set(opened.keys()) == set(SHAPES)


def test_parts_have_about_equal_bytes() -> None:
    """Each parameter goes to the writer with the fewest bytes: 100 to rank 0, and 40 + 30 + 20 to rank 1."""
    sizes = {"a": 100, "b": 40, "c": 30, "d": 20}
    states = [ParameterState(name=name, weight=torch.ones(size), moments={}) for name, size in sizes.items()]
    for writers, own in (((0, 1), {"weight/a"}), ((0,), {f"weight/{name}" for name in sizes}), ((1, 2), set())):
        share, weights, averages = copy_tensors(states, writers)
        assert share.keys() == own
        assert weights.keys() == sizes.keys()
        assert not averages


def test_weight_files_have_their_hash_as_sha256sum_checks_it(run: Path) -> None:
    for step in (1, 2, 3):
        save(run, step, weights=2)
    command = ["sha256sum", "--check", "SHA256SUMS"]
    done = subprocess.run(command, check=False, cwd=run / "weights", capture_output=True, text=True)
    assert done.stdout.splitlines() == [f"step-0000000{step}.safetensors: OK" for step in (2, 3)], done.stderr
    file = run / "weights" / "step-00000003.safetensors"
    assert weights_problem(file) is None
    flip(file)
    assert weights_problem(file) == f"{file} is damaged (its SHA-256 is not what SHA256SUMS states)"
    # A file that was copied away has no hash beside it.
    assert weights_problem(file.rename(run / "copied.safetensors")) is None


def test_files_are_for_whom_the_umask_lets(run: Path, umask: int) -> None:
    save(run, 1)
    assert wrong_rights(run) == {}


def test_a_snapshot_does_not_see_what_training_does_next(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writing waits until every tensor that was given has another value."""
    given, trained = list(states(8)), threading.Event()
    monkeypatch.setattr(module, "save_file", lambda *a, **k: (trained.wait(30), safetensors.torch.save_file(*a, **k)))
    state = {"step": 8, "position": {"epoch": 1}}
    writer = CheckpointWriter(run)
    writer.start(given, state, retention=Retention(checkpoints=1, weights=1), weights_metadata={})
    assert writer.is_writing
    assert writer.poll(all_written=False) is None
    for parameter in given:
        parameter.weight.fill_(9.0)
        for moment in parameter.moments.values():
            moment.fill_(9.0)
    state["step"], state["position"]["epoch"] = 9, 9  # type: ignore[index]
    trained.set()
    saved = writer.wait()
    assert saved is not None
    assert 0 <= saved.stall <= saved.seconds
    reader = CheckpointReader(saved.path)
    stored = safetensors.torch.load_file(run / "weights" / "step-00000008.safetensors")
    for wanted in states(8):
        read = reader.parameter(wanted.name)
        assert (read.name, read.weight.dtype) == (wanted.name, torch.float32)
        for weight in (read.weight, reader.weight(wanted.name), stored[wanted.name]):
            assert torch.equal(weight, wanted.weight)
        assert list(read.moments) == list(MOMENTS)
        assert all(torch.equal(read.moments[key], wanted.moments[key]) for key in MOMENTS)
    assert (reader.state["step"], reader.state["position"]) == (8, {"epoch": 1})
    assert not writer.is_writing
    assert writer.poll(all_written=True) is None
    assert writer.wait() is None


def test_averaged_weights_have_a_file_of_their_own(run: Path) -> None:
    for step in (3, 6, 9):
        path = save(run, step, checkpoints=2, averaged=True)
    files = [f"{kind}-{step:08}.safetensors" for kind, steps in ((EMA, (6, 9)), ("step", (3, 6, 9))) for step in steps]
    assert names(run / "weights") == ["SHA256SUMS", *files]
    assert sorted(weight_hashes(run / "weights")) == files
    raw, averaged = (
        safetensors.torch.load_file(run / "weights" / f"{kind}-00000009.safetensors") for kind in ("step", EMA)
    )
    reader = CheckpointReader(path)
    for wanted in states(9):
        assert torch.equal(raw[wanted.name], wanted.weight)
        assert torch.equal(averaged[wanted.name], wanted.weight / 2 + 9)
        read = reader.parameter(wanted.name)
        assert list(read.moments) == [*MOMENTS, EMA]
        assert torch.equal(read.moments[EMA], averaged[wanted.name])
    save(run, 12, checkpoints=1)
    assert [name for name in names(run / "weights") if name.startswith(EMA)] == ["ema-00000009.safetensors"]


def test_the_newest_are_kept_each_by_its_own_number(run: Path) -> None:
    for step in (5, 10, 15, 20, 100):
        save(run, step, checkpoints=2, weights=3)
    assert names(run / "checkpoints") == ["latest", "step-00000020", "step-00000100"]
    assert names(run / "weights") == ["SHA256SUMS", *(f"step-{step:08}.safetensors" for step in (15, 20, 100))]
    assert pointer(run) == "step-00000100\n"


def test_what_is_removed_loses_its_name_first(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed in the middle of it, no half-removed folder looks like a checkpoint."""
    removed: list[str] = []
    original = shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", lambda path, **_: (removed.append(path.name), original(path)))
    save(run, 5)
    flip(save(run, 10) / PART)
    save(run, 10, checkpoints=1)
    assert removed == [".step-00000010.removed.tmp", ".step-00000005.removed.tmp"]
    assert names(run / "checkpoints") == ["latest", "step-00000010"]


def test_a_checkpoint_of_the_same_step_is_replaced(run: Path) -> None:
    save(run, 5)
    flip(save(run, 10) / PART)
    path = save(run, 10, again=True)
    assert checkpoint_problem(path) is None
    assert CheckpointReader(path).state["again"] is True
    assert names(run / "checkpoints") == ["latest", "step-00000005", "step-00000010"]


def test_a_damaged_newer_checkpoint_does_not_push_out_the_one_just_written(run: Path) -> None:
    """The run fell back from step 30 to 10 and saves more often now."""
    save(run, 10)
    flip(save(run, 30) / PART)
    path = save(run, 20, checkpoints=1)
    assert checkpoint_problem(path) is None
    assert (run / "checkpoints" / pointer(run).strip()).is_dir()
    assert newest_checkpoint(run, lambda _: None) == path


def test_weights_of_the_best_steps_stay(run: Path) -> None:
    for step in range(1, 6):
        save(run, step, weights=2, best=(2,))
    assert names(run / "weights")[1:] == [f"step-{step:08}.safetensors" for step in (2, 4, 5)]
    save(run, 6, weights=2, best=(4,))
    assert names(run / "weights")[1:] == [f"step-{step:08}.safetensors" for step in (4, 5, 6)]
