"""`make gpu-slot` without a GPU: limits, what is kept, and the ranks, which also train on a CPU."""

import json
from pathlib import Path

import pytest

from benchmarks import gpu_slot
from tests.conftest import ROOT, run_python

pytestmark = pytest.mark.slice(name="benchmarks")

PROGRAM = f"""
import sys, time
sys.path.insert(0, {str(ROOT)!r})
import torch
from benchmarks import gpu_slot
from dist_transformer.base.errors import exit_on_user_error

def good(work):
    with open(work / "runs", "a") as file:
        file.write("good ")
    print("a library prints")
    yield "first", 1
    yield "second", [2.5]

def hangs(work):
    yield "first", 1
    time.sleep(600)

def fails(work):
    yield "first", 1
    raise RuntimeError("no such kernel")

torch.cuda.is_available, gpu_slot.device_name = lambda: True, lambda: "none"
gpu_slot.CHECKS = {{
    "good": gpu_slot._Check(1, 120, good),
    "hangs": gpu_slot._Check(2, 30, hangs),
    "fails": gpu_slot._Check(2, 120, fails),
}}
exit_on_user_error(gpu_slot.main)
"""


def test_each_check_has_a_limit_and_what_was_measured_is_kept(tmp_path: Path) -> None:
    (tmp_path / "slot.py").write_text(PROGRAM, encoding="utf-8")
    flags = ("--work", tmp_path / "work", "--out", tmp_path)
    both = run_python(tmp_path / "slot.py", *flags, cwd=tmp_path)
    assert (both.returncode, "error: hangs, fails failed: " in both.stderr) == (1, True)
    figures = json.loads((tmp_path / "gpu-slot-none.json").read_text(encoding="utf-8"))["figures"]
    *states, failed = ((each["state"], each["first"]) for each in figures.values())
    assert states == [("ok", 1), ("out of time", 1)]
    assert "no such kernel" in failed[0]
    assert (failed[1], figures["good"]["second"]) == (1, [2.5])
    # What passed today is not repeated.
    assert run_python(tmp_path / "slot.py", *flags, "--part", 1, cwd=tmp_path).returncode == 0
    assert (tmp_path / "work" / "runs").read_text(encoding="utf-8") == "good "


def test_ranks_killed_and_resumed_have_the_losses_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_slot, "_PROGRAM", str(ROOT / "tools" / "gpu_slot.py"))
    monkeypatch.setattr(gpu_slot, "_RANKS", [(2, 1)])
    figures = dict(gpu_slot.measure_ranks(tmp_path))
    assert list(figures) == ["losses", "2 ranks, ZeRO-1, killed and resumed"]
    assert len(figures["losses"]) == 8
    monkeypatch.setattr(gpu_slot, "_losses", lambda work, *, ranks, **_: [float(ranks)] * 8)
    with pytest.raises(gpu_slot.UserError, match=r"not those of one rank within 0\.001: 2 ranks, ZeRO-1"):
        list(gpu_slot.measure_ranks(tmp_path))
