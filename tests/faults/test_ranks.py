"""Ranks that are lost, or were started differently from the others.

A rank raises, stops for 30 seconds, or never joins, in worlds of two to four: all ranks end with an error within the
time limit, and the output names the rank. Ranks that were started apart train nothing: rank 0 says in one line what
differs.
"""

import shutil
import signal
import time

import psutil

from dist_transformer.runtime.launch import free_port
from tests.conftest import ROOT
from tests.faults.campaign import Case, Lab, campaign, clear_errors, in_slice
from tests.jobs import PATIENCE, Job

_LIMIT_MINUTES, _JOINING_MINUTES, _STOPPED_SECONDS = 0.2, 0.5, 30
# To report, to let others fail by themselves, and to leave; to load libraries, on a machine that is busy.
_SPARE_SECONDS, _LOADING_SECONDS = 30, 120


@in_slice
@campaign({"raises": 10, "stops for 30 s": 10, "never joins": 10}, sample=("raises", "never joins"))
def test_lost_ranks(case: Case, lab: Lab) -> None:
    generator = case.generator()
    world = generator.randint(2, 4)
    rank, step = generator.randrange(world), generator.randint(2, 10)
    flags, allowed = ("--save-every", 1000, "--max-steps", 10**6), 60 * _LIMIT_MINUTES + _SPARE_SECONDS
    run_dir, began = lab.folder / "run", time.monotonic()
    if case.kind == "never joins":
        job = lab.job(run_dir, *flags, "--setup-timeout-minutes", _JOINING_MINUTES).start_ranks(world, absent=[rank])
        # Where rank 0 is missing, there is nobody who knows who has come.
        named = "cannot reach rank 0" if rank == 0 else f"rank {rank} of {world} did not join"
        allowed += 60 * _JOINING_MINUTES + _LOADING_SECONDS
    else:
        limits = ("--timeout-minutes", _LIMIT_MINUTES, "--setup-timeout-minutes", 5)
        fault = "raise" if case.kind == "raises" else "SIGSTOP"
        job = lab.job(run_dir, *flags, *limits, fault=f"{rank}:{step}:{fault}").start_ranks(world)
        began, silent = when_it_happened(job, rank), "process {}) shows no sign of life"
        named = f"rank {rank} failed: ValueError: boom"
    stopped = job.processes[rank] if case.kind == "stops for 30 s" else None
    statuses = [process.wait(PATIENCE) for process in job.processes if process is not stopped]
    seconds = time.monotonic() - began
    if stopped is not None:
        named = silent.format(stopped.pid)
        assert sum(silent.format(process.pid) in job.output for process in job.processes) < world
        time.sleep(max(0.0, began + _STOPPED_SECONDS - time.monotonic()))
        stopped.send_signal(signal.SIGCONT)
        statuses.append(stopped.wait(PATIENCE))
    assert 0 not in statuses
    assert named in job.output
    assert seconds <= allowed


def when_it_happened(job: Job, rank: int) -> float:
    """Steps before it may take seconds each."""
    job.wait_for_training()
    deadline, process = time.monotonic() + PATIENCE, psutil.Process(job.processes[rank].pid)
    while process.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE) and "boom" not in job.output:
        assert time.monotonic() < deadline, f"nothing happened:\n{job.output}"
        time.sleep(0.05)
    return time.monotonic()


# Values apart from the defaults of `tiny` and the flags of SMALL; each changes what is trained, saved or reported.
_SETTINGS = {
    "max-steps": ("3", "5"),
    "precision": ("fp32", "bf16"),
    "model.dropout": ("0.2", "0.25"),
    "batch.packs-per-step": ("4", "8"),
    "optimizer.schedule": ("constant", "cosine"),
    "deepspeed-config": ("zero0", "zero2"),
}
_EXTENSION = """
from dist_transformer.config.registry import SCHEDULES
@SCHEDULES.register('mine')
def mine(step, settings, run):
    return {rate}
"""
_APART = ("another file", "another value", "a flag on one rank", "other data", "another extension", "other code")


@campaign(dict.fromkeys(_APART, 10), sample=_APART[:1])
def test_ranks_apart(case: Case, lab: Lab) -> None:
    """One path in two folders, as on the disks of two nodes, or two commands."""
    folders, generator = [lab.folder / name for name in ("a", "b")], case.generator()
    named, flags, where = "", [["--max-steps", "2"], ["--max-steps", "2"]], folders
    for folder in folders:
        folder.mkdir()
    if case.kind in ("another value", "a flag on one rank"):
        name = generator.choice(sorted(_SETTINGS))
        count = 2 if case.kind == "another value" else 1
        flags = [[f"--{name}", value] for value in _SETTINGS[name]][:count] + [[]] * (2 - count)
        named = "deepspeed" if name == "deepspeed-config" else name.replace("-", "_")
    elif case.kind == "another file":
        for folder, decay in zip(folders, generator.sample(range(1, 90), 2), strict=True):
            (folder / "mine.toml").write_text(f"ema_decay = {decay / 100}\n")
        flags, named = [["--config", "mine.toml"]] * 2, "ema_decay"
    elif case.kind == "other data":
        for folder in folders:
            shutil.copytree(lab.data.path, folder / "data")
        index = folders[1] / "data" / "index.json"
        index.write_text(index.read_text().replace('"corpus": "', f'"corpus": "{case.number} '))
        flags, named = [["--data", "data"]] * 2, "data_sha256"
    elif case.kind == "another extension":
        for number, folder in enumerate(folders, 1):
            (folder / "mine.py").write_text(_EXTENSION.format(rate=number / 1000))
        flags, named = [["--import", "mine.py", "--optimizer.schedule", "mine"]] * 2, "--import mine.py"
    else:
        package = folders[1] / "dist_transformer"
        shutil.copytree(ROOT / "dist_transformer", package, ignore=shutil.ignore_patterns("__pycache__"))
        module = generator.choice(sorted(package.rglob("*.py")))
        module.write_text(f"{module.read_text()}\nCHANGED = {case.number}\n")
        where, named = [ROOT, folders[1]], "code"
    port, run_dir = free_port(), lab.folder / "run"
    ranks = enumerate(zip(flags, where, strict=True))
    jobs = [lab.plain_job(run_dir, *given).start_apart(folder, rank, port) for rank, (given, folder) in ranks]
    statuses = [job.statuses() for job in jobs]
    output = "".join(job.output for job in jobs)
    assert [0] not in statuses, output[-500:]
    # Without a launcher that ends them, the others repeat it after ten seconds.
    (error,) = set(clear_errors(output))
    assert f"started differently ({named}" in error
    assert "Traceback" not in output
    assert not list(run_dir.glob("*.json*")), "the run began"
