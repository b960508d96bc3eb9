"""Programs that score translations: real processes, of one rank. Several ranks are in tests/distributed."""

import os
import shlex
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from dist_transformer.runtime.world import World
from dist_transformer.training import validation_command as module
from dist_transformer.training.fault_tolerance.preemption import Preemption
from dist_transformer.training.fault_tolerance.watchdog import Phase, Watchdog
from dist_transformer.training.validation_command import CommandOutcome, ValidationCommand

PYTHON = shlex.quote(sys.executable)


def score(command: str, *, minutes: float = 1.0, watchdog: Watchdog | None = None) -> CommandOutcome:
    preemption = Preemption(World(), watchdog or Watchdog(World(), {}), timeout_minutes=1)
    scorer = ValidationCommand(command, minutes=minutes, preemption=preemption)
    return scorer.score(sources=["a b", "c"], hypotheses=["x y\u2028z", ""], references=["r", "s"])


def python(code: str, *words: str) -> str:
    return shlex.join([sys.executable, "-c", code, *(words or ("{hypothesis}",))])


def test_the_last_word_is_the_score_of_the_three_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The output is that of comet-score. A placeholder may be a part of a word, and files are gone afterwards."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    copied = tmp_path / "copied.txt"
    code = (
        "import sys; from pathlib import Path; "
        f"texts = [Path(word.removeprefix('--hyp=')).read_text('utf-8') for word in sys.argv[1:]]; "
        f"Path({str(copied)!r}).write_text(repr(texts), 'utf-8'); print('hyp.txt\\tscore: 0.8312\\n')"
    )
    outcome = score(python(code, "{reference}", "--hyp={hypothesis}", "{source}"))
    assert outcome == CommandOutcome(score=0.8312, problem=None, stopped_by=None)
    assert copied.read_text("utf-8") == repr(["r\ns\n", "x y\u2028z\n\n", "a b\nc\n"])
    assert list(tmp_path.iterdir()) == [copied]


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        (
            python("import sys; print(1); sys.exit('no\\nmodel')"),
            "failed with status 1 (model): check --validation-command",
        ),
        (
            python("import os; os.kill(os.getpid(), 9)"),
            "was ended by SIGKILL (it printed no error): check --validation-command",
        ),
        (python("print('0.5 done')"), "printed 'done' at its end, not a number: check --validation-command"),
        (python("print(float('nan'))"), "printed 'nan' at its end, not a number: check --validation-command"),
        (python(""), "printed nothing at its end, not a number: check --validation-command"),
        (
            "/no/program {hypothesis}",
            "cannot be started (No such file or directory: /no/program): check --validation-command and TMPDIR",
        ),
    ],
)
def test_a_program_that_fails_has_no_score(command: str, problem: str) -> None:
    assert score(command) == CommandOutcome(score=None, problem=problem, stopped_by=None)


def require_no_process_of(folder: Path) -> None:
    """One that was killed is gone when it had its turn."""
    began = time.monotonic()
    while any(str(folder) in (process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])):
        assert time.monotonic() - began < 300


# A program that does not end at SIGTERM, and has started another one.
HANGS = (
    "import signal, subprocess, sys, time; from pathlib import Path; "
    "signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)', sys.argv[1]]); "
    "Path(sys.argv[1], 'started').touch(); time.sleep(600)"
)


def test_a_program_that_hangs_ends_with_its_children_at_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_GRACE_SECONDS", 0.5)
    # Its time is over as soon as both programs are there.
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: 31.0 * (tmp_path / "started").exists()))
    outcome = score(python(HANGS, str(tmp_path), "{hypothesis}"), minutes=0.5)
    assert outcome.problem == "took longer than 0.5 minutes: raise --validation-command-minutes"
    require_no_process_of(tmp_path)


def test_a_signal_ends_the_program_and_the_training_stops(tmp_path: Path) -> None:
    watchdog = Watchdog(World(), {})
    watchdog.signals.received = signal.SIGTERM
    began = time.monotonic()
    outcome = score(python("import time; time.sleep(600)", str(tmp_path), "{hypothesis}"), watchdog=watchdog)
    assert outcome == CommandOutcome(score=None, problem=None, stopped_by="SIGTERM on rank 0")
    assert time.monotonic() - began < 300
    require_no_process_of(tmp_path)


def test_the_program_does_not_belong_to_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library in it would join the training as one more rank."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "1", "OF_THE_USER": "7"}.items():
        monkeypatch.setenv(name, value)
    code = (
        "import os; print(int(os.environ['OF_THE_USER']) + 10 * ('RANK' in os.environ or 'MASTER_ADDR' in os.environ))"
    )
    assert score(python(code)).score == 7
    assert os.environ["RANK"] == "0"


def test_the_time_limit_of_the_job_ends_the_program() -> None:
    """Before it, there must be time for a save, and not for another validation."""
    watchdog = Watchdog(World(), {})
    watchdog.longest.update({Phase.EVALUATION: 1000.0, Phase.CHECKPOINT: 10.0})
    preemption = Preemption(World(), watchdog, timeout_minutes=1)
    preemption.stop_within(60)
    assert preemption.wait_until(lambda: True) is None
    rounds = iter([False, True])
    assert preemption.wait_until(lambda: next(rounds)) is None
    watchdog.longest[Phase.CHECKPOINT] = 58.0
    assert preemption.wait_until(lambda: False) == "the time limit is near"
