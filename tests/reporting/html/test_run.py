"""Files of a run folder as the report reads them: whole, damaged, missing, and those of other kinds."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from dist_transformer.base.errors import UserError
from dist_transformer.reporting.html.page import write_report
from dist_transformer.reporting.html.run import load_run
from tests.reporting.html.conftest import (
    AT_20,
    AT_40,
    RECORDS,
    SIGNATURE,
    ReadPage,
    figures,
    sample,
    settings,
    train,
    words,
    write_run,
    write_samples,
    write_scores,
)


def test_damaged_lines_are_told_and_the_rest_is_read(tmp_path: Path, read_page: ReadPage) -> None:
    run = write_run(tmp_path, [AT_20, AT_40])
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'[1]\n{"kind": "train"}\n\xff\xfe\n{"kind": "valid", "step": 40, "nll": 2.0}\n{"kind": "tra')
    document = read_page(run)
    assert "4 damaged line(s), left out here: 3, 4, 5, 7." in words(document.find(".//footer"))
    assert figures(document)["Target tokens/s"] == ["2,000", "median; 1,000 to 3,000 over 2 intervals"]
    assert figures(document)["Best validation"] == ["nll 2.000", "step 40, best of 1 by nll"]


def test_a_step_that_was_recorded_twice_counts_once(tmp_path: Path, read_page: ReadPage) -> None:
    later = {**AT_20, "target_tokens_per_second": 5000.0}
    found = figures(read_page(write_run(tmp_path, [AT_20, AT_40, later])))
    assert found["Target tokens/s"] == ["4,000", "median; 3,000 to 5,000 over 2 intervals"]


def test_what_is_no_run_folder(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(UserError, match=r"is not a run folder \(it has no config.json or metrics.jsonl\)"):
            write_report(folder)


def test_a_measure_without_a_value_is_left_out(tmp_path: Path, read_page: ReadPage) -> None:
    found = figures(read_page(write_run(tmp_path, [AT_20, AT_40, train(60, fill=None)])))
    assert (found["Fill"][0], found["Epochs"]) == ("98.5 %", ["1", "complete"])


def test_either_file_is_enough(run_dir: Path, tmp_path: Path, read_page: ReadPage) -> None:
    (run_dir / "config.json").unlink()
    assert figures(read_page(run_dir))["Steps"] == ["80"]
    run = write_run(tmp_path, RECORDS)
    (run / "metrics.jsonl").unlink()
    assert "No step of 80 is recorded yet." in words(read_page(run).find(".//header"))


@pytest.mark.parametrize(
    ("records", "changes", "status"),
    [
        (RECORDS[:5], {}, "running or interruptedThe last record is of step 60 of 80."),
        # All steps are done, but the run was killed before it said so.
        (RECORDS[:-1], {}, "running or interruptedThe last record is of step 80 of 80."),
        (
            RECORDS,
            {"max_steps": 200, "patience": 1},
            "out of patienceStopped at step 80 of 200: no better validation in 1.",
        ),
        # Finished, and started again with more steps.
        (RECORDS, {"max_steps": 200}, "running or interruptedThe last record is of step 80 of 200."),
    ],
)
def test_status(
    tmp_path: Path, records: list[dict[str, Any]], changes: dict[str, Any], status: str, read_page: ReadPage
) -> None:
    document = read_page(write_run(tmp_path, records, **changes))
    assert words(document.xpath("//header/div[@class='what']/p")[-1]) == status


@pytest.mark.parametrize(("best_by", "step"), [("nll", 10), ("bleu", 20), ("chrf", 20), ("ter", 10), ("command", 20)])
def test_the_best_validation_is_the_first_of_equal_ones(
    tmp_path: Path, best_by: str, step: int, read_page: ReadPage
) -> None:
    """The last validation has no other score."""
    scores = [
        {"nll": 1.0, "bleu": 10.0, "chrf": 40.0, "ter": 60.0, "command": 0.5},
        {"nll": 1.0, "bleu": 20.0, "chrf": 50.0, "ter": 70.0, "command": 0.7},
        {"nll": 1.5},
    ]
    records = [{"kind": "valid", "step": 10 * number, **values} for number, values in enumerate(scores, 1)]
    document = read_page(write_run(tmp_path, records, best_by=best_by))
    assert f", step {step}, best of 3 by " in figures(document)["Best validation"][1]


def test_the_bleu_of_the_headline(run_dir: Path, read_page: ReadPage) -> None:
    """A score file has it, or the newest validation, whose signature the samples have."""

    def headline() -> list[str]:
        return [words(part) for part in read_page(run_dir).xpath("//header/div[@class='bleu']/*")]

    assert headline() == ["23.5 BLEU", "bleu.json, 1,000 sentences", SIGNATURE]
    (run_dir / "bleu.json").unlink()
    assert headline() == ["21.2 BLEU", "validation, step 80", SIGNATURE]
    (run_dir / "samples" / "step-00000080.json").unlink()
    assert headline()[:2] == ["21.2 BLEU", "validation, step 80"]
    assert SIGNATURE not in headline()


def test_ranks_and_stage_are_those_of_the_newest_start(tmp_path: Path, read_page: ReadPage) -> None:
    run = write_run(tmp_path, RECORDS, deepspeed={"zero_optimization": {"stage": 3}})
    starts = [{"step": step, "time": "2026", "world_size": ranks} for step, ranks in ((0, 8), (40, 4))]
    (run / "environment.json").write_text(json.dumps(starts))
    found = figures(read_page(run))
    assert (found["Ranks"][0], found["ZeRO stage"]) == ("4", ["3"])


def test_a_changed_network_has_the_name_of_no_preset(tmp_path: Path, read_page: ReadPage) -> None:
    run = write_run(tmp_path, RECORDS, model={**settings()["model"], "dropout": 0.77})
    assert "preset" not in words(read_page(run).find(".//header"))


def test_identity_of_the_newest_weights(run_dir: Path) -> None:
    (run_dir / "weights").mkdir()
    for step, corpus in ((40, "old"), (80, "toy")):
        described = {"corpus": corpus, "source_language": "en", "target_language": "de", "synthetic": True}
        metadata = {key: json.dumps(value) for key, value in described.items()}
        tensors = {"a": np.zeros((3, 4), np.float32), "b": np.zeros(5, np.float32)}
        save_file(tensors, run_dir / "weights" / f"step-{step:08d}.safetensors", metadata=metadata)
    run = load_run(run_dir)
    assert run.identity == {"corpus": "toy", "source_language": "en", "target_language": "de", "synthetic": True}
    assert run.parameters == 3 * 4 + 5


def test_identity_without_weights(run_dir: Path, tmp_path: Path) -> None:
    (run_dir / "weights").mkdir()
    (run_dir / "weights" / "step-00000080.safetensors").write_bytes(b"cut short")
    data, index = tmp_path / "data", b'{"corpus": "of the data"}'
    data.mkdir()
    (data / "index.json").write_bytes(index)
    # Other data lies there by now.
    write_run(run_dir, RECORDS, data=[str(data)])
    assert load_run(run_dir).identity == {}
    write_run(run_dir, RECORDS, data=[str(data)], data_sha256=[hashlib.sha256(index).hexdigest()])
    assert load_run(run_dir).identity["corpus"] == "of the data"
    (run_dir / "model").mkdir()
    (run_dir / "model" / "config.json").write_text('{"corpus": "of the model"}')
    assert load_run(run_dir).identity["corpus"] == "of the model"


def test_score_files_are_known_by_their_keys(run_dir: Path) -> None:
    write_scores(run_dir / "model" / "test.json", 30.0)
    write_scores(run_dir / "too" / "deep" / "test.json", 99.0)
    # A sheet of samples has scores, too.
    write_samples(run_dir, 120, 98.0, sample("a", "b", "c"), chrf=1.0, ter=1.0)
    (run_dir / "result.json").write_text(json.dumps({"bleu": 97.0, "signature": SIGNATURE}))
    (run_dir / "broken.json").write_text("{")
    os.utime(run_dir / "bleu.json", (1000, 1000))
    os.utime(run_dir / "model" / "test.json", (2000, 2000))
    assert [score.name for score in load_run(run_dir).scores] == ["model/test.json", "bleu.json"]


def test_a_model_folder_is_no_run(tmp_path: Path) -> None:
    """A report in it would make it a folder that no later model may replace."""
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(UserError, match=r"is a model folder .*: use the run folder that it came from"):
        write_report(tmp_path)
