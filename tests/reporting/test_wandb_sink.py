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
import json, sys
from pathlib import Path
from dist_transformer.reporting.sinks import SINKS
import dist_transformer.reporting.wandb_sink

sink = SINKS["wandb"](Path(sys.argv[1]), int(sys.argv[2]))
for step in json.loads(sys.argv[3]):
    sink.record("train", step, {"loss": step / 2, "note": "text"})
sink.close()
"""


def start(run: Path, continues_after: int, steps: list[int]) -> tuple[str, list[object]]:
    """Give the id of the run, and the steps that it gets."""
    done = run_python("-c", PROGRAM, run, continues_after, json.dumps(steps), PYTHONPATH=str(run.parent))
    assert done.returncode == 0, done.stderr
    (name, most, place), *calls, last = (json.loads(line) for line in done.stdout.splitlines())
    identity = place.pop("id")
    assert (name, most, last) == ("init", 9, ["finish"])
    assert place == {"name": "run", "resume": "allow", "settings": {"console": "off"}}
    assert [values for _, values, _ in calls] == [{"train/loss": step / 2} for step in steps[len(steps) - len(calls) :]]
    return identity, [step for _, _, step in calls]


def test_a_resume_continues_the_run_and_sends_no_step_twice(tmp_path: Path) -> None:
    (tmp_path / "wandb.py").write_text(FAKE, encoding="utf-8")
    run = tmp_path / "run"
    (run / "wandb").mkdir(parents=True)
    (run / "config.json").write_text('{"max_steps": 9, "run_dir": "/home/someone/run"}', encoding="utf-8")
    # The save of step 4 ends late.
    first, steps = start(run, 0, [3, 4, 5, 6, 4])
    assert steps == [3, 4, 5, 6, 6]
    assert start(run, 4, [5, 6, 7]) == (first, [7])
    assert start(run, 4, [5, 6, 7, 8, 8]) == (first, [8, 8])
    # A start without a checkpoint is another run, and so is the first one with this sink.
    second, steps = start(run, 0, [1])
    assert steps == [1]
    (run / "wandb" / "run.json").unlink()
    third, steps = start(run, 4, [5])
    assert steps == [5]
    assert len({first, second, third}) == 3


def test_without_wandb_the_remedy_is_named(tmp_path: Path) -> None:
    done = run_python("-c", f"import sys\nsys.modules['wandb'] = None\n{PROGRAM}", tmp_path, 0, "[]")
    assert "UserError: wandb is not installed: in the clone, pip install -e '.[wandb]'" in done.stderr
