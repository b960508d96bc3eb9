"""The first hour of a newcomer: a fresh clone, its own environment, and two other programs that keep the cores busy."""

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.slice(name="newcomer")

PATIENCE = 600
SMALL = ("--preset", "tiny", "--optimizer.warmup-steps", "20", "--save-every", "30", "--validate-every", "60")


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("newcomer") / "clone"
    subprocess.run(["git", "clone", "--quiet", ROOT, folder], check=True)
    said = run(folder, "make")
    assert "make install" in said
    assert "activate" in run(folder, "make", "install")
    return folder


@pytest.fixture(scope="module", autouse=True)
def busy(clone: Path) -> Iterator[None]:
    """Two loops beside everything that is done with the installed clone."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    yield
    for loop in loops:
        loop.kill()
        loop.wait()


def run(folder: Path, *words: object) -> str:
    done = subprocess.run(
        list(map(str, words)),
        cwd=folder,
        env=environment_of(folder),
        check=False,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        # An installation downloads hundreds of MB.
        timeout=3 * PATIENCE,
    )
    assert done.returncode == 0, f"{words}: status {done.returncode}\n{done.stdout[-4000:]}"
    return done.stdout


def environment_of(clone: Path) -> dict[str, str]:
    """Return the variables of a new terminal after `source .venv/bin/activate`."""
    kept = {name: os.environ[name] for name in ("HOME", "LANG", "TMPDIR") if name in os.environ}
    return {**kept, "PATH": f"{clone / '.venv' / 'bin'}:{os.environ['PATH']}"}


def test_from_a_text_to_a_translation(clone: Path) -> None:
    """The command that a training prints makes the model."""
    run(clone, "dist-transformer", "prepare", "--toy", "3000", "--vocab-size", "500", "--out", "data/toy")
    places = ("--data", "data/toy", "--run-dir", "runs/toy")
    said = run(clone, "dist-transformer", "train", *SMALL, *places, "--max-steps", "150")
    (command,) = re.findall(r"^next: +(.*)$", said, flags=re.MULTILINE)
    said = run(clone, *shlex.split(command))
    # The regular saves after the warm-up, or the newest of them if the mean is worse.
    (steps,) = re.findall(r"^averaged .* steps ([\d, ]+)", said, re.MULTILINE)
    assert {int(step) for step in steps.split(",")} <= {30, 60, 90, 120, 150}
    text = ("--src", "data/toy/valid/source.txt", "--ref", "data/toy/valid/target.txt")
    assert "BLEU" in run(clone, "dist-transformer", "evaluate", "--model", "runs/toy/model", *text)


def test_training_keeps_its_share_of_busy_cores(clone: Path) -> None:
    """Threads that spin at barriers made less than a step per second here."""
    data = ("--toy", "1000", "--vocab-size", "400", "--out", "data/small")
    run(clone, "dist-transformer", "prepare", *data)
    began = time.monotonic()
    places = ("--data", "data/small", "--run-dir", "runs/busy")
    said = run(clone, "dist-transformer", "train", *SMALL, *places, "--max-steps", "60")
    assert "weights:" in said
    assert time.monotonic() - began < PATIENCE
