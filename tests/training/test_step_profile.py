"""Traces of steps."""

import json
from pathlib import Path

import torch

from dist_transformer.training.step_profile import StepProfile


def traced(steps: tuple[int, int] | None, run_dir: Path, *, first: int) -> list[str]:
    """Work in five steps, each under its name; return what was said."""
    said: list[str] = []
    profile = StepProfile(steps, run_dir, say=said.append)
    for step in range(first, 6):
        profile.begin(step)
        with torch.profiler.record_function(f"work of step {step}"):
            torch.ones(10).exp()
        profile.end(step)
    return said


def test_the_trace_has_the_operations_of_its_steps_alone(tmp_path: Path) -> None:
    (said,) = traced((2, 3), tmp_path, first=1)
    (file,) = tmp_path.iterdir()
    assert said == f"step 4: {file} is a trace of rank 0 from step 2: open it in ui.perfetto.dev"
    names = {event.get("name", "") for event in json.loads(file.read_text())["traceEvents"]}
    assert "aten::exp" in names
    assert {name for name in names if name.startswith("work")} == {f"work of step {step}" for step in (2, 3, 4)}


def test_other_ranks_and_later_starts_write_no_trace(tmp_path: Path) -> None:
    assert traced(None, tmp_path, first=1) == traced((2, 3), tmp_path, first=3) == []
    assert list(tmp_path.iterdir()) == []
