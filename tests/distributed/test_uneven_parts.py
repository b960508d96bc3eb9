"""ZeRO-3 on a number of ranks that divides the size of no parameter: the parts of the last ranks are padded."""

import json
from pathlib import Path

import pytest

from dist_transformer.data.folder.reader import DataFolder
from tests.conftest import ROOT, run_ranks

SETTINGS = (
    "--preset tiny --precision fp32 --save-every 2 --validate-every 0 --log-every 1 --optimizer.warmup-steps 4 "
    "--model.width 32 --model.heads 2 --model.ffn-width 64 --model.encoder-layers 1 --model.decoder-layers 1 "
    "--batch.max-target-tokens 256 --batch.packs-per-step 3 --model.dropout 0"
)


def train(ranks: int, data: Path, run: Path, stage: int, steps: int) -> list[float]:
    """Losses of all steps of the run."""
    zero = ROOT / "ds_configs" / f"zero{stage}.json"
    given = ["--data", data, "--run-dir", run, "--deepspeed_config", zero, "--max-steps", steps]
    run_ranks(ranks, "-m", "dist_transformer.train", *SETTINGS.split(), *given)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if record["kind"] == "train"]


@pytest.mark.slow
def test_three_ranks_train_and_resume_as_one_does(toy_data: DataFolder, tmp_path: Path) -> None:
    expected = train(1, toy_data.path, tmp_path / "one", 1, 4)
    train(3, toy_data.path, tmp_path / "three", 3, 2)
    resumed = train(3, toy_data.path, tmp_path / "three", 3, 4)
    assert len(resumed) == 4
    assert resumed == pytest.approx(expected, rel=1e-5)
    assert expected[-1] < expected[0] - 0.05
