"""Jobs that end before their run does: signals, time limit, hangs, errors, launchers that die. Real ranks."""

import re
import shlex
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from dist_transformer.averaging.sources import weight_file_metadata
from dist_transformer.run.checkpoint.reader import CheckpointReader
from dist_transformer.run.layout import read_records, weight_files
from dist_transformer.run.progress import Progress
from dist_transformer.runtime.launch import free_port
from dist_transformer.training.fault_tolerance.signals import HUNG, INTERRUPTED
from tests.jobs import PATIENCE, Job, require_same_end

pytestmark = pytest.mark.slow

RARELY = ("--save-every", 1000, "--validate-every", 8, "--validate-sentences", 0)


def test_stopped_twice_a_run_ends_as_if_it_was_not(job: Callable[..., Job]) -> None:
    steps = (*RARELY, "--max-steps", 12)
    whole = job("whole", *steps).start_ranks()
    # One rank of two is told, and each once more while it saves.
    told = job("run", *steps, fault="1:3:SIGUSR1").start_ranks()
    run_dir = told.run_dir
    assert told.statuses() == [INTERRUPTED] * 2, told.output
    assert "stopped at step 4, SIGUSR1 on rank 1" in told.output
    assert told.checkpoints == ["step-00000004"]
    # When a validation is due: that one runs after the resume.
    due = job("run", *steps, fault="1:7:SIGTERM").start_ranks()
    assert due.statuses() == [INTERRUPTED] * 2, due.output
    assert "stopped at step 8, SIGTERM on rank 1" in due.output
    assert read_records(run_dir, "valid") == []
    last = job("run", *steps).start_ranks()
    assert last.statuses() == [0, 0], last.output
    assert whole.statuses() == [0, 0], whole.output
    stated = {step: weight_file_metadata(file)["interrupted"] for step, file in weight_files(run_dir).items()}
    assert stated == {4: True, 8: True, 12: False}
    require_same_end(run_dir, whole.run_dir, 12)
    assert read_records(run_dir, "valid") == read_records(whole.run_dir, "valid")
    before = (run_dir / "metrics.jsonl").read_text()
    again = job("run", *steps).start_ranks(1)
    assert again.statuses() == [0], again.output
    assert "already finished at step 12: all steps done" in again.output
    assert " average --run-dir" in again.output
    assert (run_dir / "metrics.jsonl").read_text() == before


SCORER = """
import sys, time
from pathlib import Path
began = Path(sys.argv[1])
if not began.exists():
    began.touch()
    time.sleep(600)
print(7)
"""


def scorer(began: Path) -> str:
    """Return a command that makes the file `began` and waits, or prints a score if the file is there."""
    return shlex.join([sys.executable, "-c", SCORER, str(began), "{hypothesis}"])


def test_a_validation_that_is_stopped_is_done_after_the_resume(tmp_path: Path, job: Callable[..., Job]) -> None:
    """One rank of two is told to end while a program scores the last validation."""
    began = tmp_path / "began"
    flags = ("--max-steps", 2, "--validate-every", 2, "--validate-sentences", 2, "--validation-command", scorer(began))
    flags = (*flags, "--best-by", "command", "--evaluation-timeout-minutes", 0.3)
    told = job("run", *flags).start_ranks()
    told.wait_for(began.exists)
    (program,) = [
        process for process in psutil.Process(told.processes[0].pid).children() if SCORER in process.cmdline()
    ]
    # Longer than a rank may make no progress.
    time.sleep(20)
    assert program.is_running()
    told.processes[1].send_signal(signal.SIGTERM)
    assert told.statuses() == [INTERRUPTED] * 2, told.output
    assert "stopped at step 2, SIGTERM on rank 1" in told.output
    assert not program.is_running()
    assert read_records(told.run_dir, "valid") == []
    assert told.checkpoints == ["step-00000002"]
    last = job("run", *flags).start_ranks()
    assert last.statuses() == [0, 0], last.output
    (record,) = read_records(told.run_dir, "valid")
    assert (record["step"], record["command"]) == (2, 7.0)
    assert Progress.from_json(CheckpointReader(told.run_dir / "checkpoints/step-00000002").state).best == [(2, 7.0)]
    assert "finished at step 2: all steps done" in last.output


def test_whatever_happens_to_one_rank_ends_all(tmp_path: Path, job: Callable[..., Job]) -> None:
    """Started together, for they wait most of the time."""
    limit = (*RARELY, "--timeout-minutes", 0.2)
    frozen = job("frozen", *limit, fault="1:3:SIGSTOP").start_ranks()
    raised = job("raised", *RARELY, fault="1:3:raise").start_ranks()
    began = tmp_path / "began"
    scored = ("--validate-every", 1, "--validate-sentences", 2, "--validation-command", scorer(began))
    orphaned = job("orphaned", *scored, "--max-steps", 10**6).start_deepspeed()
    limited = job("limited", *RARELY, "--walltime-minutes", 0.01).start_ranks()

    assert limited.statuses() == [INTERRUPTED] * 2, limited.output
    assert "stopped at step 1, the time limit is near" in limited.output
    assert limited.checkpoints == ["step-00000001"]

    assert raised.statuses() == [1, 1], raised.output
    assert "ValueError: boom" in raised.output
    assert "error: rank 0 ends: rank 1 failed: ValueError: boom" in raised.output

    assert frozen.processes[0].wait(PATIENCE) == HUNG, frozen.output
    rank_1 = frozen.processes[1]
    # Where it was is as old as its last beat: these steps are shorter than the time between two.
    named = f"rank 1 ({socket.gethostname()}, process {rank_1.pid}) shows no sign of life; last seen in "
    assert named in frozen.output
    stacks = (frozen.run_dir / "hangs" / "rank-0.txt").read_text()
    assert "no progress in training, step 3, for 0.2 minutes" in stacks
    assert "_train_step" in stacks
    assert named in stacks
    rank_1.send_signal(signal.SIGCONT)
    # It finds the hang, or that rank 0 is gone.
    assert rank_1.wait(PATIENCE) in (1, HUNG), frozen.output

    orphaned.wait_for(began.exists)
    launcher = psutil.Process(orphaned.processes[0].pid)
    # DeepSpeed's launcher of the node, the ranks, and the program that scores.
    family = launcher.children(recursive=True)
    assert len(family) == 4
    launcher.kill()
    _, alive = psutil.wait_procs(family, timeout=PATIENCE)
    assert alive == [], orphaned.output
    assert f"its launcher, process {launcher.pid}, is gone" in orphaned.output


def test_a_second_launch_on_the_same_port_is_told_so_and_harms_nothing(job: Callable[..., Job]) -> None:
    port = free_port()
    first = job("first", *RARELY, "--max-steps", 10**6).start_deepspeed(port=port)
    first.wait_for_training()
    second = job("second", "--max-steps", 1)
    # By which a rank knows DeepSpeed's launcher.
    second.environment["CROSS_SIZE"] = "1"
    assert second.start_ranks(port=port).processes[0].wait(PATIENCE) == 1, second.output
    second.close()
    (said,) = re.findall("^error: .*", second.output, re.MULTILINE)
    assert re.fullmatch(
        rf"error: port {port} of this machine is taken, perhaps by another training: use another one, such as "
        r"deepspeed --master_port \d+",
        said,
    )
    assert not second.run_dir.exists()
    # The first one trains, and can still be stopped: its ranks hear each other.
    first.wait_for_training((first.run_dir / "metrics.jsonl").read_text().count("\n") + 2)
    rank = next(process for process in first.family() if "--local_rank=1" in process.cmdline())
    rank.send_signal(signal.SIGUSR1)
    assert first.statuses() == [INTERRUPTED], first.output
