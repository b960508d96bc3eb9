"""The checkpoint that a start takes, and the damage that it finds."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dist_transformer.base.errors import UserError
from dist_transformer.run.checkpoint.reader import FORMAT_VERSION, checkpoint_problem, newest_checkpoint
from tests.run.saving import PART, save
from tests.support.damage import flip


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "a run's folder"


def test_a_run_folder_without_checkpoints_starts_at_step_0(run: Path) -> None:
    warned: list[str] = []
    assert newest_checkpoint(run, warned.append) is None
    (run / "checkpoints").mkdir(parents=True)
    assert newest_checkpoint(run, warned.append) is None
    assert warned == []


def test_the_newest_is_chosen(run: Path) -> None:
    for step in (90, 100, 10):
        save(run, step)
    warned: list[str] = []
    assert newest_checkpoint(run, warned.append) == run / "checkpoints" / "step-00000100"
    assert warned == []


def _rewrite_manifest(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    change(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))


def _copy_of_older(path: Path) -> None:
    shutil.rmtree(path)
    shutil.copytree(path.with_name("step-00000010"), path)


# Each kind of damage, and the file that the warning must name.
DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "flip": (lambda path: flip(path / PART), PART),
    "truncated": (lambda path: os.truncate(path / PART, 100), PART),
    "no part": (lambda path: (path / PART).unlink(), PART),
    "one byte more": (lambda path: (path / "state.json").open("a").write("\n"), "state.json"),
    "no state": (lambda path: (path / "state.json").unlink(), "state.json"),
    "no manifest": (lambda path: (path / "manifest.json").unlink(), "manifest.json"),
    "empty manifest": (lambda path: (path / "manifest.json").write_text(""), "manifest.json"),
    # A reader takes every part that it finds, so each must be in the manifest.
    "a part too many": (lambda path: shutil.copy(path / PART, path / "part-00001.safetensors"), "part-00001"),
    "part not stated": (lambda path: _rewrite_manifest(path, lambda m: m["files"].pop(PART)), PART),
    "another step's": (lambda path: _rewrite_manifest(path, lambda m: m.update(step=10)), "is of step 10"),
    "an older one under its name": (_copy_of_older, "is of step 10"),
    "newer format": (
        lambda path: _rewrite_manifest(path, lambda m: m.update(format_version=FORMAT_VERSION + 1)),
        "newer version",
    ),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_is_found_and_the_older_checkpoint_is_taken(kind: str, run: Path) -> None:
    older, path = save(run, 10), save(run, 20)
    damage, named = DAMAGES[kind]
    damage(path)
    problem = checkpoint_problem(path)
    assert problem is not None
    assert "step-00000020" in problem
    assert named in problem
    warned: list[str] = []
    assert newest_checkpoint(run, warned.append) == older
    assert warned == [
        f"{problem}: it is not used",
        f"falling back to {older}: every step after 10 is computed again",
    ]


def test_every_byte_of_a_checkpoint_is_guarded(run: Path) -> None:
    path = save(run, 20)
    for name in (PART, "state.json"):
        content = (path / name).read_bytes()
        for at in range(0, len(content), 7):
            (path / name).write_bytes(content[:at] + bytes([content[at] ^ 0x10]) + content[at + 1 :])
            assert checkpoint_problem(path) is not None
        (path / name).write_bytes(content)
    assert checkpoint_problem(path) is None


def test_every_byte_of_the_manifest_that_counts_is_guarded(run: Path) -> None:
    """Wherever a bit of it flips, each file has the stated hash, or the checkpoint is not used."""
    path = save(run, 20)
    content = (path / "manifest.json").read_bytes()
    before = json.loads(content)
    for at in range(0, len(content), 3):
        changed = content[:at] + bytes([content[at] ^ 0x10]) + content[at + 1 :]
        (path / "manifest.json").write_bytes(changed)
        if checkpoint_problem(path) is None:
            assert json.loads(changed)["files"] == before["files"]


def test_the_own_hash_in_manifests_of_older_versions_is_not_read(run: Path) -> None:
    path = save(run, 20)
    for version in (1, 2):
        _rewrite_manifest(
            path, lambda manifest, version=version: manifest.update(format_version=version, sha256="0" * 64)
        )
        assert checkpoint_problem(path) is None


def test_when_all_are_damaged_training_does_not_start_at_step_0(run: Path) -> None:
    for step, kind in ((10, "flip"), (20, "truncated"), (30, "no manifest")):
        DAMAGES[kind][0](save(run, step))
    warned: list[str] = []
    message = rf"no checkpoint in {re.escape(str(run))}/checkpoints is usable: restore one from a backup, or choose"
    with pytest.raises(UserError, match=message):
        newest_checkpoint(run, warned.append)
    assert ["step-000000" + warning.split("step-000000")[1][:2] for warning in warned] == [
        "step-00000030",
        "step-00000020",
        "step-00000010",
    ]
