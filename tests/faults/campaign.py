"""Campaigns of faults: their cases, what cases share (data, trainings, undisturbed runs), and the table of outcomes.

Each case is a function of its campaign, kind and number. The test suite runs a few, and `make faults` all of them.
"""

import random
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.measure import result_of, write_result
from benchmarks.rows import row
from dist_transformer.config.plain import read_json
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.run.checkpoint.reader import checkpoint_problem
from dist_transformer.run.layout import checkpoints_of
from tests.conftest import ROOT
from tests.jobs import Job

STAGES = ("zero0", "zero1", "zero2", "zero3")
in_slice = pytest.mark.slice(name="campaigns")


def campaign(
    faults: Mapping[str, int], *, each: int = 1, sample: tuple[str, ...] | None = None
) -> pytest.MarkDecorator:
    """Mark the test of a campaign, which takes a `case`.

    Args:
        faults: the full number of faults, by kind.
        each: number of faults in a case.
        sample: kinds of which the suite runs the first case; None for all.
    """
    return pytest.mark.campaign(faults=faults, each=each, sample=sample)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One of a campaign's cases: everything random in it follows from its name."""

    campaign: str
    kind: str
    number: int

    def generator(self) -> random.Random:
        return random.Random(f"{self.campaign} {self.kind} {self.number}")

    def __str__(self) -> str:
        return f"{self.kind}-{self.number}"


def cases_of(name: str, marked: Mapping[str, Any], table: Path | None) -> list[Case]:
    """List the cases of the sample, or all that a table does not hold."""
    if table is None:
        return [Case(campaign=name, kind=kind, number=0) for kind in marked["sample"] or marked["faults"]]
    known, each = kinds_of(read(table), name), marked["each"]
    return [
        Case(campaign=name, kind=kind, number=number)
        for kind, full in marked["faults"].items()
        for number in range(known.get(kind, {}).get("faults", 0) // each, -(-full // each))
    ]


def read(table: Path) -> dict[str, Any]:
    known: dict[str, Any] = read_json(table) if table.exists() else {"figures": {"campaigns": {}}}
    return known


def kinds_of(known: dict[str, Any], name: str) -> dict[str, Any]:
    kinds: dict[str, Any] = known["figures"]["campaigns"].setdefault(name, {}).setdefault("kinds", {})
    return kinds


def add(table: Path, case: Case, marked: Mapping[str, Any], problem: str, seconds: float) -> None:
    """Count a case in the table, which lists what failed."""
    known = read(table)
    part = kinds_of(known, case.campaign).setdefault(case.kind, {"faults": 0, "passed": 0, "cases": 0, "failed": []})
    part |= {"full": marked["faults"][case.kind], "cases": part["cases"] + 1}
    part["faults"] += marked["each"]
    part["passed"] += 0 if problem else marked["each"]
    part["failed"] += [{"case": case.number, "problem": problem[-2000:]}] if problem else []
    kinds = [kind for name in known["figures"]["campaigns"] for kind in kinds_of(known, name).values()]
    totals = {name: sum(kind[name] for kind in kinds) for name in ("faults", "passed", "full")}
    what = "kills; slow, lost, stuck ranks; damaged, hostile files; failing disks"
    planned = "{figures[faults]:,} of {figures[full]:,} planned"
    result = result_of(
        None,
        what="faults done to real trainings on purpose: how many of each kind there were, how many are planned, "
        "and how many came out as they must; what did not is listed under failed",
        command="make faults",
        seeds=[],
        wall_seconds=round(known.get("wall_seconds", 0.0) + seconds, 1),
        figures={**known["figures"], **totals},
        rows=known.get("rows") or [row("faults", what, planned, "{figures[passed]:,}")],
    )
    part["where"] = f"{result['date']}, {result['machine']}"
    write_result(table, {**result, "corpus": "toy grammar (en-de)"})


class Lab:
    """The place of the cases: a folder for one case, data and undisturbed runs for all."""

    def __init__(self, scratch: Path, data: DataFolder) -> None:
        self.scratch, self.data = scratch, data
        self.folder = scratch / "case"
        self._jobs: list[Job] = []

    def clear(self) -> None:
        """Before a case, and after the last: its processes and its files."""
        for job in self._jobs:
            job.close()
        self._jobs.clear()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()

    def job(self, run_dir: Path, *flags: object, stage: str = "zero1", fault: str = "", threads: int = 1) -> Job:
        """A training that is to be started."""
        config = ("--deepspeed-config", ROOT / "ds_configs" / f"{stage}.json")
        # A run that waits for nothing: four packs are as many steps for one rank as for four.
        flags = ("--validate-every", 0, "--batch.packs-per-step", 4, *config, *flags)
        return self.plain_job(run_dir, *flags, fault=fault, threads=threads)

    def plain_job(self, run_dir: Path, *flags: object, **options: Any) -> Job:
        """The same, without flags that all cases share."""
        self._jobs.append(Job(self.folder, self.data, run_dir, *flags, **options))
        return self._jobs[-1]

    def train(self, run_dir: Path, *flags: object, world: int = 2, stage: str = "zero1", threads: int = 1) -> str:
        """Train to the end; gives the output."""
        job = self.job(run_dir, *flags, stage=stage, threads=threads).start_ranks(world)
        assert set(job.statuses()) == {0}, job.output[-2000:]
        return job.output

    def undisturbed(self, name: str, *flags: object, world: int = 2, stage: str = "zero1", threads: int = 1) -> Path:
        """The run folder of a training to which nothing happened, made once."""
        run_dir = self.scratch / name
        if not run_dir.exists():
            self.train(run_dir, *flags, world=world, stage=stage, threads=threads)
        return run_dir

    def copy_of(self, whole: Path) -> Path:
        return Path(shutil.copytree(whole, self.folder / "run"))


def newest_whole(run_dir: Path) -> Path | None:
    return next((path for path in checkpoints_of(run_dir) if checkpoint_problem(path) is None), None)


def clear_errors(output: str) -> list[str]:
    """The lines in which a job says to its user why it ends."""
    return [line for line in output.splitlines() if line.startswith("error: ")]
