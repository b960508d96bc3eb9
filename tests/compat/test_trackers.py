"""A training and its resume with the real wandb and MLflow, without a network: what their files hold."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from dist_transformer.data.folder.reader import DataFolder
from tests.compat.environments import extend_environment, run_installed
from tests.support.tiny import TINY_FLAGS

pytestmark = pytest.mark.slice(name="trackers")

SMALL = (
    *TINY_FLAGS,
    *("--batch.packs-per-step", "1", "--optimizer.warmup-steps", "2", "--validate-every", "0", "--log-every", "1"),
    *("--precision", "fp32", "--save-every", "4"),
)
# The files are LevelDB's logs: blocks of 32 KiB, in which each part of a record has a checksum, a length and a kind.
READ = """
import json, struct, sys
from pathlib import Path
from wandb.proto import wandb_internal_pb2

def records(content):
    at, record = 7, b""
    while at + 7 <= len(content):
        if (room := 32768 - at % 32768) < 7:
            at += room
            continue
        _, size, kind = struct.unpack("<IHB", content[at : at + 7])
        record += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            yield wandb_internal_pb2.Record.FromString(record)
            record = b""

for file in sorted(Path(sys.argv[1]).glob("offline-run-*/*.wandb")):
    found = {"steps": []}
    for record in records(file.read_bytes()):
        if record.WhichOneof("record_type") == "run":
            found["id"] = record.run.run_id
        elif record.WhichOneof("record_type") == "history":
            names = {item.key or item.nested_key[0] for item in record.history.item}
            if "train/loss" in names:
                found["steps"].append(record.history.step.num)
    print(json.dumps(found))
"""


READ_MLFLOW = """
import json, os
from pathlib import Path
os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
from mlflow import MlflowClient

client = MlflowClient(Path("run/mlflow/runs").resolve().as_uri())
(run,) = client.search_runs([each.experiment_id for each in client.search_experiments()])
print(json.dumps([each.step for each in client.get_metric_history(run.info.run_id, "train/loss")]))
"""


def train(programs: Path, folder: Path, data: Path, steps: int) -> None:
    given = ["--sinks", "wandb,mlflow", "--data", data, "--run-dir", "run"]
    words = [programs / "dist-transformer", "train", *SMALL, *given, "--max-steps", steps]
    environment = {"HOME": os.environ["HOME"], "PATH": f"{programs}:/usr/bin:/bin", "WANDB_MODE": "offline"}
    done = subprocess.run(
        [str(word) for word in words],
        cwd=folder,
        env=environment | {"OMP_NUM_THREADS": "1"},
        timeout=600,
        check=False,
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "metric sink" not in done.stdout


def runs(programs: Path, folder: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line) for line in run_installed(programs, folder, "python", "-c", READ, "run/wandb").splitlines()
    ]


def test_a_resume_has_no_step_twice(installed: Path, distributions: Path, toy_data: DataFolder, tmp_path: Path) -> None:
    (wheel,) = distributions.glob("*.whl")
    programs = extend_environment(installed, tmp_path / "venv", f"{wheel}[wandb,mlflow]")
    train(programs, tmp_path, toy_data.path, 6)
    # As after a crash: the run continues at step 4, and computes steps 5 and 6 again.
    (tmp_path / "run" / "checkpoints" / "latest").unlink()
    for checkpoint in (tmp_path / "run" / "checkpoints").glob("step-*6"):
        checkpoint.rename(tmp_path / checkpoint.name)
    train(programs, tmp_path, toy_data.path, 8)
    first, second = runs(programs, tmp_path)
    assert first["steps"] == [1, 2, 3, 4, 5, 6]
    assert second == {"id": first["id"], "steps": [7, 8]}
    assert json.loads(run_installed(programs, tmp_path, "python", "-c", READ_MLFLOW)) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert not (tmp_path / "run" / "tensorboard").exists()
