"""The demo's script, shortened; `make demo` runs it in full."""

import json
import sys
from pathlib import Path

import pytest

from tests.conftest import run_command
from tests.rights import wrong_rights


@pytest.mark.slow
def test_the_demo_goes_the_whole_way_and_may_be_run_again(tmp_path: Path, umask: int) -> None:
    run_dir = tmp_path / "a folder" / "demo"
    demo = [sys.executable, "tools/demo.py", "--run-dir", run_dir, "--train-pairs", 1500, "--max-steps", 100]
    output = run_command(*demo, "--average", 1)
    result = json.loads((run_dir / "result.json").read_text())
    assert set(result) >= {
        "bleu",
        "signature",
        "train_seconds",
        "target_tokens_per_second",
        "training_flops",
        "world_size",
        "zero_stage",
    }
    assert result["world_size"] == 2
    assert result["zero_stage"] == 1
    assert "SYNTHETIC" in output
    assert "Next" in output
    assert (run_dir / "model" / "model.safetensors").exists()
    # All of it is for whom the umask lets: data, checkpoints, weights, heartbeats, reports, model.
    assert wrong_rights(run_dir.parent) == {}
    again = run_command(*demo, "--average", 1)
    assert "resumed from" in again
    assert json.loads((run_dir / "result.json").read_text())["bleu"] == result["bleu"]
