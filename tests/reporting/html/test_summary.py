from pathlib import Path
from typing import Any

import pytest

from dist_transformer.config.plain import to_plain
from dist_transformer.config.presets import PRESETS
from dist_transformer.reporting.html.run import load_run
from dist_transformer.reporting.html.summary import (
    Spread,
    best_validation,
    headline_bleu,
    judge,
    newest,
    preset_name,
    spread,
    validations_since_best,
    world_size,
    zero_stage,
)
from tests.reporting.html.conftest import RECORDS, SIGNATURE, write_run

END = RECORDS[-1]


def test_spread() -> None:
    assert spread([9.0, None, 1.0, 2.0]) == Spread(median=2.0, low=1.0, high=9.0, of=3)
    assert spread([1.0, 4.0]) == Spread(median=2.5, low=1.0, high=4.0, of=2)
    assert spread([None]) is None


@pytest.mark.parametrize(
    ("records", "changes", "label", "sentence"),
    [
        ([], {}, "no step recorded", "No step of 80 is recorded yet."),
        (RECORDS, {}, "finished", "All 80 steps are done."),
        (RECORDS[:5], {}, "running or interrupted", "The last record is of step 60 of 80."),
        # All steps are done, but the run was killed before it said so.
        (RECORDS[:-1], {}, "running or interrupted", "The last record is of step 80 of 80."),
        (
            RECORDS,
            {"max_steps": 200, "patience": 1},
            "out of patience",
            "Stopped at step 80 of 200: no better validation in 1.",
        ),
        # Finished, and started again with more steps.
        (RECORDS, {"max_steps": 200}, "running or interrupted", "The last record is of step 80 of 200."),
    ],
)
def test_status(
    tmp_path: Path, records: list[dict[str, Any]], changes: dict[str, Any], label: str, sentence: str
) -> None:
    status = judge(load_run(write_run(tmp_path, records, **changes)))
    assert (status.label, status.sentence) == (label, sentence)
    assert status.is_over == (label in ("finished", "out of patience"))


def test_best_validation_by_loss_and_by_bleu(tmp_path: Path) -> None:
    run = load_run(write_run(tmp_path, RECORDS))
    assert best_validation(run) == RECORDS[5]
    assert validations_since_best(run) == 1
    run = load_run(write_run(tmp_path, RECORDS, best_by="bleu"))
    assert best_validation(run) == RECORDS[7]
    assert validations_since_best(run) == 0
    assert best_validation(load_run(write_run(tmp_path, RECORDS[:2]))) is None


@pytest.mark.parametrize(("best_by", "step"), [("chrf", 20), ("ter", 10), ("command", 20)])
def test_best_validation_by_the_other_measures(tmp_path: Path, best_by: str, step: int) -> None:
    """The last validation has no score of the program."""
    scores = [{"chrf": 40.0, "ter": 60.0, "command": 0.5}, {"chrf": 50.0, "ter": 70.0, "command": 0.7}, {"nll": 1.0}]
    records = [{"kind": "valid", "step": 10 * number, **values} for number, values in enumerate(scores, 1)]
    best = best_validation(load_run(write_run(tmp_path, records, best_by=best_by)))
    assert best is not None
    assert best["step"] == step


def test_the_first_of_equal_validations_is_the_best(tmp_path: Path) -> None:
    equal = [{"kind": "valid", "step": step, "nll": 1.0} for step in (10, 20)]
    assert best_validation(load_run(write_run(tmp_path, equal))) == equal[0]


def test_headline_bleu(run_dir: Path) -> None:
    bleu = headline_bleu(load_run(run_dir))
    assert bleu is not None
    assert (bleu.value, bleu.signature, bleu.where) == (23.456, SIGNATURE, "bleu.json, 1,000 sentences")
    (run_dir / "bleu.json").unlink()
    bleu = headline_bleu(load_run(run_dir))
    assert bleu is not None
    assert (bleu.value, bleu.signature, bleu.where) == (21.25, SIGNATURE, "validation, step 80")
    (run_dir / "samples" / "step-00000080.json").unlink()
    bleu = headline_bleu(load_run(run_dir))
    assert bleu is not None
    assert (bleu.value, bleu.signature) == (21.25, "")


def test_headline_bleu_of_a_run_without_any(tmp_path: Path) -> None:
    assert headline_bleu(load_run(write_run(tmp_path, RECORDS[:2]))) is None


def test_newest_measure(tmp_path: Path) -> None:
    records = [*RECORDS[:2], {"kind": "train", "step": 60, "fill": None}]
    run = load_run(write_run(tmp_path, records))
    assert newest(run, "fill") == 0.99
    assert newest(run, "epoch") == 1.0
    assert newest(run, "never") is None


def test_ranks_and_stage(tmp_path: Path) -> None:
    run = write_run(tmp_path, RECORDS)
    assert (world_size(load_run(run)), zero_stage(load_run(run))) == (2.0, 1.0)
    (run / "environment.json").write_text('[{"step": 0, "world_size": 8}, {"step": 40, "world_size": 4}]')
    write_run(tmp_path, RECORDS, deepspeed={"zero_optimization": {"stage": 3}})
    assert (world_size(load_run(run)), zero_stage(load_run(run))) == (4.0, 3.0)


def test_presets_are_recognised() -> None:
    for name, preset in PRESETS.items():
        plain = to_plain(preset)
        plain["model"]["vocab_size"] = 1234
        assert preset_name(plain) == name
    plain["model"]["dropout"] = 0.77
    assert preset_name(plain) is None
    assert preset_name({}) is None
