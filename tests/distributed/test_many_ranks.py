"""Numbers of ranks that no machine of a test can hold."""

import json
import sys
from pathlib import Path

import pytest

from dist_transformer.data.folder.reader import DataFolder
from tests.conftest import ROOT, run_command

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("stage", [1, 3])
def test_512_ranks_build_the_engine_step_and_save(stage: int, toy_data: DataFolder, tmp_path: Path) -> None:
    run_command(sys.executable, ROOT / "tests/distributed/worker_many_ranks.py", toy_data.path, tmp_path, stage)
    (last,) = [line for line in (tmp_path / "metrics.jsonl").read_text().splitlines() if '"end"' in line]
    assert json.loads(last)["world_size"] == 512
    saved = sorted((tmp_path / "checkpoints").glob("step-*/part-00000.safetensors"))
    assert [file.parent.name for file in saved] == ["step-00000001", "step-00000002"]
