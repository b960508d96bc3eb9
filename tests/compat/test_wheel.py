"""The wheel alone: the demo, a text of one's own to BLEU on two processes."""

import json
from pathlib import Path

import pytest

from dist_transformer.data.text.toy_corpus import make_toy_corpus, write_toy_corpus
from tests.api.examples import run_examples
from tests.compat.environments import run_installed

pytestmark = pytest.mark.compat


def test_the_demo(installed: Path, tmp_path: Path) -> None:
    said = run_installed(installed, tmp_path, "dist-transformer", "demo")
    result = json.loads((tmp_path / "runs" / "demo" / "result.json").read_text(encoding="utf-8"))
    assert result["world_size"] == 2
    assert result["bleu"] > 90, said[-2000:]
    assert f"BLEU {result['bleu']:.1f}" in said


def test_text_of_ones_own_to_bleu_on_two_processes(installed: Path, tmp_path: Path) -> None:
    """The commands of the README, with a small model."""
    write_toy_corpus(tmp_path, make_toy_corpus(train_pairs=3_000, valid_pairs=100, test_pairs=50, seed=1))

    def run(*words: object) -> str:
        return run_installed(installed, tmp_path, "dist-transformer", *words)

    files = ["--src", "train.en", "--tgt", "train.de", "--valid-src", "valid.en", "--valid-tgt", "valid.de"]
    run("prepare", *files, "--vocab-size", 500, "--out", "data")
    small = ["--preset", "tiny", "--max-steps", 60, "--save-every", 20, "--deepspeed_config", "zero2"]
    run("train", *small, "--data", "data", "--run-dir", "run", "--processes", 2)
    run("verify", "run", "--data", "data")
    run("average", "--run-dir", "run", "--last", 2, "--out", "model")
    run("evaluate", "--model", "model", "--src", "test.en", "--ref", "test.de", "--json", "b.json", "--processes", 2)
    scores = json.loads((tmp_path / "b.json").read_text(encoding="utf-8"))
    assert scores["sentences"] == 50
    assert len((tmp_path / "b.hypotheses.txt").read_text(encoding="utf-8").splitlines()) == 50
    run("report", "run")
    assert (tmp_path / "run" / "report.html").stat().st_size > 10_000


def test_the_examples_in_python(installed: Path, tmp_path: Path) -> None:
    run_examples(tmp_path, lambda script: run_installed(installed, tmp_path, "python", script.name))
