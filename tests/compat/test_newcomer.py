"""The first hour of a newcomer: a fresh clone, its own environment, and two other programs that keep the cores busy."""

import os
import re
import signal
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


def run(folder: Path, *words: object, status: int = 0) -> str:
    done = subprocess.run(
        list(map(str, words)),
        cwd=folder,
        env=environment_of(folder),
        check=False,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=PATIENCE,
    )
    assert done.returncode == status, f"{words}: status {done.returncode}\n{done.stdout[-4000:]}"
    return done.stdout


def environment_of(clone: Path) -> dict[str, str]:
    """Return the variables of a new terminal after `source .venv/bin/activate`."""
    kept = {name: os.environ[name] for name in ("HOME", "LANG", "TMPDIR") if name in os.environ}
    return {**kept, "PATH": f"{clone / '.venv' / 'bin'}:{os.environ['PATH']}"}


def interrupt(clone: Path, after: str, *words: str) -> str:
    """Start a training, press Ctrl-C when it has printed `after`, and give what it said."""
    process = subprocess.Popen(
        words,
        cwd=clone,
        env=environment_of(clone),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        # A shell that runs tests in the background gives its programs SIGINT ignored, and a terminal does not.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # noqa: PLW1509
    )
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(line)
        if after in line:
            break
    process.send_signal(signal.SIGINT)
    said.append(process.communicate(timeout=PATIENCE)[0])
    return "".join(said)


def test_from_a_text_to_a_translation(clone: Path) -> None:
    """Two interruptions: the printed command averages what is worth it, and swapped files get a warning."""
    run(clone, "dist-transformer", "prepare", "--toy", "3000", "--vocab-size", "500", "--out", "data/toy")
    train = ("dist-transformer", "train", *SMALL, "--data", "data/toy", "--run-dir", "runs/toy")
    for step in ("1/150", "100/150"):
        said = interrupt(clone, step, *train, "--max-steps", "150", "--log-every", "1")
        assert "the same command resumes from here" in said
        assert "Traceback" not in said
    said = run(clone, *train, "--max-steps", "150")
    (command,) = re.findall(r"^next: +(.*)$", said, flags=re.MULTILINE)
    said = run(clone, *command.split())
    averaged = [int(step) for step in re.findall(r"^averaged .* steps ([\d, ]+)", said, re.MULTILINE)[0].split(",")]
    assert averaged
    # The regular saves after the warm-up, or the newest of them if the mean is worse.
    assert set(averaged) <= {30, 60, 90, 120, 150}

    text = ("--src", "data/toy/valid/source.txt", "--ref", "data/toy/valid/target.txt")
    said = run(clone, "dist-transformer", "evaluate", "--model", "runs/toy/model", *text, "--json", "right.json")
    assert "looks like" not in said
    swapped = (text[0], text[3], text[2], text[1])
    said = run(clone, "dist-transformer", "evaluate", "--model", "runs/toy/model", *swapped, "--json", "wrong.json")
    assert "looks like" in said


def test_training_keeps_its_share_of_busy_cores(clone: Path) -> None:
    """Threads that spin at barriers made less than a step per second here."""
    data = ("--toy", "1000", "--vocab-size", "400", "--out", "data/small")
    run(clone, "dist-transformer", "prepare", *data)
    began = time.monotonic()
    said = run(
        clone,
        "dist-transformer",
        "train",
        *SMALL,
        "--data",
        "data/small",
        "--run-dir",
        "runs/busy",
        "--max-steps",
        "60",
    )
    assert "weights:" in said
    assert time.monotonic() - began < PATIENCE


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("train --data data/toy --accumulate 4", "--batch."),
        ("train --data data/toy --max-step 4", "--max-steps"),
        ("translate --model runs/toy/model --beam-size 5", "--beam"),
        ("translate --model runs/toy/weights", "dist-transformer average"),
        ("trian --data data/toy", "train"),
    ],
)
def test_a_careless_command_gets_a_sentence(clone: Path, words: str, named: str) -> None:
    said = run(clone, "dist-transformer", *words.split(), status=1)
    assert named in said
    assert said.startswith("error: ")
    assert len(said.strip().splitlines()) == 1


def test_plan_names_this_machine_and_the_gpu(clone: Path) -> None:
    said = run(clone, "dist-transformer", "plan", "--preset", "tiny", "--data", "data/toy")
    assert "this machine" in said
    assert "MODEL" in said
