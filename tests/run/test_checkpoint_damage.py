"""Checkpoints that are damaged, or whose writing is cut short by a kill or a full disk: what a start takes."""

import errno
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dist_transformer.base.errors import UserError
from dist_transformer.run.checkpoint import writer as module
from dist_transformer.run.checkpoint.reader import FORMAT_VERSION, checkpoint_problem, newest_checkpoint
from tests.faults.disks import mounted
from tests.run.saving import PART, names, pointer, save
from tests.support.damage import flip


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "a run's folder"


def test_a_start_takes_the_newest_checkpoint_or_none(run: Path) -> None:
    warned: list[str] = []
    assert newest_checkpoint(run, warned.append) is None
    (run / "checkpoints").mkdir(parents=True)
    assert newest_checkpoint(run, warned.append) is None
    for step in (90, 100, 10):
        save(run, step)
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


def test_an_unfinished_checkpoint_is_not_seen_and_is_written_over(run: Path) -> None:
    """kill -9 while step 20 was written."""
    older = save(run, 10)
    unfinished = run / "checkpoints" / ".step-00000020.0123abcd.tmp"
    unfinished.mkdir()
    (unfinished / "part-00007.safetensors").write_text("torn")
    warned: list[str] = []
    assert newest_checkpoint(run, warned.append) == older
    assert warned == []
    path = save(run, 20)
    assert names(path) == ["manifest.json", "part-00000.safetensors", "state.json"]
    assert not unfinished.exists()


def _full_disk(function: Callable[..., Any], failing_call: int, calls: Iterator[int]) -> Callable[..., Any]:
    """Let one of the calls of a function find the disk full."""

    def called(*arguments: Any, **options: Any) -> Any:
        if next(calls) == failing_call:
            raise OSError(errno.ENOSPC, "No space left on device")
        return function(*arguments, **options)

    return called


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _rubbish(run: Path) -> list[str]:
    found = (path for path in run.rglob("*") if path.name.startswith(".") or path.name.endswith(".tmp"))
    return [str(path.relative_to(run)) for path in found]


# The part and the weight file go through save_file; fsync is called for each file and folder.
@pytest.mark.parametrize(("owner", "name", "least"), [(module, "save_file", 2), (os, "fsync", 7)])
def test_a_full_disk_leaves_the_older_checkpoint_and_no_rubbish(
    owner: Any, name: str, least: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls = getattr(owner, name), itertools.count(1)
    save(tmp_path / "count", 10)
    monkeypatch.setattr(owner, name, _full_disk(original, 0, calls))
    # Without pruning, which comes when the newer one stands.
    save(tmp_path / "count", 20)
    made = next(calls) - 1
    assert made >= least
    left: dict[int, list[str]] = {}
    for call in range(1, made + 1):
        run = tmp_path / str(call)
        older = save(run, 10)
        before = _contents(run)
        monkeypatch.setattr(owner, name, _full_disk(original, call, itertools.count(1)))
        with pytest.raises(UserError) as refused:
            save(run, 20, checkpoints=1, weights=1)
        monkeypatch.setattr(owner, name, original)
        message = str(refused.value)
        assert message.startswith("cannot write the checkpoint (")
        assert "No space left on device" in message
        assert "older checkpoints are intact" in message
        # The pointer moves last; until then what was there is untouched, and the list of hashes at most longer.
        after = _contents(run)
        for file in before.keys() - {"checkpoints/latest", "weights/SHA256SUMS"}:
            assert after[file] == before[file], file
        assert after["weights/SHA256SUMS"].startswith(before["weights/SHA256SUMS"])
        newest = newest_checkpoint(run, pytest.fail)
        assert newest in (older, run / "checkpoints" / "step-00000020")
        assert checkpoint_problem(run / "checkpoints" / pointer(run).strip()) is None
        if newest == older:
            assert pointer(run) == "step-00000010\n"
        left[call] = _rubbish(run)
        # Space is freed: the same save works.
        assert checkpoint_problem(save(run, 20)) is None
        assert pointer(run) == "step-00000020\n"
        assert _rubbish(run) == []
    assert not any(left.values()), f"left behind, by failing call of {name}: {left}"


def test_a_folder_that_cannot_be_written_is_one_clear_error(run: Path) -> None:
    run.parent.mkdir(exist_ok=True)
    run.write_text("a file where the run folder should be")
    with pytest.raises(UserError, match=r"cannot write the checkpoint \(.*\): free space or fix the folder"):
        save(run, 1)


@pytest.mark.parametrize("folder", ["weights", "checkpoints"])
def test_a_folder_of_a_run_may_be_a_mount_of_its_own(run: Path, folder: str) -> None:
    (run / folder).mkdir(parents=True)
    with mounted("-t", "tmpfs", "-o", "size=1m", "tmpfs", run / folder):
        assert checkpoint_problem(save(run, 10)) is None
        assert names(run / "weights") == ["SHA256SUMS", "step-00000010.safetensors"]
        assert _rubbish(run) == []


def test_everything_is_on_disk_before_the_names_change(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commit order: files, folder, rename, and the pointer last."""
    save(run, 1)
    events: list[str] = []
    fsync, rename, replace = os.fsync, Path.rename, Path.replace

    def synced(handle: int) -> None:
        events.append("flush " + Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        fsync(handle)

    def renamed(path: Path, target: Path) -> Path:
        events.append(f"rename to {target.name}")
        return rename(path, target)

    def replaced(path: Path, target: Path) -> Path:
        events.append(f"replace {target.name}")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    monkeypatch.setattr(Path, "replace", replaced)
    save(run, 2)
    at = events.index("rename to step-00000002")
    for flushed in ("part-00000.safetensors", "state.json", "manifest.json", ".step-00000002."):
        assert any(event.startswith("flush") and flushed in event for event in events[:at]), flushed
    # The names inside the folder are flushed after its last file, the manifest, was made.
    manifest = next(i for i, event in enumerate(events) if "manifest.json" in event)
    assert any(event.startswith("flush .step-00000002.") for event in events[manifest:at])
    pointer_moves = next(i for i, event in enumerate(events) if event == "replace latest")
    assert "flush checkpoints" in events[at:pointer_moves]
    assert any(event.startswith("flush") and "latest" in event for event in events[at:pointer_moves])
    assert events[pointer_moves + 1 :] == ["flush checkpoints"]
