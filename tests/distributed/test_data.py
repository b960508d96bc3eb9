"""Where the sentences come from, on real ranks: behind a URL, from several folders, with a shard that is damaged."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from dist_transformer.data.folder import DataFolder
from dist_transformer.training.ledger import read_ledger
from dist_transformer.training.metrics import read_records
from tests.distributed.test_runs import train

pytestmark = pytest.mark.slow

# An epoch of the toy corpus is about 35 steps, in four windows.
STEPS = ("--batch.window-shards", 1, "--precision", "fp32", "--save-every", 25, "--keep-checkpoints", 1)


@pytest.fixture(scope="module")
def ledger(toy_data: DataFolder, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of 50 steps on one rank, from the folder itself."""
    run_dir = tmp_path_factory.mktemp("plain") / "run"
    train(1, toy_data.path, run_dir, "--max-steps", 50, *STEPS)
    return read_ledger(run_dir / "ledger.jsonl")


@pytest.fixture
def damaged(toy_data: DataFolder, tmp_path: Path) -> Path:
    """The toy corpus with one flipped bit in one shard."""
    path = tmp_path / "damaged"
    shutil.copytree(toy_data.path, path)
    shard = path / "train-00002.arrow"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 4
    shard.write_bytes(content)
    return path


def test_a_url_gives_the_same_sentences(
    ledger: list[dict[str, Any]], toy_data: DataFolder, tmp_path: Path
) -> None:  # fmt: skip
    place: Any = f"file://{toy_data.path}"
    flags = ("--cache-dir", tmp_path / "a cache", *STEPS)
    train(2, place, tmp_path / "run", "--max-steps", 50, *flags)
    assert read_ledger(tmp_path / "run" / "ledger.jsonl") == ledger
    stalls = [record["data_stall"] for record in read_records(tmp_path / "run", "train")]
    assert all(0 <= stall < 1 for stall in stalls)


def test_a_damaged_shard_ends_all_ranks_with_its_name(damaged: Path, tmp_path: Path) -> None:
    output = train(2, damaged, tmp_path / "run", "--max-steps", 50, *STEPS, status=1)
    assert output.count("train-00002.arrow is damaged or from another folder") == 1
    assert "Traceback" not in output


def test_a_damaged_shard_is_left_out_alike_on_any_world(
    ledger: list[dict[str, Any]], damaged: Path, tmp_path: Path
) -> None:
    output = train(1, damaged, tmp_path / "one", "--max-steps", 50, *STEPS, "--on-bad-shard", "skip")
    assert "left out: " in output
    assert "train-00002.arrow is damaged" in output
    train(2, damaged, tmp_path / "two", "--max-steps", 50, *STEPS, "--on-bad-shard", "skip")
    one, two = (read_ledger(tmp_path / name / "ledger.jsonl") for name in ("one", "two"))
    assert one == two
    assert [read_records(tmp_path / name, "train")[-1]["left_out_shards"] for name in ("one", "two")] == [1, 1]
    # The shard is not in the first window.
    assert one[0] == ledger[0]
    assert one != ledger


def test_mixed_folders_on_any_world_and_after_a_resume(toy_data: DataFolder, tmp_path: Path) -> None:
    """The same folder twice, as 3 : 1; the second time behind a URL."""
    flags = ("--data-weights", 3, 1, "--cache-dir", tmp_path / "cache", *STEPS)
    places: Any = [toy_data.path, f"file://{toy_data.path}"]
    for ranks, run, ends in ((1, tmp_path / "one", (50,)), (2, tmp_path / "two", (25, 50))):
        for end in ends:
            train(ranks, places[0], run, "--max-steps", end, *flags, "--data", *places)
    one, two = (read_ledger(run / "ledger.jsonl") for run in (tmp_path / "one", tmp_path / "two"))
    assert one == two
    state = json.loads((tmp_path / "two" / "checkpoints" / "step-00000050" / "state.json").read_text())
    first, second = state["position"]["target_tokens"]
    assert first / second == pytest.approx(3, abs=0.1)
