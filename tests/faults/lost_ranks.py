"""A rank that raises, stops for 30 seconds, or never joins, in worlds of two to four."""

import signal
import time
from collections.abc import Sequence
from subprocess import Popen

import psutil

from tests.faults.campaign import Campaign, Case, Found, Lab, failing
from tests.jobs import PATIENCE, Job

_LIMIT_MINUTES, _JOINING_MINUTES, _STOPPED_SECONDS = 0.2, 0.5, 30
# To report, to let others fail by themselves, and to leave; to load libraries, on a machine that is busy.
_SPARE_SECONDS, _LOADING_SECONDS = 30, 120


def run(case: Case, lab: Lab) -> Found:
    generator = case.generator()
    world = generator.randint(2, 4)
    rank, step = generator.randrange(world), generator.randint(2, 10)
    run_dir, long = lab.folder / "run", ("--save-every", 1000, "--max-steps", 10**6)
    if case.kind == "never joins":
        job = lab.job(run_dir, *long, "--setup-timeout-minutes", _JOINING_MINUTES).start_ranks(world, absent=[rank])
        # Where rank 0 is missing, there is nobody who knows who has come.
        named = "cannot reach rank 0" if rank == 0 else f"rank {rank} of {world} did not join"
        return judged(job, named, since=time.monotonic(), extra=60 * _JOINING_MINUTES + _LOADING_SECONDS)
    fault = {"raises": "raise", "stops for 30 s": "SIGSTOP"}[case.kind]
    limits = ("--timeout-minutes", _LIMIT_MINUTES, "--setup-timeout-minutes", 5)
    job = lab.job(run_dir, *long, *limits, fault=f"{rank}:{step}:{fault}").start_ranks(world)
    began = when_it_happened(job, rank)
    if fault == "raise":
        return judged(job, f"rank {rank} failed: ValueError: boom", since=began)
    others = [process for number, process in enumerate(job.processes) if number != rank]
    silent = "process {}) shows no sign of life"
    found = judged(job, silent.format(job.processes[rank].pid), since=began, waited_for=others)
    named = [silent.format(process.pid) in job.output for process in job.processes]
    time.sleep(max(0.0, began + _STOPPED_SECONDS - time.monotonic()))
    job.processes[rank].send_signal(signal.SIGCONT)
    status = job.processes[rank].wait(PATIENCE)
    checks = {f"it ended with status {status}": status != 0, "every rank is said to be silent": not all(named)}
    return Found(problems=(*found.problems, *failing(checks)), highest=found.highest)


def when_it_happened(job: Job, rank: int) -> float:
    """Steps before it may take seconds each."""
    job.wait_for_training()
    deadline, process = time.monotonic() + PATIENCE, psutil.Process(job.processes[rank].pid)
    while process.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE) and "boom" not in job.output:
        assert time.monotonic() < deadline, f"nothing happened:\n{job.output}"
        time.sleep(0.05)
    return time.monotonic()


def judged(job: Job, named: str, *, since: float, extra: float = 0.0, waited_for: Sequence[Popen[bytes]] = ()) -> Found:
    """Check how the job ended, and in how many seconds.

    Args:
        named: what its output must hold.
        extra: seconds for what lies between `since` and the fault.
    """
    statuses = [process.wait(PATIENCE) for process in waited_for or job.processes]
    seconds = time.monotonic() - since
    checks = {
        f"status {statuses}": 0 not in statuses,
        f"{named!r} is not in {job.output[-1500:]}": named in job.output,
        f"it took {seconds:.0f} s": seconds <= 60 * _LIMIT_MINUTES + _SPARE_SECONDS + extra,
    }
    return Found(problems=failing(checks), highest={"seconds": round(seconds, 1)})


CAMPAIGN = Campaign(
    name="lost_ranks",
    must_hold="all ranks end with an error within the time limit, and the output names the rank",
    full={"raises": 10, "stops for 30 s": 10, "never joins": 10},
    run=run,
)
