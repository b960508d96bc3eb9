"""Tensors and weight files that are not what the model needs: which check finds them, and what it says."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dist_transformer.run.checkpoint.tensors import parameter_shapes
from dist_transformer.run.ledger import left_out_records, read_ledger
from dist_transformer.run.progress import Progress
from dist_transformer.run.verify import verify_run
from tests.run.sound_run import MODEL, NEWEST, PART, WEIGHTS, failures, flip, save, seal


def test_the_shapes_of_a_model_by_hand() -> None:
    shapes = parameter_shapes(MODEL)
    assert shapes["embedding"] == (5, 8)
    assert shapes["encoder_norm.weight"] == (8,)
    assert "positions.table" not in shapes
    assert parameter_shapes(dataclasses.replace(MODEL, positions="learned"))["positions.table"] == (16, 8)
    assert parameter_shapes(dataclasses.replace(MODEL, tie_embeddings="none"))["output_projection"] == (5, 8)


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
    (add, "is not a parameter of its model"),
    (reshape, "but its model has"),
    (halve, "is BF16, not F32"),
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
    """One bit of one weight; the comparison says which one, where the hash would not."""
    flip(run / WEIGHTS, -4)
    assert " from the checkpoint of the same step" in failures(run)["weights"]


def test_a_weight_file_has_its_hash(run: Path) -> None:
    """A letter of what the file says of itself, which no tensor shows; and a file that no save wrote."""
    content = (run / WEIGHTS).read_bytes()
    (run / WEIGHTS).write_bytes(content.replace(b'"tag":"a"', b'"tag":"b"'))
    assert "its SHA-256 is not what SHA256SUMS states" in failures(run)["weights"]
    (run / WEIGHTS).write_bytes(content)
    assert failures(run) == {}
    (run / "weights" / "SHA256SUMS").unlink()
    assert "is not in SHA256SUMS, so no save of this run wrote it" in failures(run)["weights"]


def test_averaged_weights(run: Path) -> None:
    entries = list(read_ledger(run / "ledger.jsonl"))[:4]
    progress = Progress(step=4, ledger_chain=entries[3]["chain"], target_tokens=410)
    progress.left_out = left_out_records(entries)
    save(run, progress, ema_decay=0.9)
    details = {check.name: check.found for check in verify_run(run) if check.passed}
    assert len(details) == 7
    assert details["weights"].startswith("3 file(s)")
    assert details["weights"].endswith("; 3 equal to a checkpoint's")
    file = run / "weights" / "ema-00000004.safetensors"
    flip(file, -4)
    assert f"{file} differs in " in failures(run)["weights"]
    file.unlink()
    rewrite(run / PART, lambda tensors: [tensors.pop(name) for name in list(tensors) if name.startswith("ema/")])
    seal(run / NEWEST)
    assert "tensor 'ema/" in failures(run)["checkpoint step-00000004"]
    assert "is in none of the files" in failures(run)["checkpoint step-00000004"]


def test_a_weight_file_under_another_name(run: Path) -> None:
    (run / WEIGHTS).rename(run / "weights" / "step-00000003.safetensors")
    assert "step-00000003.safetensors states step 4" in failures(run)["weights"]
