"""The sink of Weights & Biases with a library that stands for wandb; tests/compat/test_wandb.py has the real one."""

import json
from pathlib import Path

from tests.conftest import run_python

FAKE = """
import json

def tell(*call):
    print(json.dumps(call))

class Run:
    def log(self, values, *, step):
        tell("log", values, step)

    def finish(self):
        tell("finish")

def Settings(**settings):
    return settings

def init(*, dir, config, **place):
    tell("init", config["max_steps"], place)
    return Run()
"""
PROGRAM = """
import sys
from pathlib import Path
from dist_transformer.reporting.sinks import SINKS
import dist_transformer.reporting.wandb_sink

sink = SINKS["wandb"](Path(sys.argv[1]), int(sys.argv[2]))
sink.record("train", 7, {"loss": 0.5, "note": "text"})
sink.close()
"""


def start(run: Path, continues_after: int) -> tuple[dict[str, str], list[object]]:
    """Give the place of the run, and the calls after it."""
    done = run_python("-c", PROGRAM, run, continues_after, PYTHONPATH=str(run.parent))
    assert done.returncode == 0, done.stderr
    (name, steps, place), *calls = (json.loads(line) for line in done.stdout.splitlines())
    assert (name, steps, place.pop("name"), place.pop("settings")) == ("init", 9, "run", {"console": "off"})
    return place, calls


def test_a_resume_continues_the_run_after_the_step_of_its_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "wandb.py").write_text(FAKE, encoding="utf-8")
    run = tmp_path / "run"
    (run / "wandb").mkdir(parents=True)
    (run / "config.json").write_text('{"max_steps": 9, "run_dir": "/home/someone/run"}', encoding="utf-8")
    first, calls = start(run, 0)
    assert calls == [["log", {"train/loss": 0.5}, 7], ["finish"]]
    assert start(run, 4)[0] == {"resume_from": f"{first['id']}?_step=4"}
    # A start without a checkpoint is another run, and so is the first one with this sink.
    second, _ = start(run, 0)
    assert second.keys() == {"id"}
    assert second != first
    (run / "wandb" / "id").unlink()
    assert start(run, 4)[0].keys() == {"id"}


def test_without_wandb_the_remedy_is_named(tmp_path: Path) -> None:
    done = run_python("-c", f"import sys\nsys.modules['wandb'] = None\n{PROGRAM}", tmp_path, 0)
    assert "UserError: wandb is not installed: pip install 'dist_transformer[wandb]'" in done.stderr
