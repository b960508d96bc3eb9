"""Ranks that are behind, by their heartbeats; the duration of phases; the launchers above a process."""

import contextlib
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from dist_transformer.base.files import make_folder
from dist_transformer.runtime.launch import LAUNCH_VARIABLE
from dist_transformer.runtime.world import World
from dist_transformer.training.fault_tolerance import watchdog as module
from dist_transformer.training.fault_tolerance.heartbeats import Beat, Failure, Heartbeats, who_is_behind
from dist_transformer.training.fault_tolerance.launcher_watch import LauncherWatch
from dist_transformer.training.fault_tolerance.signals import HUNG
from dist_transformer.training.fault_tolerance.watchdog import Phase, Watchdog
from tests.jobs import PATIENCE


def beat(rank: int, count: int, step: int, *, progress: int = 50, where: str = "a.py:1 f") -> Beat:
    return Beat(
        rank=rank,
        count=count,
        progress=progress,
        phase="training",
        step=step,
        where=where,
        host="n1",
        process=100 + rank,
    )


def test_a_rank_without_new_beats_is_named() -> None:
    before = {0: beat(0, 5, 7), 1: beat(1, 5, 7)}
    after = {0: beat(0, 8, 7), 1: beat(1, 5, 7)}
    found = who_is_behind(before, after, 2)
    assert found == "rank 1 (n1, process 101) shows no sign of life; last seen in training, step 7, a.py:1 f"


def test_ranks_that_got_less_far_are_named() -> None:
    before = {rank: beat(rank, 5, 7, progress=49 if rank == 2 else 50) for rank in range(4)}
    after = {rank: beat(rank, 8, 7, progress=49 if rank == 2 else 50) for rank in range(4)}
    assert who_is_behind(before, after, 4) == "rank 2 (n1, process 102) is behind, in training, step 7, a.py:1 f"


def test_ranks_that_never_began_are_named() -> None:
    assert who_is_behind({0: beat(0, 1, 0)}, {0: beat(0, 2, 0)}, 3) == "rank 1 never started\nrank 2 never started"


def test_where_nobody_is_behind_all_say_where_they_are() -> None:
    before = {0: beat(0, 1, 4), 1: beat(1, 1, 4)}
    after = {1: beat(1, 2, 4, where="b.py:2 g"), 0: beat(0, 2, 4)}
    assert who_is_behind(before, after, 2).splitlines() == [
        "rank 0 (n1, process 100) is in training, step 4, a.py:1 f",
        "rank 1 (n1, process 101) is in training, step 4, b.py:2 g",
    ]


def test_the_first_failure_stands_until_the_next_launch(tmp_path: Path) -> None:
    ranks = [Heartbeats(tmp_path / "run", World(rank=rank, size=2), "first") for rank in range(2)]
    ranks[0].remove_earlier()
    assert ranks[0].known_failure() is None
    failures = [Failure(rank=rank, reason=f"error {rank}", is_hang=False) for rank in range(2)]
    assert ranks[1].first_failure(failures[1]) == failures[1]
    assert ranks[0].first_failure(failures[0]) == failures[1]
    assert ranks[0].known_failure() == failures[1]
    assert Heartbeats(tmp_path / "run", World(), "second").known_failure() is None
    ranks[0].publish(beat(0, 1, 1))
    ranks[0].remove_earlier()
    assert list(ranks[0].folder.iterdir()) == []


def test_an_error_is_told_to_the_others_and_theirs_is_an_echo(tmp_path: Path) -> None:
    with contextlib.closing(Watchdog(World(), {})) as watchdog:
        assert watchdog.fail(ValueError("before any rank could be reached")) is None
        watchdog.start(LauncherWatch()).publish_in(tmp_path)
        assert watchdog.fail(ValueError("boom\nand more")) is None
        (file,) = (tmp_path / "heartbeats").glob("failure-*.json")
        assert json.loads(file.read_text()) == {"rank": 0, "reason": "ValueError: boom", "is_hang": False}
        other = Failure(rank=1, reason="OSError: disk full", is_hang=False)
        file.write_text(json.dumps(dataclasses.asdict(other)))
        assert watchdog.fail(ConnectionError("closed by peer")) == other
        shutil.rmtree(tmp_path / "heartbeats")
        assert watchdog.fail(ValueError("the folder is gone")) is None


def test_a_rank_knows_the_process_that_launched_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have ended before the rank begins to watch."""
    monkeypatch.setenv(LAUNCH_VARIABLE, f"a host {os.getppid()}")
    assert LauncherWatch().gone() is None
    monkeypatch.setenv(LAUNCH_VARIABLE, f"a host {os.getppid() + 1}")
    assert LauncherWatch().gone() == f"the launcher of process {os.getpid()}"


def test_a_rank_that_ended_well_leaves_no_file(tmp_path: Path) -> None:
    watchdog = Watchdog(World(), {})
    watchdog.publish_in(tmp_path)
    assert list(tmp_path.iterdir()) == []
    watchdog.start(LauncherWatch()).publish_in(tmp_path)
    watchdog.close()
    assert list((tmp_path / "heartbeats").iterdir()) == []


@pytest.mark.system
def test_nothing_is_written_after_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that takes two seconds for a beat, longer than a beat may take, holds `close` up for as long."""
    publish, is_slow = Heartbeats.publish, threading.Event()

    def publish_slowly(heartbeats: Heartbeats, beat: Beat) -> None:
        if beat.count > 0:
            is_slow.set()
            time.sleep(2)
        publish(heartbeats, beat)

    monkeypatch.setattr(Heartbeats, "publish", publish_slowly)
    watchdog = Watchdog(World(), {Phase.STEP: 4}).start(LauncherWatch())
    watchdog.publish_in(tmp_path)
    assert is_slow.wait(60)
    watchdog.close()
    assert list((tmp_path / "heartbeats").iterdir()) == []
    time.sleep(3)
    assert list((tmp_path / "heartbeats").iterdir()) == []


def test_a_launch_begins_while_ranks_of_the_last_one_leave(tmp_path: Path) -> None:
    last, here = (Heartbeats(tmp_path, World(), launch) for launch in ("last", "here"))
    last.remove_earlier()
    last.publish(beat(0, 1, 99))
    here.remove_earlier()
    here.publish(beat(0, 1, 5, where="b.py:2 g"))
    last.publish(beat(0, 1000, 99))
    last.withdraw()
    assert here.who_is_behind(wait_seconds=0) == (
        "rank 0 (n1, process 100) shows no sign of life; last seen in training, step 5, b.py:2 g"
    )


def test_the_longest_of_each_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step, which compiles, does not count."""
    clock = iter([0, 5, 105, 107, 110, 111, 131])
    monkeypatch.setattr(module.time, "monotonic", lambda: float(next(clock)))
    watchdog = Watchdog(World(), {})
    for phase in (Phase.STEP, Phase.STEP, Phase.STEP, Phase.EVALUATION, Phase.CHECKPOINT, Phase.STEP):
        watchdog.enter(phase)
    took = {phase: seconds for phase, seconds in watchdog.longest.items() if seconds}
    assert took == {Phase.JOINING: 5, Phase.STEP: 3, Phase.EVALUATION: 1, Phase.CHECKPOINT: 20}


def test_the_limit_of_a_step_follows_recent_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long validations and saves do not count; the first step, which compiles, does not either."""
    now = 0.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    watchdog = Watchdog(World(), {Phase.STEP: 0})
    limits = []
    for seconds in (900, *[1] * 10, *[30] * 2, *[1] * 100, 300, 1):
        watchdog.enter(Phase.STEP)
        now += seconds
        watchdog.enter(Phase.EVALUATION)
        now += 4000
        limits.append(watchdog.limits[Phase.STEP])
    # Nine short steps; the tenth begins to count. 20 times 30 s, until these are not recent any more.
    assert limits[:14] == [1800] * 10 + [300] + [600] * 3
    assert limits[-4:] == [600, 300, 1800, 1800]
    assert Watchdog(World(), {Phase.STEP: 7}).limits[Phase.STEP] == 7


HANG = """
import os, signal, subprocess, sys, time
from pathlib import Path
from dist_transformer.runtime.distributed import World
from dist_transformer.training.fault_tolerance.heartbeats import Heartbeats
from dist_transformer.training.fault_tolerance.launcher_watch import LauncherWatch
from dist_transformer.training.fault_tolerance.watchdog import Phase, Watchdog

# Two seconds later than it could, as on a busy machine.
behind = Heartbeats.who_is_behind
Heartbeats.who_is_behind = lambda self, *, wait_seconds: behind(self, wait_seconds=wait_seconds + 2)
limits = {Phase.STEP: 1.5, Phase.EVALUATION: 1000}
watchdog = Watchdog(World(), limits).start(LauncherWatch())
watchdog.endings.append(lambda: print("ended", flush=True))
watchdog.publish_in(Path(sys.argv[1]))
watchdog.enter(Phase.EVALUATION, 1)
time.sleep(1.8)
watchdog.enter(Phase.STEP, 2)
for _ in range(4):
    time.sleep(0.45)
    watchdog.progress()
stopped = f"grep -q '^State:.T' /proc/{os.getpid()}/status"
subprocess.Popen(["sh", "-c", f"until {stopped}; do sleep 0.1; done; sleep 2; kill -CONT {os.getpid()}"])
os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(0.2)
watchdog.progress()
print("healthy", flush=True)
time.sleep(1000)
"""


@pytest.mark.system
def test_a_hang_ends_the_process_with_its_stacks(tmp_path: Path) -> None:
    """A long validation, steps that continue and a suspended job end nothing."""
    done = subprocess.run(
        [sys.executable, "-c", HANG, str(tmp_path)], capture_output=True, text=True, check=False, timeout=PATIENCE
    )
    assert (done.returncode, done.stdout) == (HUNG, "healthy\nended\n")
    stacks = (tmp_path / "hangs" / "rank-0.txt").read_text()
    for text in (done.stderr, stacks):
        assert "no progress in training, step 2" in text
        assert f'File "<string>", line {len(HANG.splitlines())} in <module>' in text
        assert "rank 0 (" in text
    assert done.stderr.endswith("error: rank 0 ends: no progress in training, step 2, for 0.025 minutes\n")


def test_nccl_records_its_last_collectives_unless_the_user_has_said_how(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DUMP_ON_TIMEOUT"):
        # Restored at the end.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("TORCH_NCCL_TRACE_BUFFER_SIZE", "50")
    module.record_collectives(tmp_path)
    assert "TORCH_FR_BUFFER_SIZE" not in os.environ
    assert os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
    assert os.environ["TORCH_FR_DUMP_TEMP_FILE"] == str(tmp_path / "hangs" / "nccl-rank-")
    watchdog = Watchdog(World(), {})
    watchdog._started = True
    watchdog.publish_in(tmp_path)
    watchdog.close()
    assert (tmp_path / "hangs").is_dir()


def test_the_record_of_nccl_is_named_where_a_hang_ends_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    record = b'{"entries": [{"record_id": 7}]}'
    monkeypatch.setattr(module, "collective_record", lambda: record)
    watchdog = Watchdog(World(), {})
    watchdog._heartbeats = Heartbeats(tmp_path, World(), "launch")
    watchdog._interval = 0.01
    make_folder(watchdog._heartbeats.folder)
    watchdog._report(Failure(rank=0, reason="no progress", is_hang=True))
    file = tmp_path / "hangs" / "nccl-rank-0.json"
    assert file.read_bytes() == record
    assert capfd.readouterr().err.endswith(f"the last collectives of rank 0 are in {file}\n")


ASK = """
from dist_transformer.training.fault_tolerance.launcher_watch import LauncherWatch
watch = LauncherWatch()
print(len(watch._parents), watch.gone())
"""


@pytest.mark.parametrize("name", ["torchrun", "deepspeed.launcher.launch"])
def test_launchers_are_told_from_other_parents(name: str, tmp_path: Path) -> None:
    """A shell or pytest above a rank, or above a launcher, may end; `torchrun` may not."""
    assert LauncherWatch()._parents == []
    launcher = tmp_path / name
    launcher.write_text(f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {ASK!r}], check=True)\n")
    found = subprocess.run([sys.executable, str(launcher)], capture_output=True, text=True, check=True, timeout=600)
    assert found.stdout == "1 None\n"
    assert LauncherWatch().gone() is None


ORPHAN = f"""
import os, subprocess, sys, time

while os.getppid() != 1:
    time.sleep(0.01)
subprocess.run([sys.executable, "-c", {ASK!r}], check=True)
"""


@pytest.mark.parametrize(("arguments", "is_gone"), [([], True), (["--node_rank=1"], False)])
def test_a_launcher_killed_before_its_ranks_began_is_noticed(
    tmp_path: Path, arguments: list[str], *, is_gone: bool
) -> None:
    """The parent of the launcher of another node, ssh or a shell, may end."""
    launcher = tmp_path / "deepspeed.launcher.launch"
    launcher.write_text(ORPHAN)
    outer = f"import subprocess, sys; subprocess.Popen([sys.executable, '-u', {str(launcher)!r}, *sys.argv[1:]])"
    found = subprocess.run(
        [sys.executable, "-c", outer, *arguments], capture_output=True, text=True, check=True, timeout=600
    ).stdout
    assert (" the launcher of process " in found) if is_gone else found.endswith(" None\n")
