"""tools/verify_run.py on a real run: two ranks begin it, one ends it, and every step is compared with the data."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.run.ledger import Ledger, read_ledger
from dist_transformer.run.verify import verify_run
from tests.conftest import run_command
from tests.distributed.test_runs import train
from tests.run.sound_run import edit_json, seal
from tests.support.damage import flip

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def finished(toy_data: DataFolder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """More than an epoch of 2,000 pairs, saved every 16 steps; the second half on another world."""
    run_dir = tmp_path_factory.mktemp("verified") / "run"
    flags = ("--batch.max-target-tokens", 768, "--batch.packs-per-step", 3, "--save-every", 16)
    train(2, toy_data.path, run_dir, *flags, "--max-steps", 32)
    train(1, toy_data.path, run_dir, *flags, "--max-steps", 48, "--resume", "required")
    return run_dir


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """One to damage."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def failures(run: Path, data: Path) -> dict[str, str]:
    return {check.name: check.found for check in verify_run(run, [str(data)]) if not check.passed}


def test_a_sound_run_passes_with_its_data(finished: Path, toy_data: DataFolder) -> None:
    output = run_command(sys.executable, "tools/verify_run.py", finished, "--data", toy_data.path)
    assert "FAIL" not in output
    for step in (16, 32, 48):
        assert f"\ncheckpoint step-{step:08d}  ok " in output
    output = " ".join(output.split())
    assert "all 48 steps trained on the planned sentences; the last in epoch 2" in output


def test_damage_is_found_and_the_exit_status_says_so(run: Path, toy_data: DataFolder) -> None:
    # Two ranks of one node write one part.
    (part,) = (run / "checkpoints/step-00000032").glob("part-*")
    flip(part)
    (run / "checkpoints/latest").write_text("step-00000099\n")
    output = run_command(sys.executable, "tools/verify_run.py", run, status=1)
    assert re.search(r"^checkpoint step-00000032  FAIL", output, flags=re.MULTILINE)
    output = " ".join(output.split())
    assert f"{part} is damaged" in output
    assert "names step-00000099, which does not exist" in output
    assert f"error: 2 of 8 checks failed for {run}: see FAIL" in output
    assert "Traceback" not in output


def test_a_step_on_other_sentences_is_found_though_every_chain_holds(run: Path, toy_data: DataFolder) -> None:
    """Two steps are exchanged, the ledger has a new chain, and the checkpoints are gone: only the plan shows it."""
    entries = list(read_ledger(run / "ledger.jsonl"))
    entries[6], entries[20] = entries[20], entries[6]
    (run / "ledger.jsonl").unlink()
    ledger = Ledger(run / "ledger.jsonl")
    for step, entry in enumerate(entries, 1):
        ledger.add(step, pair_hash=int(entry["hash"], 16), target_tokens=entry["target_tokens"])
    ledger.flush()
    shutil.rmtree(run / "checkpoints")
    found = failures(run, toy_data.path)
    assert found.keys() == {"latest", "sentences"}
    assert "2 of 48 steps, the first of them step 7, trained on other sentences" in found["sentences"]


def test_other_data_and_another_seed_are_found(run: Path, toy_data: DataFolder, tmp_path: Path) -> None:
    """The same text, prepared under another seed: other shards, other packs."""
    prepare = [sys.executable, "tools/prepare_data.py", "--out", tmp_path / "other", "--seed", 2]
    files = ["--src", toy_data.path / "text/train.en", "--tgt", toy_data.path / "text/train.de"]
    run_command(*prepare, *files, "--tokenizer", toy_data.path / "tokenizer.json", "--pairs-per-shard", 500)
    found = failures(run, tmp_path / "other")
    assert found.keys() == {"data", "sentences"}
    assert "is not the data that the run was trained on" in found["data"]
    assert "48 of 48 steps, the first of them step 1," in found["sentences"]
    edit_json(run / "config.json", seed=2)
    # The files of the run state its identity, of which the seed is a part.
    saved = {"latest", *(f"checkpoint step-{step:08}" for step in (16, 32, 48))}
    assert failures(run, toy_data.path).keys() == {"sentences", "weights", *saved}


def test_a_position_that_is_not_the_plans_is_found(run: Path, toy_data: DataFolder) -> None:
    """A checkpoint at another position of the data, whose hashes are all correct."""
    newest = run / "checkpoints/step-00000048"
    position = json.loads((newest / "state.json").read_text())["position"]
    edit_json(newest / "state.json", position={**position, "packs_consumed": position["packs_consumed"] + 1})
    seal(newest)
    assert failures(run, toy_data.path) == {
        "sentences": "the checkpoint of step 48 continues at another position of the plan"
    }
