"""The wheel, built and installed in an empty environment, trains and reports BLEU: continuous integration runs this."""

import json
from pathlib import Path

import pytest

from tests.compat.environments import run_installed

pytestmark = pytest.mark.slice(name="smoke")


def test_the_wheel_alone_runs_a_short_demo(installed: Path, tmp_path: Path) -> None:
    flags = ("--max-steps", 40, "--train-pairs", 1500, "--average", 1)
    said = run_installed(installed, tmp_path, "dist-transformer", "demo", *flags)
    result = json.loads((tmp_path / "runs" / "demo" / "result.json").read_text(encoding="utf-8"))
    assert (result["world_size"], result["zero_stage"]) == (2, 1)
    assert f"BLEU {result['bleu']:.1f}" in said
    assert (tmp_path / "runs" / "demo" / "model" / "model.safetensors").exists()
