"""The demo's script, shortened; `make demo` runs it in full."""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from tests.conftest import ROOT, run_command
from tests.rights import wrong_rights

NEW_SHELL = "/usr/local/bin:/usr/bin:/bin"


def in_new_shell(*lines: str) -> str:
    """Return the output of a shell that knows nothing of an environment and was opened in another folder."""
    shell = ["env", "-i", f"PATH={NEW_SHELL}", "bash", "--noprofile", "--norc", "-e", "-c", "\n".join(lines)]
    done = subprocess.run(shell, cwd="/", capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


def check_next_commands(output: str, run_dir: Path) -> None:
    """Each command of the demo's last lines does what it says, and so does one that the demo ran."""
    lines = output[output.index("\nNext, ") :].splitlines()
    typed = {what.strip(): command.strip() for what, _, command in (line.partition(":") for line in lines)}
    folder = typed["Next, in a new shell after"]
    assert len(in_new_shell(folder, typed["translate"]).splitlines()) == 1
    assert in_new_shell(folder, typed["report"]).strip() == str(run_dir / "report.html")
    assert "--logdir" in in_new_shell(folder, typed["curves"].partition("--host")[0] + " --help")
    assert "--vocab-size" in in_new_shell(folder, typed["your own text"].partition("--src")[0] + " --help")
    (launch,) = (line.removeprefix("$ ") for line in output.splitlines() if line.startswith("$ ") and " train " in line)
    assert "--preset" in in_new_shell(folder, launch.partition("--preset")[0] + " --help")


def end_while_it_trains(demo: Sequence[object], run_dir: Path) -> None:
    """SIGTERM to the demo alone also ends the training that it started."""
    with psutil.Popen([str(word) for word in demo], cwd=ROOT, stdout=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 600
        while not (run_dir / "metrics.jsonl").exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.2)
        family = process.children(recursive=True)
        process.terminate()
    assert len(family) >= 3  # train and its ranks
    _, alive = psutil.wait_procs(family, timeout=600)
    assert alive == []


@pytest.mark.slice(name="commands")
def test_the_demo_goes_the_whole_way_and_may_be_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, umask: int
) -> None:
    monkeypatch.setenv("PATH", NEW_SHELL)
    run_dir = tmp_path / "a folder" / "demo"
    sizes = ("--train-pairs", 1500, "--max-steps", 100)
    demo = [sys.executable, "-m", "dist_transformer", "demo", "--run-dir", run_dir, *sizes]
    end_while_it_trains(demo, run_dir)
    output = run_command(*demo, "--average", 1)
    result = json.loads((run_dir / "result.json").read_text())
    assert {"bleu", "signature", "train_seconds", "target_tokens_per_second", "training_flops"} < result.keys()
    assert (result["world_size"], result["zero_stage"]) == (2, 1)
    assert "SYNTHETIC" in output
    assert (run_dir / "model" / "model.safetensors").exists()
    # All of it is for whom the umask lets: data, checkpoints, weights, heartbeats, reports, model.
    assert wrong_rights(run_dir.parent) == {}
    check_next_commands(output, run_dir)
    again = run_command(*demo, "--average", 1)
    assert "resumed from" in again
    assert json.loads((run_dir / "result.json").read_text())["bleu"] == result["bleu"]
