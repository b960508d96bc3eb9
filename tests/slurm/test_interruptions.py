"""Jobs that are stopped in every way that SLURM has: they resume as if they had not been stopped.

Each case trains the reference run again, with the same script and flags, and is stopped in the middle.
"""

import os
import re
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.jobs import require_same_end
from tests.slurm.cluster import URGENT, wait_until
from tests.slurm.conftest import SMALL, STEPS, TWO_NODES, FinishedJob, Site

pytestmark = pytest.mark.slice(name="slurm-ends")

MIDDLE = "step  8/"


ENDLESS = [*SMALL[:-1], "100000"]


def first_steps(run_dir: Path) -> list[str]:
    """The ledger, as far as the reference run goes."""
    return (run_dir / "ledger.jsonl").read_text(encoding="utf-8").splitlines()[:STEPS]


def await_end_of_reference(site: Site, job: str) -> None:
    """Let an endless training run as far as the reference run goes, and end it."""
    site.await_line(job, f"step {STEPS}: saved")
    site.cluster.run("scancel", job)
    site.cluster.wait(job)


def submit(site: Site, name: str, *, options: Sequence[str] = (), flags: list[str] = SMALL, **settings: object) -> str:
    """Train on the data of the finished run, in a run folder of its own."""
    settings = {"STAGES": "train", "RUN_DIR": site.checkout / name, **settings}
    return site.submit("train_big.sh", *flags, options=[*TWO_NODES, *options], **settings)


def until_the_middle(site: Site, job: str) -> str:
    site.await_line(job, MIDDLE)
    return job


def await_nothing_left(site: Site) -> None:
    """Each node soon runs its daemon and nothing else."""
    nodes = site.cluster.nodes
    wait_until(lambda: [len(site.cluster.processes(node)) for node in nodes] == [1, 1], "nothing left")


def requeue(site: Site, job: str) -> None:
    site.cluster.run("scontrol", "requeue", job)


def warn(signal: str, *flags: str) -> Callable[[Site, str], None]:
    def send(site: Site, job: str) -> None:
        site.cluster.run("scancel", f"--signal={signal}", *flags, job)

    return send


# In pairs, because each start of a job costs seconds of imports.
@pytest.mark.parametrize(
    "interrupts",
    [
        {"step  8/": ("requeue", requeue), "step 13/": ("SIGUSR1", warn("USR1"))},
        {
            "step  4/": ("SIGUSR2", warn("USR2")),
            "step  9/": ("SIGTERM", warn("TERM")),
            "step 14/": ("SIGUSR1", warn("USR1", "--batch")),
        },
    ],
    ids=["requeue, USR1", "USR2, TERM, USR1 to the script"],
)
def test_an_interrupted_job_goes_back_into_the_queue_and_ends_as_if_nothing_happened(
    interrupts: dict[str, tuple[str, Callable[[Site, str], None]]], site: Site, finished: FinishedJob
) -> None:
    names = [name for name, _ in interrupts.values()]
    name = f"run {' '.join(names)}"
    job = submit(site, name)
    for number, (moment, (_, interrupt)) in enumerate(interrupts.items()):
        # A start that ends may have steps beyond the moment, because its ranks agree on a stop once per second.
        site.await_line(job, "resumed from", times=number)
        site.await_line(job, moment)
        interrupt(site, job)
    assert site.cluster.wait(job) == "COMPLETED", site.log(job)
    assert site.cluster.restarts(job) == len(interrupts)
    # Nothing that was computed is computed again, unless the job had no time to save, which a requeue may not give.
    stopped = re.findall(r"stopped at step (\d+), (SIG\w+)", site.log(job))
    resumed = re.findall(r"resumed from .*/step-(\d+)", site.log(job))
    warned = [name for name in names if name != "requeue"]
    assert [signal for _, signal in stopped][-len(warned) :] == warned
    assert [int(step) for step, _ in stopped] == list(map(int, resumed))[-len(stopped) :]
    require_same_end(site.checkout / name, finished.run_dir, STEPS)
    await_nothing_left(site)


def test_a_cancelled_job_stays_cancelled_and_the_same_command_continues_it(site: Site, finished: FinishedJob) -> None:
    job = until_the_middle(site, submit(site, "cancelled"))
    site.cluster.run("scancel", job)
    assert site.cluster.wait(job) == "CANCELLED"
    assert site.cluster.restarts(job) == 0
    await_nothing_left(site)
    again = submit(site, "cancelled")
    assert site.cluster.wait(again) == "COMPLETED", site.log(again)
    require_same_end(site.checkout / "cancelled", finished.run_dir, STEPS)


def test_before_its_time_limit_a_job_saves_and_goes_back_into_the_queue(site: Site, finished: FinishedJob) -> None:
    """A real limit: two minutes, with a warning one minute before, for a training of hours."""
    job = submit(site, "limited", options=["--time=2", "--signal=USR1@60"], flags=ENDLESS)
    wait_until(lambda: site.cluster.restarts(job) == 1, "restarted", seconds=600)
    site.await_line(job, "resumed from")
    await_end_of_reference(site, job)
    assert first_steps(site.checkout / "limited") == first_steps(finished.run_dir)


@pytest.mark.parametrize("loss", ["drained", "without power"])
def test_a_lost_node_leaves_the_job_to_the_others(loss: str, site: Site, finished: FinishedJob) -> None:
    """`--nodes=1-2`: it begins on two nodes and resumes on one, with the same sentences."""
    job = until_the_middle(site, submit(site, loss, options=["--nodes=1-2"]))
    assert "2 rank(s)" in site.log(job)
    try:
        if loss == "drained":
            site.cluster.run("scontrol", "update", "NodeName=node2", "State=DOWN", "Reason=test")
        else:
            site.cluster.power_off("node2")
        assert site.cluster.wait(job) == "COMPLETED", site.log(job)
    finally:
        if loss != "drained":
            site.cluster.start_node("node2")
        site.cluster.run("scontrol", "update", "NodeName=node2", "State=RESUME", status=None)
        wait_until(site.cluster.idle, "node2 is back")
    assert site.cluster.restarts(job) >= 1
    assert "1 rank(s)" in site.log(job)
    assert first_steps(site.checkout / loss) == first_steps(finished.run_dir)


def test_a_node_whose_daemon_was_killed_is_left(site: Site, finished: FinishedJob) -> None:
    """SLURM gives the node up after its timeout; what still runs there ends with the ranks of the other."""
    job = submit(site, "no daemon", options=["--nodes=1-2"], flags=ENDLESS)
    site.await_line(job, "step 10: saved")
    try:
        site.cluster.kill_daemon("node2")
        wait_until(lambda: site.cluster.restarts(job) == 1, "restarted", seconds=600)
        site.await_line(job, "1 rank(s)")
        site.await_line(job, "resumed from")
        wait_until(lambda: not ranks_on(site, "node2"), "no rank is left on node2")
        await_end_of_reference(site, job)
    finally:
        site.cluster.start_node("node2")
        wait_until(site.cluster.idle, "node2 is back")
    assert first_steps(site.checkout / "no daemon") == first_steps(finished.run_dir)
    await_nothing_left(site)


def ranks_on(site: Site, node: str, run_dir: str = "") -> list[int]:
    """List the processes that train on a node, without the scripts that started them."""

    def is_rank(pid: int) -> bool:
        with suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
            return b"/task.sh\0" not in words and b"dist_transformer\0train\0" in words and run_dir.encode() in words
        return False

    return list(filter(is_rank, site.cluster.processes(node)))


def test_a_preempted_job_saves_and_resumes_when_the_other_is_done(site: Site, finished: FinishedJob) -> None:
    """A job of a partition that comes first takes all nodes for some seconds."""
    job = submit(site, "preempted", flags=ENDLESS)
    site.await_line(job, "step 10: saved")
    command = ["sbatch", "--parsable", f"--partition={URGENT}", "--nodes=2", "--exclusive", "--output=/dev/null"]
    urgent = site.cluster.run(*command, "--wrap=sleep 10", cwd=site.checkout)
    site.await_line(job, "stopped at step ")
    assert site.cluster.wait(urgent) == "COMPLETED"
    site.await_line(job, "resumed from")
    assert (site.cluster.state(job), site.cluster.restarts(job)) == ("RUNNING", 1)
    stopped = re.search(r"stopped at step (\d+), SIGTERM", site.log(job))
    resumed = re.search(r"resumed from .*/step-(\d+)", site.log(job))
    assert stopped is not None
    assert resumed is not None
    assert int(stopped[1]) == int(resumed[1])
    await_end_of_reference(site, job)
    assert first_steps(site.checkout / "preempted") == first_steps(finished.run_dir)
    await_nothing_left(site)


# Loaded by every Python of the job; the task of node2 fails in its next step as soon as the file is there.
FAULT = """\
import os, sys, threading, time

def watch():
    while not os.path.exists(os.environ["FAULT"]):
        time.sleep(0.1)
    def fail(*_):
        raise RuntimeError("the fault")
    sys.modules["dist_transformer.training.trainer"].Trainer._train_step = fail

if os.environ.get("SLURM_PROCID") == "1" and "FAULT" in os.environ:
    threading.Thread(target=watch, daemon=True).start()
"""


def test_a_rank_that_raises_ends_the_job_with_its_status(site: Site, finished: FinishedJob, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(FAULT, encoding="utf-8")
    job = until_the_middle(site, submit(site, "raises", FAULT=tmp_path / "now", PYTHONPATH=tmp_path))
    (tmp_path / "now").touch()
    assert site.cluster.wait(job) == "FAILED", site.log(job)
    log = site.log(job)
    assert site.cluster.exit_code(job) == 1, log
    assert re.search(r"error: rank 1: RuntimeError in training/trainer.py:\d+: the fault", log)
    assert re.search(r"failed: task \d on node\d ended with status 1", log)
    await_nothing_left(site)
    shutil.rmtree(site.checkout / "raises")


@contextmanager
def python_is(site: Site, program: str, folder: Path) -> Iterator[None]:
    """Put a shell program in the place of the user's Python."""
    stub = folder / "python"
    stub.write_text(f"#!/bin/sh\n{program}\n", encoding="utf-8")
    stub.chmod(0o755)
    with site.edited(f'PYTHON=("{stub}")'):
        yield


@pytest.mark.parametrize(
    ("status", "restarts", "said"),
    [
        # The training is interrupted at every start, before it has saved.
        (75, 5, "error: started 6 times without a new checkpoint (newest: none)"),
        (137, 1, "ended with status 137, again without a new checkpoint (newest: none)"),
    ],
)
def test_a_job_that_never_gets_on_is_given_up(
    status: int, restarts: int, said: str, site: Site, tmp_path: Path
) -> None:
    with python_is(site, f'[ "$1" = -c ] || exit {status}', tmp_path):
        job = submit(site, f"ends with {status}", flags=[])
        assert site.cluster.wait(job) == "FAILED", site.log(job)
    assert site.cluster.restarts(job) == restarts
    assert said in site.log(job)
    assert status == 75 or site.cluster.exit_code(job) == status


# Doctor finds node2 unfit as soon as the fault has happened.
BROKEN_NODE = """\
case "$*" in *doctor*) [ ! -e "$BROKEN" ] || [ "$SLURMD_NODENAME" != node2 ] || exit 1;; esac
exec {python} "$@"
"""
DRILL = [*SMALL[:-1], "60"]
SHARED = ["--mincpus=16"]


def test_a_task_that_is_killed_aborts_or_hangs_ends_no_job(site: Site, finished: FinishedJob, tmp_path: Path) -> None:
    """Three jobs at once. The first one's node is broken, so it resumes on the other one."""
    broken = tmp_path / "broken"
    with python_is(site, BROKEN_NODE.format(python=shlex.quote(sys.executable)), tmp_path):
        jobs = {
            "killed": submit(
                site, "killed", options=[*SHARED, "--nodes=1-2"], flags=DRILL, DOCTOR="yes", BROKEN=broken
            ),
            "aborts": submit(site, "aborts", options=SHARED, flags=DRILL),
            "hangs": submit(site, "hangs", options=SHARED, flags=[*DRILL, "--timeout-minutes", "1"]),
        }
        signals = {"killed": signal.SIGKILL, "aborts": signal.SIGABRT, "hangs": signal.SIGSTOP}
        began, lost = dict[str, float](), dict[str, float]()

        def all_train_again() -> bool:
            for name, job in jobs.items():
                log = site.log(job)
                if name not in began and MIDDLE in log:
                    broken.touch()
                    (rank,) = ranks_on(site, "node2", f"/{name}")
                    os.kill(rank, signals[name])
                    began[name] = time.monotonic()
                elif name not in lost and re.search(r"resumed from[^$]*step +\d+/", log):
                    lost[name] = time.monotonic() - began[name]
            return lost.keys() == jobs.keys()

        wait_until(all_train_again, "all train again", seconds=900)
        print({name: f"{seconds:.0f} s until the first step after the resume" for name, seconds in lost.items()})
        assert [site.cluster.wait(job) for job in jobs.values()] == ["COMPLETED"] * 3
    assert [site.cluster.restarts(job) for job in jobs.values()] == [1] * 3
    for name, status in (("killed", 137), ("aborts", 134), ("hangs", 76)):
        assert re.search(rf"task \d on node\d ended with status {status}\n", site.log(jobs[name]))
        assert first_steps(site.checkout / name) == first_steps(finished.run_dir)
    assert "back into the queue, without node2\n" in site.log(jobs["killed"])
    assert "1 rank(s)" in site.log(jobs["killed"])
    await_nothing_left(site)
