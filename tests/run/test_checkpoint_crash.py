"""Checkpoints whose writing is cut short, by a kill or a full disk."""

import errno
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dist_transformer.base.errors import UserError
from dist_transformer.run.checkpoint import writer as module
from dist_transformer.run.checkpoint.reader import checkpoint_problem, newest_checkpoint
from tests.faults.disks import mounted
from tests.run.saving import names, pointer, save


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "a run's folder"


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
