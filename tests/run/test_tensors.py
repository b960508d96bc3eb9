"""Weight files that are not what a run writes: which check finds them, and what it says."""

import dataclasses
import hashlib
from contextlib import ExitStack
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from dist_transformer.config.plain import read_json
from dist_transformer.run.checkpoint.tensors import parameter_shapes
from dist_transformer.run.folder import settings_of
from dist_transformer.run.verify import verify_run
from tests.run.small_run import MODEL, SmallRun
from tests.run.sound_run import WEIGHTS, failures
from tests.support.damage import flip


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


@pytest.mark.parametrize("value", ["nan", "-inf"])
def test_values_that_are_not_finite(run: Path, value: str) -> None:
    """A training that diverged wrote them, with their hash."""
    tensors = load_file(run / WEIGHTS)
    tensors[min(tensors)].view(-1)[-1] = float(value)
    save_file(tensors, run / WEIGHTS, metadata={"step": "4"})
    record(run / WEIGHTS)
    assert "holds values that are not finite" in failures(run)["weights"]


@pytest.mark.parametrize("content", [b"", b"x" * 100])
def test_a_weight_file_that_is_none(run: Path, content: bytes) -> None:
    (run / WEIGHTS).write_bytes(content)
    assert "its SHA-256 is not what SHA256SUMS states" in failures(run)["weights"]


def test_a_weight_file_is_compared_with_the_checkpoint(run: Path) -> None:
    """One bit of one weight in a file with its hash, as of another run."""
    flip(run / WEIGHTS, -4)
    record(run / WEIGHTS)
    assert " from the checkpoint of the same step" in failures(run)["weights"]


def test_a_weight_file_has_its_hash(run: Path) -> None:
    """A letter of what the file says of itself, which no tensor shows; and a file that no save wrote."""
    content = (run / WEIGHTS).read_bytes()
    (run / WEIGHTS).write_bytes(content.replace(b"pre", b"pro"))
    assert "its SHA-256 is not what SHA256SUMS states" in failures(run)["weights"]
    (run / WEIGHTS).write_bytes(content)
    assert failures(run) == {}
    (run / "weights" / "SHA256SUMS").unlink()
    assert "is not in SHA256SUMS, so no save of this run wrote it" in failures(run)["weights"]


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


def test_a_weight_file_under_another_name(run: Path) -> None:
    record((run / WEIGHTS).rename(run / "weights" / "step-00000003.safetensors"))
    assert "step-00000003.safetensors states step 4" in failures(run)["weights"]
