"""A campaign of faults, and what its cases share: a corpus, trainings, and undisturbed runs."""

import random
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from safetensors.torch import load_file

from dist_transformer.base.errors import UserError
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.run.checkpoint.reader import checkpoint_problem
from dist_transformer.run.layout import checkpoints_of
from tests.conftest import ROOT
from tests.jobs import Job

STAGES = ("zero0", "zero1", "zero2", "zero3")


class UnavailableError(UserError):
    """This machine lacks what a kind of fault needs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """The outcome of one case."""

    problems: tuple[str, ...]
    """Requirements that did not hold."""
    faults: int = 1
    """Number of faults in this case."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Numbers that the table adds up over cases."""
    highest: Mapping[str, float] = field(default_factory=dict)
    """Numbers of which the table keeps the highest."""
    cells: Mapping[str, str] = field(default_factory=dict)
    """Texts that the table keeps as they are, by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Campaign:
    """One kind of fault, again and again."""

    name: str
    must_hold: str
    full: Mapping[str, int]
    """The full number of faults, by kind."""
    run: Callable[["Case", "Lab"], Found]


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One of a campaign's cases: everything random in it follows from its name."""

    campaign: str
    kind: str
    number: int

    def generator(self) -> random.Random:
        return random.Random(f"{self.campaign} {self.kind} {self.number}")


class Lab:
    """The place of the cases: a folder for one case, data and undisturbed runs for all."""

    def __init__(self, scratch: Path, data: DataFolder) -> None:
        self.scratch, self.data = scratch, data
        self._jobs: list[Job] = []

    @property
    def folder(self) -> Path:
        """The folder of the case."""
        return self.scratch / "case"

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
        self._jobs.append(Job(self.folder, self.data, run_dir, *flags, fault=fault, threads=threads))
        return self._jobs[-1]

    def train(self, run_dir: Path, *flags: object, world: int = 2, stage: str = "zero1", threads: int = 1) -> str:
        """Train to the end; gives the output.

        Raises:
            AssertionError: it does not end well.
        """
        job = self.job(run_dir, *flags, stage=stage, threads=threads).start_ranks(world)
        statuses = job.statuses()
        assert set(statuses) == {0}, f"status {statuses}: {job.output[-2000:]}"
        return job.output

    def undisturbed(self, name: str, *flags: object, world: int = 2, stage: str = "zero1", threads: int = 1) -> Path:
        """The run folder of a training to which nothing happened, made once."""
        run_dir = self.scratch / name
        if not run_dir.exists():
            self.train(run_dir, *flags, world=world, stage=stage, threads=threads)
        return run_dir


def failing(checks: Mapping[str, object]) -> tuple[str, ...]:
    """The names of what does not hold."""
    return tuple(name for name, holds in checks.items() if not holds)


def same_end(run_dir: Path, whole: Path, step: int) -> bool:
    """Whether two runs have the same sentences in every step, and weights that are equal bit for bit."""
    name = f"weights/step-{step:08d}.safetensors"
    expected, found = load_file(whole / name), load_file(run_dir / name)
    ledgers = [(folder / "ledger.jsonl").read_bytes() for folder in (whole, run_dir)]
    same = expected.keys() == found.keys() and all(expected[key].equal(found[key]) for key in expected)
    return same and ledgers[0] == ledgers[1]


def newest_whole(run_dir: Path) -> Path | None:
    return next((path for path in checkpoints_of(run_dir) if checkpoint_problem(path) is None), None)


def unfinished(run_dir: Path) -> list[Path]:
    """Temporary files and folders of saves."""
    return [path for folder in ("checkpoints", "weights") for path in (run_dir / folder).glob(".*.tmp")]


def clear_errors(output: str) -> list[str]:
    """The lines in which a job says to its user why it ends."""
    return [line for line in output.splitlines() if line.startswith("error: ")]
