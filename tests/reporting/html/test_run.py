import hashlib
import json
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from dist_transformer.base.errors import UserError
from dist_transformer.reporting.html.run import load_run
from tests.reporting.html.conftest import RECORDS, SIGNATURE, sample, write_run, write_samples, write_scores


def test_records_by_kind(run_dir: Path) -> None:
    run = load_run(run_dir)
    assert run.name == "my run"
    assert [record["step"] for record in run.train] == [20, 40, 60, 80]
    assert [record["nll"] for record in run.valid] == [2.0, 1.5, 1.6]
    assert [record["seconds"] for record in run.checkpoints] == [1.0, 4.0]
    assert [record["world_size"] for record in run.ends] == [2]
    assert run.step == 80
    assert run.damaged_lines == ()
    assert [sheet.step for sheet in run.sheets] == [40, 80]


def test_damaged_lines_are_counted_and_the_rest_is_read(tmp_path: Path) -> None:
    run = write_run(tmp_path, RECORDS[:2])
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'[1]\n{"kind": "train"}\n\xff\xfe\n{"kind": "valid", "step": 40, "nll": 2.0}\n{"kind": "tra')
    loaded = load_run(run)
    assert loaded.damaged_lines == (3, 4, 5, 7)
    assert [record["step"] for record in loaded.train] == [20, 40]
    assert [record["nll"] for record in loaded.valid] == [2.0]


def test_a_step_that_was_recorded_twice_counts_once(tmp_path: Path) -> None:
    later = {**RECORDS[0], "nll": 9.0}
    assert [r["nll"] for r in load_run(write_run(tmp_path, [RECORDS[0], RECORDS[1], later])).train] == [9.0, 3.5]


def test_what_is_no_run_folder(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(UserError, match=r"is not a run folder \(it has no config.json or metrics.jsonl\)"):
            load_run(folder)


def test_either_file_is_enough(tmp_path: Path) -> None:
    run = write_run(tmp_path, RECORDS)
    (run / "config.json").unlink()
    assert load_run(run).settings == {}
    run = write_run(tmp_path, RECORDS)
    (run / "metrics.jsonl").unlink()
    assert load_run(run).step == 0
    assert load_run(run).metrics_written is None


def test_a_damaged_config_is_named(tmp_path: Path) -> None:
    write_run(tmp_path, RECORDS)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json cannot be read as JSON"):
        load_run(tmp_path)


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
    assert load_run(run_dir).identity == {}
    data = tmp_path / "data"
    data.mkdir()
    (data / "index.json").write_text('{"corpus": "of the data"}')
    write_run(run_dir, RECORDS, data=str(data))
    # Other data lies there by now.
    assert load_run(run_dir).identity == {}
    write_run(
        run_dir, RECORDS, data=[str(data)], data_sha256=[hashlib.sha256(b'{"corpus": "of the data"}').hexdigest()]
    )
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


def test_metrics_of_a_score_file(run_dir: Path) -> None:
    values = json.loads((run_dir / "bleu.json").read_text())
    # The headline is one of the others, and a score that the language does not have is null.
    values |= {"bleu_cased": values["bleu"], "bleu_lowercase": 25.0, "bleu_tokenized": None}
    values["signatures"] |= {"bleu_cased": SIGNATURE, "bleu_lowercase": "case:lc"}
    (run_dir / "bleu.json").write_text(json.dumps(values))
    (score,) = load_run(run_dir).scores
    assert score.metrics == [
        ("BLEU", "23.46", SIGNATURE),
        ("BLEU, case ignored", "25.00", "case:lc"),
        ("chrF", "61.50", "nrefs:1|case:mixed|nc:6"),
        ("TER (lower is better)", "44.25", "nrefs:1|case:lc|tok:tercom"),
    ]


def test_a_model_folder_is_no_run(tmp_path: Path) -> None:
    """A report in it would make it a folder that no later model may replace."""
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(UserError, match=r"is a model folder .*: use the run folder that it came from"):
        load_run(tmp_path)
