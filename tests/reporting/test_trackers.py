"""The trackers with libraries that stand for wandb and MLflow; tests/compat/test_trackers.py has the real ones."""

import json
from pathlib import Path

import pytest

from tests.conftest import run_python

WANDB = """
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
MLFLOW = """
import json, os, types, uuid

def tell(*call):
    print(json.dumps(call))

def set_tracking_uri(uri):
    global place
    assert os.environ["MLFLOW_ALLOW_FILE_STORE"] == "true"
    place = uri

def start_run(*, run_id, run_name):
    found = run_id or uuid.uuid4().hex
    tell("init", 9, {"id": found, "name": run_name, "place": place, "new": not run_id})
    return types.SimpleNamespace(info=types.SimpleNamespace(run_id=found))

def log_params(settings):
    assert settings["max_steps"] == 9 and "run_dir" not in settings

def log_metrics(values, *, step):
    tell("log", values, step)

def end_run():
    tell("finish")
"""
PROGRAM = """
import json, sys
from pathlib import Path
from dist_transformer.reporting.trackers import TRACKERS

sink = TRACKERS[sys.argv[4]](Path(sys.argv[1]), int(sys.argv[2]))
for step in json.loads(sys.argv[3]):
    sink.record("train", step, {"loss": step / 2, "note": "text"})
sink.close()
"""


def start(service: str, run: Path, continues_after: int, steps: list[int]) -> tuple[str, list[object]]:
    """Give the id of the run, and the steps that it gets."""
    done = run_python("-c", PROGRAM, run, continues_after, json.dumps(steps), service, PYTHONPATH=str(run.parent))
    assert done.returncode == 0, done.stderr
    (name, most, place), *calls, last = (json.loads(line) for line in done.stdout.splitlines())
    identity = place.pop("id")
    assert (name, most, last) == ("init", 9, ["finish"])
    if service == "wandb":
        assert place == {"name": "run", "resume": "allow", "settings": {"console": "off"}}
    else:
        assert place.pop("new") == (len(steps) == len(calls))
        assert place == {"name": "run", "place": (run / "mlflow" / "runs").as_uri()}
    assert [values for _, values, _ in calls] == [{"train/loss": step / 2} for step in steps[len(steps) - len(calls) :]]
    return identity, [step for _, _, step in calls]


@pytest.mark.parametrize("service", ["wandb", "mlflow"])
def test_a_resume_continues_the_run_and_sends_no_step_twice(service: str, tmp_path: Path) -> None:
    (tmp_path / f"{service}.py").write_text(WANDB if service == "wandb" else MLFLOW, encoding="utf-8")
    run = tmp_path / "run"
    (run / service).mkdir(parents=True)
    (run / "config.json").write_text('{"max_steps": 9, "run_dir": "/home/someone/run"}', encoding="utf-8")
    # The save of step 4 ends late.
    first, steps = start(service, run, 0, [3, 4, 5, 6, 4])
    assert steps == [3, 4, 5, 6, 6]
    assert start(service, run, 4, [5, 6, 7]) == (first, [7])
    assert start(service, run, 4, [5, 6, 7, 8, 8]) == (first, [8, 8])
    # A start without a checkpoint is another run, and so is the first one with this sink.
    second, steps = start(service, run, 0, [1])
    assert steps == [1]
    (run / service / "run.json").unlink()
    third, steps = start(service, run, 4, [5])
    assert steps == [5]
    assert len({first, second, third}) == 3


@pytest.mark.parametrize("service", ["wandb", "mlflow"])
def test_without_the_library_the_remedy_is_named(service: str, tmp_path: Path) -> None:
    done = run_python("-c", f"import sys\nsys.modules[{service!r}] = None\n{PROGRAM}", tmp_path, 0, "[]", service)
    assert f"UserError: {service} is not installed: in the clone, pip install -e '.[{service}]'" in done.stderr


def test_the_module_of_before_still_registers_the_sink() -> None:
    program = "from dist_transformer.reporting import sinks, trackers, wandb_sink\n"
    done = run_python("-c", f"{program}assert sinks.SINKS['wandb'] is trackers.WandbSink")
    assert done.returncode == 0, done.stderr
