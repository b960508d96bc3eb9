"""Sources of sentences, on real ranks: a URL, several folders, a folder with a damaged shard."""

import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.run.layout import read_records
from dist_transformer.run.ledger import read_ledger
from tests.conftest import run_command
from tests.distributed.test_runs import train
from tests.support.damage import flip

pytestmark = pytest.mark.slow

# An epoch of the small corpus is about 15 steps, in four windows.
STEPS = ("--batch.window-shards", 1, "--precision", "fp32", "--save-every", 5, "--keep-checkpoints", 1)


@pytest.fixture(scope="module")
def small_data(tmp_path_factory: pytest.TempPathFactory) -> DataFolder:
    """400 synthetic pairs in four shards."""
    path = tmp_path_factory.mktemp("small") / "data"
    sizes = ["--toy", 400, "--vocab-size", 400, "--pairs-per-shard", 100]
    run_command(sys.executable, "tools/prepare_data.py", *sizes, "--out", path)
    return DataFolder.open(path)


@pytest.fixture
def damaged(small_data: DataFolder, tmp_path: Path) -> Path:
    """The small corpus with one flipped bit in one shard."""
    path = Path(shutil.copytree(small_data.path, tmp_path / "damaged"))
    flip(path / "train-00002.arrow")
    return path


def test_a_damaged_shard_ends_all_ranks_with_its_name(damaged: Path, tmp_path: Path) -> None:
    output = train(2, damaged, tmp_path / "run", "--max-steps", 50, *STEPS, status=1)
    assert output.count("train-00002.arrow is damaged") == 1
    assert "Traceback" not in output


def test_bad_shards_are_left_out_alike_on_any_world_and_after_a_resume(
    small_data: DataFolder, damaged: Path, tmp_path: Path
) -> None:
    """Two ranks stop inside a window, one of whose shards is then cut short: they resume without the rest of it.

    An epoch without the third shard is about 12 steps.
    """
    flags = (*STEPS[2:], "--batch.window-shards", 2, "--on-bad-shard", "skip")
    output = train(1, damaged, tmp_path / "one", "--max-steps", 14, *flags)
    assert "left out of epoch 1: " in output
    assert "train-00002.arrow is damaged" in output
    two_dir = tmp_path / "two"
    train(2, damaged, two_dir, "--max-steps", 5, *flags)
    one, two = (list(read_ledger(tmp_path / name / "ledger.jsonl")) for name in ("one", "two"))
    assert one[:5] == two
    epoch = read_records(tmp_path / "one", "epoch")[0]
    info = small_data.train.info
    assert (epoch["pairs"], epoch["left_out_pairs"]) == (info.pairs - info.shards[2].pairs, info.shards[2].pairs)
    position = json.loads((two_dir / "checkpoints/step-00000005/state.json").read_text())["position"]
    assert position["packs_consumed"] > 0
    order = np.random.default_rng([1, position["epoch"]]).permutation(4)
    used = next(shard for shard in order[2 * position["window"] :][:2].tolist() if shard != 2)
    os.truncate(damaged / f"train-{used:05}.arrow", 1000)
    output = train(2, damaged, two_dir, "--max-steps", 14, *flags)
    assert f"step 6: left out of epoch {position['epoch'] + 1} after a part of it was used: " in output
    assert "Traceback" not in output
    two = list(read_ledger(two_dir / "ledger.jsonl"))
    assert one[:5] == two[:5]
    assert read_records(two_dir, "train")[-1]["left_out_shards"] == 2
    # tools/verify_run.py makes the same plan from the sound data; the damaged one lacks what the run has used.
    verify, sound = [sys.executable, "tools/verify_run.py", two_dir, "--data"], small_data.path
    output = " ".join(run_command(*verify, sound).split())
    assert "all 14 steps trained on the planned sentences" in output
    assert f"{sound}/train-{used:05}.arrow (epoch 1" in output
    assert f"{sound}/train-00002.arrow (epoch 1" in output
    output = " ".join(run_command(*verify, damaged, status=1).split())
    assert f"train-{used:05}.arrow is damaged" in output
    assert output.count(" FAIL ") == 2


def test_mixed_folders_on_any_world_and_after_a_resume(small_data: DataFolder, tmp_path: Path) -> None:
    """A folder and its copy, as 3 : 1; for two ranks the copy is behind a URL."""
    flags = ("--data-weights", 3, 1, "--cache-dir", tmp_path / "a cache", *STEPS, "--batch.packs-per-step", 20)
    flags = (*flags, "--batch.max-target-tokens", 128)
    copy = shutil.copytree(small_data.path, tmp_path / "copy")
    places = [small_data.path, f"file://{copy}"]
    train(1, small_data.path, tmp_path / "one", "--max-steps", 10, *flags, "--data", small_data.path, copy)
    for end in (5, 10):
        train(2, small_data.path, tmp_path / "two", "--max-steps", end, *flags, "--data", *places)
    one, two = (list(read_ledger(run / "ledger.jsonl")) for run in (tmp_path / "one", tmp_path / "two"))
    assert one == two
    assert all(0 <= record["data_stall"] < 1 for record in read_records(tmp_path / "two", "train"))
    state = json.loads((tmp_path / "two" / "checkpoints" / "step-00000010" / "state.json").read_text())
    first, second = state["position"]["target_tokens"]
    assert first / second == pytest.approx(3, abs=0.1)
    # The first corpus ends an epoch after the resume that began before it; the shards' totals are in its index.
    epochs = read_records(tmp_path / "two", "epoch")
    assert epochs == read_records(tmp_path / "one", "epoch")
    info = small_data.train.info
    assert [(epoch["corpus"], epoch["epoch"], epoch["pairs"], epoch["left_out_pairs"]) for epoch in epochs] == [
        (0, 0, info.pairs, 0)
    ]
    assert epochs[0]["step"] > 5
    assert [epochs[0][f"{side}_tokens"] for side in ("source", "target")] == [info.source_tokens, info.target_tokens]
    output = run_command(
        sys.executable, "tools/verify_run.py", tmp_path / "two", "--cache-dir", tmp_path / "other", "--data", *places
    )
    assert "all 10 steps trained on the planned sentences; the last in epoch" in " ".join(output.split())
    assert len(list((tmp_path / "other").rglob("*.arrow"))) == 5
