"""A run folder of a stranger: whatever is a link in it, nothing outside is written or removed."""

import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest

from dist_transformer.averaging.mean import average
from dist_transformer.base.errors import UserError
from dist_transformer.config.plain import read_json
from dist_transformer.evaluation.report import write_report as write_scores
from dist_transformer.evaluation.samples import SampleSheet, write_sheet
from dist_transformer.reporting.board import Board
from dist_transformer.reporting.html.page import write_report
from dist_transformer.reporting.sinks import MetricsFile
from dist_transformer.run.environment import record_environment
from dist_transformer.run.folder import open_run, settings_of
from dist_transformer.run.layout import FOLDERS
from dist_transformer.run.ledger import Ledger
from dist_transformer.run.verify import verify_run
from dist_transformer.runtime.world import World
from dist_transformer.training.fault_tolerance.heartbeats import Heartbeats
from tests.run.saving import save

FILES = (
    "config.json",
    "tokenizer.json",
    "environment.json",
    "metrics.jsonl",
    "ledger.jsonl",
    "lock",
    "checkpoints/latest",
    "checkpoints/step-00000004/manifest.json",
    "checkpoints/step-00000004/state.json",
    "checkpoints/step-00000004/part-00000.safetensors",
    "weights/SHA256SUMS",
    "weights/step-00000004.safetensors",
    "samples/step-00000006.json",
    "hangs/rank-0.txt",
    "bleu.json",
    "report.html",
)
INNER_FOLDERS = ("checkpoints/step-00000002", "checkpoints/step-00000004", "model")
RESUME_REFUSES = {"lock", "metrics.jsonl", "ledger.jsonl", *FOLDERS}
"""Places that must not be links because a run appends to them; everything else is replaced."""


@pytest.fixture
def lived(run: Path) -> Path:
    """A run with every file that a run may have, and two weight files more than are kept."""
    for name in FOLDERS:
        (run / name).mkdir(exist_ok=True)
    (run / "samples" / "step-00000009.json").write_text("{}")
    (run / "heartbeats" / "rank-00000-before.json").write_text("{}")
    for name in FILES:
        if not (run / name).exists():
            (run / name).write_text("[]" if name == "environment.json" else "")
    return run


def plant(run: Path, name: str, victim: Path) -> None:
    """Move what is there away, and put a link to it in its place."""
    place = run / name
    if place.exists():
        shutil.move(place, victim)
    else:
        victim.mkdir()
        (victim / "file").write_text("theirs")
    place.symlink_to(victim)


def content_of(victim: Path) -> dict[str, bytes]:
    files = [victim] if victim.is_file() else sorted(file for file in victim.rglob("*") if file.is_file())
    return {str(file.relative_to(victim.parent)): file.read_bytes() for file in files}


def resume(run: Path) -> None:
    described = read_json(run / "config.json")
    config = settings_of(described, run / "config.json").changed(run_dir=run)
    data = SimpleNamespace(path=Path(config.corpora.data[0]))
    with ExitStack() as held:
        open_run(config, described, data, held)  # type: ignore[arg-type]


def beat(run: Path) -> None:
    Heartbeats(run, World(), "launch").remove_earlier()


def log(run: Path) -> None:
    metrics = MetricsFile(run)
    metrics.record("train", 5, {})
    metrics.close()


def enter_step(run: Path) -> None:
    ledger = Ledger(run / "ledger.jsonl")
    ledger.add(6, pair_hash=1, target_tokens=1)
    ledger.flush()


def draw(run: Path) -> None:
    Board(run / "tensorboard", first_step=4, warn=lambda _: None).close()


def write_sample(run: Path) -> None:
    sheet = SampleSheet(step=6, sentences=1, bleu=1.0, signature="", samples=())
    write_sheet(run, sheet)


WRITERS: dict[str, Callable[[Path], object]] = {
    "resume": resume,
    "save": lambda run: save(run, 6, checkpoints=1, weights=1),
    "log": log,
    "ledger": enter_step,
    "heartbeats": beat,
    "board": draw,
    "samples": write_sample,
    "environment": lambda run: record_environment(run, {}, step=4),
    "report": write_report,
    "verify": verify_run,
    "scores": lambda run: write_scores({}, run / "bleu.json"),
    "average": lambda run: average([run / "weights" / "step-00000002.safetensors"], run / "model"),
}


@pytest.mark.parametrize("name", [*FILES, *FOLDERS, *INNER_FOLDERS])
def test_nothing_outside_is_written_or_removed(name: str, lived: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    plant(lived, name, victim)
    before = content_of(victim)
    refusing = set()
    for writer, write in WRITERS.items():
        try:
            write(lived)
        except UserError as error:
            if (lived / name).is_symlink() and str(lived / name) in str(error):
                refusing.add(writer)
        assert content_of(victim) == before, writer
    assert ("resume" in refusing) == (name in RESUME_REFUSES)


def test_what_resuming_says(lived: Path, tmp_path: Path) -> None:
    plant(lived, "weights", tmp_path / "victim")
    link = lived / "weights"
    with pytest.raises(UserError) as refused:
        resume(lived)
    said = (
        f"{link} is a link, and nothing is written or removed through links: put a real file or folder there, or remove"
    )
    assert str(refused.value) == f"{said} the link"


def test_a_run_folder_may_be_reached_by_a_link(lived: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(lived)
    resume(tmp_path / "link")
    save(tmp_path / "link", 6, checkpoints=1, weights=1)
    assert (lived / "weights" / "step-00000006.safetensors").is_file()
    assert write_report(tmp_path / "link").is_file()


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_what_is_no_file_is_not_waited_for(name: str, kind: str, lived: Path) -> None:
    """Each reader ends, by an error in words or without what it cannot read."""
    place = lived / name
    place.unlink()
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "device":
        place.symlink_to("/dev/zero")
    else:
        place.mkdir()
    said = []
    for write in WRITERS.values():
        try:
            write(lived)
        except UserError as error:
            said.append(str(error))
    assert not [text for text in said if "\n" in text]
