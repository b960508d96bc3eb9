"""kill -9 of a rank, of the launcher, of everything: half of the kills inside a save, half at any moment.

A case is a run of two ranks under DeepSpeed's launcher that is killed four times, and then goes to its end. The newest
committed checkpoint is resumed from, at most the save interval is lost, and what was trained while a killed save was
written; no process is left, and the end is that of the run that was left alone, bit for bit.
"""

import os
import random
import signal
import time
from pathlib import Path

import psutil

from dist_transformer.run.layout import read_records, step_of
from tests.faults.campaign import STAGES, Case, Lab, campaign, in_slice, newest_whole
from tests.jobs import PATIENCE, Job, require_same_end, unfinished

_STEPS, _SAVE_EVERY, _KILLS = 64, 4, 4
_FLAGS = ("--max-steps", _STEPS, "--save-every", _SAVE_EVERY, "--keep-checkpoints", 3)
# A rank notices within seconds that its launcher or another rank is gone.
_LAST_BREATH_SECONDS = 60
# A save of this model takes about so long.
_SAVE_SECONDS = 0.05
_STARTING_SECONDS = 12
# Ranks that lose their launcher leave within seconds, in which they would come to the end: they are slowed down.
_PACE_MS, _LEAVING_SECONDS = 500, 15


@in_slice
@campaign(dict.fromkeys(STAGES, 100), each=_KILLS, sample=("zero1",))
def test_kills(case: Case, lab: Lab) -> None:
    generator, run_dir = case.generator(), lab.folder / "run"
    whole = lab.undisturbed(f"kills {case.kind}", *_FLAGS, stage=case.kind)
    expected: Path | None = None
    for number in range(_KILLS):
        before = set(unfinished(run_dir))
        victim = generator.choice(("rank", "launcher", "everything"))
        pace = f"0:{_PACE_MS}:pace" if victim == "launcher" else ""
        job = lab.job(run_dir, *_FLAGS, stage=case.kind, fault=pace).start_deepspeed()
        wait_for_the_moment(job, generator, in_save=number % 2 == 0)
        if job.processes[0].poll() is not None:
            assert job.processes[0].returncode == 0, job.output[-1000:]
            break
        reached = last_step(run_dir)
        kill(job, victim, generator)
        require_no_survivors(job, victim)
        is_far = _STEPS - reached > 1000 * _LEAVING_SECONDS / _PACE_MS
        assert not (victim == "launcher" and is_far and last_step(run_dir) == _STEPS), "to the end without a launcher"
        require_resumed_from(expected, job.output)
        expected = newest_whole(run_dir)
        lost = last_step(run_dir) - (step_of(expected.name) or 0 if expected else 0)
        # While a save is written, training continues; the next one waits for it.
        limit = _SAVE_EVERY if before.issuperset(unfinished(run_dir)) else 2 * _SAVE_EVERY
        assert lost <= limit, f"{lost} steps lost by the kill of {victim}"
    require_resumed_from(expected, lab.train(run_dir, *_FLAGS, stage=case.kind))
    require_same_end(run_dir, whole, _STEPS)


def wait_for_the_moment(job: Job, generator: random.Random, *, in_save: bool) -> None:
    """Or until the job ends."""
    started = time.monotonic()
    if not in_save and generator.random() < 0.5:
        moment = generator.uniform(0, _STARTING_SECONDS)
        while time.monotonic() < started + moment and job.processes[0].poll() is None:
            time.sleep(0.01)
        return
    saves, seen = generator.randint(1, 3), {path.name for path in unfinished(job.run_dir)}
    new: set[str] = set()
    while len(new) < saves and job.processes[0].poll() is None:
        new |= {path.name for path in unfinished(job.run_dir) if "removed" not in path.name} - seen
        assert time.monotonic() < started + PATIENCE, f"saves nothing:\n{job.output}"
        time.sleep(0.001)
    time.sleep(generator.uniform(0, _SAVE_SECONDS if in_save else 10 * _SAVE_SECONDS))


def kill(job: Job, victim: str, generator: random.Random) -> None:
    launcher = job.processes[0].pid
    ranks = [process for process in job.family() if is_rank(process)]
    if victim == "launcher" or (victim == "rank" and not ranks):
        os.kill(launcher, signal.SIGKILL)
    elif victim == "rank":
        generator.choice(sorted(ranks, key=lambda process: process.pid)).kill()
    else:
        os.killpg(launcher, signal.SIGKILL)


def is_rank(process: psutil.Process) -> bool:
    """Decide whether the parent of a process is the inner launcher, which is that of its node."""
    try:
        return "--local_rank" in " ".join(process.cmdline()) and "launcher" not in " ".join(process.cmdline()[:4])
    except psutil.Error:
        return False


def require_no_survivors(job: Job, victim: str) -> None:
    deadline = time.monotonic() + _LAST_BREATH_SECONDS
    while (alive := job.family()) and time.monotonic() < deadline:
        time.sleep(0.2)
    for process in alive:
        process.kill()
    job.close()
    assert alive == [], f"outlived the kill of {victim}"


def require_resumed_from(expected: Path | None, output: str) -> None:
    lines = {line for line in output.splitlines() if line.startswith("resumed from ")}
    assert lines <= {f"resumed from {expected}"}


def last_step(run_dir: Path) -> int:
    is_begun = (run_dir / "metrics.jsonl").exists()
    return max((record["step"] for record in read_records(run_dir, "train")), default=0) if is_begun else 0
