"""When a job stops before its run does: what SLURM says of its time, and how much of it must be left."""

import os
import signal
import time
from pathlib import Path

import pytest

from dist_transformer.runtime.world import World
from dist_transformer.training.fault_tolerance import preemption as module
from dist_transformer.training.fault_tolerance.preemption import Preemption, parse_slurm_duration, seconds_left
from dist_transformer.training.fault_tolerance.watchdog import Phase, Watchdog


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1-02:03:04", 86_400 + 2 * 3600 + 3 * 60 + 4),
        ("12:34", 12 * 60 + 34),
        ("0:00", 0),
        ("UNLIMITED", None),
        ("", None),
    ],
)
def test_slurm_durations(text: str, seconds: float | None) -> None:
    assert parse_slurm_duration(text) == seconds


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """A job of SLURM whose `squeue` says that 1:30 is left of job 17."""
    program = tmp_path / "squeue"
    program.write_text('#!/bin/sh\n[ "$*" = "--noheader --jobs 17 --format %L" ] && echo 1:30\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    return monkeypatch


def test_time_left_is_what_slurm_says(job: pytest.MonkeyPatch) -> None:
    assert seconds_left(0, age=5) == 90
    job.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 10_000))
    assert seconds_left(0, age=5) == pytest.approx(10_000, abs=600)
    job.delenv("SLURM_JOB_ID")
    assert seconds_left(0, age=5) is None


def test_time_left_is_what_the_flag_says(job: pytest.MonkeyPatch) -> None:
    assert seconds_left(2, age=30) == 90
    assert seconds_left(2, age=130) == 0


def test_a_squeue_that_fails_sets_no_limit(job: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    job.setenv("SLURM_JOB_ID", "18")
    assert seconds_left(0, age=0) is None
    assert "pass --walltime-minutes" in capfd.readouterr().err


def preemption_of_one() -> tuple[Preemption, Watchdog]:
    watchdog = Watchdog(World(), {})
    return Preemption(World(), watchdog, timeout_minutes=1), watchdog


def outcome(preemption: Preemption) -> str | None:
    preemption.begin()
    return preemption.outcome()


def test_nobody_stops_unasked() -> None:
    preemption, _ = preemption_of_one()
    assert outcome(preemption) is None


def test_a_signal_stops() -> None:
    preemption, watchdog = preemption_of_one()
    watchdog.signals.received = signal.SIGUSR2
    assert outcome(preemption) == "SIGUSR2 on rank 0"


def test_what_was_measured_must_fit_into_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps of 10 s, a validation of 20 s, a save of 30 s, and a minute to spare: 130 s."""
    monkeypatch.setattr(module, "VOTE_SECONDS", 0.0)
    preemption, watchdog = preemption_of_one()
    watchdog.longest.update({Phase.STEP: 10.0, Phase.EVALUATION: 20.0, Phase.CHECKPOINT: 30.0})
    for left, stops in ((10_000, False), (129, True)):
        preemption.stop_within(10_000)
        preemption._ends = time.monotonic() + left
        assert outcome(preemption) == ("the time limit is near" if stops else None)
    # Of a short time, a twentieth is spared: 20 + 20 + 30 + 5 s of 100, and 20 + 20 + 30 + 3.5 s of 70.
    preemption.stop_within(100)
    assert outcome(preemption) is None
    preemption.stop_within(70)
    assert outcome(preemption) == "the time limit is near"


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        # Steps of 0.1 s, then of 10 s: the interval doubles up to ten steps, and is one step again after the next vote.
        ([0.1] * 29 + [10.0] * 10, [1, 3, 7, 15, 25, 35, 36, 37, 38, 39]),
        # A run of quick steps, which may become slow at any time, still stops after 20 of them.
        ([0.001] * 79, [1, 3, 7, 15, 31, 51, 71]),
    ],
)
def test_votes_are_a_second_apart_and_at_most_20_steps(
    seconds: list[float], expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    preemption, watchdog = preemption_of_one()
    voted, watchdog.signals.received = [], signal.SIGTERM
    for step, took in enumerate(seconds, 1):
        preemption.begin(is_writing=step < 10)
        clock[0] += took
        if preemption.outcome() is not None:
            voted.append(step)
        assert preemption.all_written == (step in voted and step >= 10)
    assert voted == expected
