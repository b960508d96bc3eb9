"""Launches in which one rank was started differently from the others."""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import ROOT
from tests.faults.campaign import Campaign, Case, Found, Lab, clear_errors, failing
from tests.jobs import PATIENCE, SMALL

_WORLD = 2
# Values apart from the defaults of `tiny` and the flags of SMALL; each changes what is trained, saved or reported.
_SETTINGS = {
    "seed": ("2", "17"),
    "max-steps": ("3", "5"),
    "save-every": ("1", "2"),
    "validate-every": ("0", "3"),
    "ema-decay": ("0.9", "0.5"),
    "precision": ("fp32", "bf16"),
    "max-skipped-steps": ("3", "4"),
    "timeout-minutes": ("5", "6"),
    "model.dropout": ("0.2", "0.25"),
    "batch.packs-per-step": ("4", "8"),
    "batch.window-shards": ("1", "2"),
    "optimizer.peak-lr": ("1e-3", "2e-3"),
    "optimizer.label-smoothing": ("0.2", "0"),
    "optimizer.schedule": ("constant", "cosine"),
    "deepspeed-config": ("zero0", "zero2"),
}


@dataclass(frozen=True, kw_only=True)
class Start:
    """The start of one rank."""

    flags: tuple[object, ...] = ()
    folder: Path = ROOT
    """Working folder, which is first in the path of modules."""


def other_flag(case: Case, lab: Lab) -> tuple[Start, Start, str]:
    name = case.generator().choice(sorted(_SETTINGS))
    first, second = (Start(flags=(f"--{name}", value)) for value in _SETTINGS[name])
    return first, second, "deepspeed" if name == "deepspeed-config" else name.replace("-", "_")


def missing_flag(case: Case, lab: Lab) -> tuple[Start, Start, str]:
    name = case.generator().choice(sorted(_SETTINGS))
    given = Start(flags=(f"--{name}", _SETTINGS[name][1]))
    return given, Start(), "deepspeed" if name == "deepspeed-config" else name.replace("-", "_")


def other_file(case: Case, lab: Lab) -> tuple[Start, Start, str]:
    """One path in two folders, as on the disks of two nodes."""
    decays = case.generator().sample(range(1, 90), 2)
    for name, decay in zip(("a", "b"), decays, strict=True):
        (lab.folder / name / "mine.toml").write_text(f"ema_decay = {decay / 100}\n")
    first, second = (Start(flags=("--config", "mine.toml"), folder=lab.folder / name) for name in ("a", "b"))
    return first, second, "ema_decay"


def other_data(case: Case, lab: Lab) -> tuple[Start, Start, str]:
    for name in ("a", "b"):
        shutil.copytree(lab.data.path, lab.folder / name / "data")
    index = lab.folder / "b" / "data" / "index.json"
    index.write_text(index.read_text().replace('"corpus": "', f'"corpus": "{case.number} '))
    first, second = (Start(flags=("--data", "data"), folder=lab.folder / name) for name in ("a", "b"))
    return first, second, "data_sha256"


def other_extension(case: Case, lab: Lab) -> tuple[Start, Start, str]:
    for name, rate in (("a", 1), ("b", case.number + 2)):
        code = (
            "from dist_transformer.config.registry import SCHEDULES\n\n\n"
            f"@SCHEDULES.register('mine')\ndef mine(step, settings, run):\n    return 1e-3 / {rate}\n"
        )
        (lab.folder / name / "mine.py").write_text(code)
    flags = ("--import", "mine.py", "--optimizer.schedule", "mine")
    first, second = (Start(flags=flags, folder=lab.folder / name) for name in ("a", "b"))
    return first, second, "--import mine.py"


def other_code(case: Case, lab: Lab) -> tuple[Start, Start, str]:
    """One module of one rank has another line."""
    package = lab.folder / "b" / "dist_transformer"
    shutil.copytree(ROOT / "dist_transformer", package, ignore=shutil.ignore_patterns("__pycache__"))
    module = case.generator().choice(sorted(package.rglob("*.py")))
    module.write_text(f"{module.read_text()}\nCHANGED = {case.number}\n")
    return Start(), Start(folder=package.parent), "code"


KINDS: dict[str, Callable[[Case, Lab], tuple[Start, Start, str]]] = {
    "another value": other_flag,
    "a flag on one rank": missing_flag,
    "another file": other_file,
    "other data": other_data,
    "another extension": other_extension,
    "other code": other_code,
}


def run(case: Case, lab: Lab) -> Found:
    for name in ("a", "b"):
        (lab.folder / name).mkdir(parents=True)
    first, second, named = KINDS[case.kind](case, lab)
    swapped = case.generator().random() < 0.5
    run_dir = lab.folder / "run"
    statuses, output = launch((second, first) if swapped else (first, second), lab, run_dir)
    errors = clear_errors(output)
    checks = {
        f"status {statuses}": all(statuses),
        # Without a launcher that ends them, the others repeat it after ten seconds.
        f"not one error: {output[-500:]}": len(set(errors)) == 1,
        f"{named} is not named: {errors}": all(f"started differently ({named}" in error for error in errors),
        "a traceback": "Traceback" not in output,
        "the run began": not list(run_dir.glob("*.json*")),
    }
    return Found(problems=failing(checks))


def launch(starts: Sequence[Start], lab: Lab, run_dir: Path) -> tuple[list[int], str]:
    """Start one rank for each, and wait for them; gives their statuses and what they said."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    log, processes = lab.folder / "log", list[subprocess.Popen[bytes]]()
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT))))
    shared |= {"PYTHONPATH": path, "WORLD_SIZE": str(_WORLD), "LOCAL_WORLD_SIZE": str(_WORLD), "DS_ACCELERATOR": "cpu"}
    with log.open("wb") as file:
        for rank, start in enumerate(starts):
            data = () if "--data" in start.flags else ("--data", lab.data.path)
            steps = () if "--max-steps" in start.flags else ("--max-steps", 2)
            words = ["-m", "dist_transformer", "train", *SMALL, *data, *steps, "--run-dir", run_dir, *start.flags]
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
            processes.append(
                subprocess.Popen(
                    [sys.executable, *map(str, words)],
                    cwd=start.folder,
                    env={**os.environ, **shared, **own},
                    stdout=file,
                    stderr=subprocess.STDOUT,
                )
            )
    try:
        return [process.wait(PATIENCE) for process in processes], log.read_text(errors="replace")
    finally:
        for process in processes:
            process.kill()


CAMPAIGN = Campaign(
    name="ranks_apart",
    must_hold="no rank trains; rank 0 says in one line what differs, and between which ranks",
    full=dict.fromkeys(KINDS, 10),
    run=run,
)
