"""A checkpoint whose hashes are right, and whose state or tensors are not what a run writes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dist_transformer.run.checkpoint.content import content_problem
from dist_transformer.run.checkpoint.reader import newest_checkpoint
from tests.run.sound_run import NEWEST, PART, edit_json, failures, seal

PLACE = {"epoch": 0, "window": 0, "packs_consumed": 0, "carry_over": [], "left_out": []}


def chosen(run: Path) -> tuple[str, str]:
    notes: list[str] = []
    path = newest_checkpoint(run, notes.append, content_problem)
    assert path is not None
    return path.name, "; ".join(notes)


def test_what_a_run_writes_is_taken(run: Path) -> None:
    assert chosen(run) == ("step-00000004", "")
    state = json.loads((run / NEWEST / "state.json").read_text())
    place = {**PLACE, "rule": state["position"]["rule"], "totals": None}
    edit_json(run / NEWEST / "state.json", position={"corpora": [place, PLACE], "target_tokens": [1, 2]}, best=[[2, 1]])
    seal(run / NEWEST)
    assert chosen(run) == ("step-00000004", "")


@pytest.mark.parametrize(
    "change",
    [
        {"step": "4"},
        {"step": 5},
        {"step": True},
        {"updates": None},
        {"updates": -1},
        {"target_tokens": 10**30},
        {"ledger_chain": 3},
        {"ledger_chain": "0" * 63 + "\n"},
        {"best": [[1]]},
        {"best": {"1": 2.0}},
        {"left_out": [{}]},
        {"left_out": 7},
        {"position": []},
        {"position": {**PLACE, "carry_over": 5}},
        {"position": {**PLACE, "epoch": "x"}},
        {"position": {**PLACE, "totals": {"packs": []}}},
        {"position": {"corpora": 3, "target_tokens": [1]}},
        {"train_seconds": "long"},
        {"validated_step": None},
        {"ema_decay": "0.9"},
        {"model": []},
        {"model": {"width": 8, "encoder_layers": 10**9}},
        {"tokenizer_sha256": 1},
    ],
    ids=str,
)
def test_a_state_of_wrong_types_is_passed_over_with_a_note(change: dict[str, Any], run: Path) -> None:
    edit_json(run / NEWEST / "state.json", **change)
    seal(run / NEWEST)
    name, notes = chosen(run)
    assert name == "step-00000002"
    assert f"{NEWEST}/state.json" in notes
    assert "falling back to" in notes
    assert "checkpoint step-00000004" in failures(run)


@pytest.mark.parametrize("change", ["another shape", "another type", "missing", "more"])
def test_tensors_that_are_not_the_models_are_passed_over(change: str, run: Path) -> None:
    tensors = load_file(run / PART)
    name = min(tensors)
    if change == "another shape":
        tensors[name] = torch.zeros(3)
    elif change == "another type":
        tensors[name] = tensors[name].half()
    elif change == "missing":
        del tensors[name]
    else:
        tensors["weight/more"] = torch.zeros(3)
    save_file(tensors, run / PART)
    seal(run / NEWEST)
    name, notes = chosen(run)
    assert name == "step-00000002"
    assert "falling back to" in notes


def test_a_checkpoint_of_values_that_are_not_finite_is_passed_over(run: Path) -> None:
    """Its hashes are right, as those of a save before losses were checked."""
    tensors = load_file(run / PART)
    tensors[max(tensors)].view(-1)[-1] = float("nan")
    save_file(tensors, run / PART)
    seal(run / NEWEST)
    name, notes = chosen(run)
    assert name == "step-00000002"
    assert f"tensor {max(tensors)!r} holds values that are not finite: it is not used" in notes
