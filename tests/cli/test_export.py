"""dist-transformer export: what it prints, writes and refuses."""

import json
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard

from dist_transformer.export import gate, libraries
from tests.cli.conftest import Call, Lines


@pytest.fixture
def files(tmp_path: Path, toy_lines: Lines) -> list[object]:
    """The flags of a dev text."""
    for name, lines in zip(("dev.en", "dev.de"), toy_lines, strict=True):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines[:20]), encoding="utf-8")
    return ["--src", tmp_path / "dev.en", "--ref", tmp_path / "dev.de"]


@pytest.fixture
def export(monkeypatch: pytest.MonkeyPatch, call: Call) -> Call:
    monkeypatch.setattr(gate, "COMPARED_LINES", 20)
    monkeypatch.setattr(libraries, "_LONGEST_OUTPUT", 12)
    torch.manual_seed(0)
    return partial(call, "export")


def test_a_row_for_each_check_and_the_figures(
    model_folder: Path, files: list[object], tmp_path: Path, export: Call
) -> None:
    out, figures = tmp_path / "out", tmp_path / "out.json"
    words = ["--model", model_folder, "--to", "ctranslate2", "--quantize", "int8", *files]
    said, errors = export(*words, "--out", out, "--json", figures)
    assert "comparing 20 lines, 20 of them by beam search (seed 1)" in errors
    stages = ["writing, reading back", "token ids", "log probabilities", "our beam search", "their beam search"]
    assert {*stages} <= {*errors.splitlines()}
    rows = ["token ids", "decoding", "log-probabilities", "greedy search", "int8"]
    assert [row for row in rows if f"\n{row:17}  ok  " in f"\n{said}"] == rows
    assert "note: the card states no license" in said
    assert f"written: {out}, for ctranslate2" in said
    found = json.loads(figures.read_text(encoding="utf-8"))
    assert [check["name"] for check in found["checks"]] == rows
    assert {check["state"] for check in found["checks"]} == {"ok"}
    outputs = Path(found["hypotheses"]).read_text(encoding="utf-8").splitlines()
    assert found["sentences"] == len(outputs) == 20
    card = (out / "README.md").read_text(encoding="utf-8")
    metadata = ModelCard(card).data
    assert (metadata.language, metadata.library_name) == (["en", "de"], "ctranslate2")
    assert [(result.metric_value, result.metric_args) for result in metadata.eval_results] == [
        (round(found["bleu"], 2), {"signature": found["signature"]})
    ]
    assert "SYNTHETIC" in card.upper()


def test_a_failed_check_is_printed_before_the_refusal(
    model_folder: Path, files: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, export: Call
) -> None:
    monkeypatch.setattr(gate, "LARGEST_DIFFERENCE", 0.0)
    out = tmp_path / "folder" / "out"
    said, errors = export("--model", model_folder, "--to", "ctranslate2", *files, "--out", out, status=1)
    assert "log-probabilities  FAIL  those of" in said
    assert re.search(r"error: \S+out was not written, .* \(log-probabilities\): see the rows above\n$", errors)
    assert not list(out.parent.iterdir())
