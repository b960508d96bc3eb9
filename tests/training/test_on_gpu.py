"""Whole runs on a GPU, as a user starts them: training, resuming, averaging, translating."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.runtime.launch import RANK_VARIABLES

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


def run(*words: object) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in {*RANK_VARIABLES, "DS_ACCELERATOR"}}
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=ROOT,
        env=environment,
        check=False,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def train(data: DataFolder, run_dir: Path, *flags: object) -> list[float]:
    """Loss of each step."""
    settings = ["--preset", "tiny", "--data", data.path, "--run-dir", run_dir, "--log-every", 1]
    run("-m", "dist_transformer.train", *settings, *flags)
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if record["kind"] == "train"]


@pytest.mark.parametrize("compiled", [False, True])
def test_a_run_resumes_as_if_it_had_not_ended(compiled: bool, toy_data: DataFolder, tmp_path: Path) -> None:
    flags = ["--save-every", 10, "--validate-every", 10, "--compile", "on" if compiled else "off"]
    whole = train(toy_data, tmp_path / "whole", "--max-steps", 20, *flags)
    train(toy_data, tmp_path / "parts", "--max-steps", 10, *flags)
    parts = train(toy_data, tmp_path / "parts", "--max-steps", 20, "--resume", "required", *flags)
    assert len(parts) == len(whole) == 20
    # Sums of the fused kernel's backward pass are added in any order.
    assert parts == pytest.approx(whole, rel=5e-3)


def test_stages_train_alike(toy_data: DataFolder, tmp_path: Path) -> None:
    losses = {
        stage: train(toy_data, tmp_path / stage, "--max-steps", 6, "--deepspeed-config", stage)
        for stage in ("zero0", "zero1", "zero2", "zero3")
    }
    for found in losses.values():
        assert found == pytest.approx(losses["zero1"], rel=5e-3)


def test_fp32_and_dropout_on_weights_train_as_on_a_cpu(toy_data: DataFolder, tmp_path: Path) -> None:
    flags = ["--max-steps", 4, "--precision", "fp32", "--model.dropout", 0.0]
    losses = train(toy_data, tmp_path / "gpu", *flags)
    os.environ["CUDA_VISIBLE_DEVICES"], before = "", os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        expected = train(toy_data, tmp_path / "cpu", *flags)
    finally:
        os.environ.pop("CUDA_VISIBLE_DEVICES") if before is None else os.environ.update(CUDA_VISIBLE_DEVICES=before)
    assert losses == pytest.approx(expected, rel=1e-4)


def test_a_trained_model_translates_as_on_a_cpu(toy_data: DataFolder, tmp_path: Path) -> None:
    run_dir, model = tmp_path / "run", tmp_path / "model"
    train(toy_data, run_dir, "--max-steps", 200, "--save-every", 50, "--validate-every", 200)
    run("-m", "dist_transformer", "verify", "--run-dir", run_dir)
    run("-m", "dist_transformer", "average", "--run-dir", run_dir, "--last", 2, "--out", model)
    source = toy_data.path / "text" / "test.en"
    outputs = {}
    for device in ("cuda", "cpu"):
        outputs[device] = tmp_path / device
        flags = ["--model", model, "--input", source, "--output", outputs[device], "--precision", "fp32"]
        run("-m", "dist_transformer", "translate", *flags, "--device", device)
    lines = [file.read_text().splitlines() for file in outputs.values()]
    assert len(lines[0]) == len(lines[1]) > 0
    same = sum(one == other for one, other in zip(*lines, strict=True))
    assert same >= 0.99 * len(lines[0])
