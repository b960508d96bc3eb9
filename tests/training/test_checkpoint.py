"""Checkpoints in one process, of parameters made by hand: no engine."""

import dataclasses
import errno
import hashlib
import json
import os
import pickle
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from dist_transformer.errors import UserError
from dist_transformer.training import checkpoint_writer as module
from dist_transformer.training.checkpoint import (
    FORMAT_VERSION,
    CheckpointReader,
    checkpoint_problem,
    manifest_content,
    newest_checkpoint,
    weight_hashes,
    weights_problem,
)
from dist_transformer.training.checkpoint_writer import CheckpointWriter, Retention
from dist_transformer.training.engine import EMA, MOMENTS, ParameterState
from tests.training.saving import save_checkpoint

SHAPES = {"embedding": (7, 4), "encoder.norm.bias": (4,), "scale": ()}


def states(step: int) -> Iterator[ParameterState]:
    generator = torch.Generator().manual_seed(step)
    for name, shape in SHAPES.items():
        weight, *moments = (torch.randn(shape, generator=generator) for _ in range(3))
        yield ParameterState(name=name, weight=weight, moments=dict(zip(MOMENTS, moments, strict=True)))


def save(
    run: Path, step: int, *, checkpoints: int = 9, weights: int = 9, best: tuple[int, ...] = (), **state: Any
) -> Path:
    return save_checkpoint(
        run,
        states(step),
        {"step": step, "updates": step, **state},
        retention=Retention(checkpoints=checkpoints, weights=weights, best_steps=frozenset(best)),
        weights_metadata={"step": str(step)},
    )


def save_averaged(run: Path, step: int, *, checkpoints: int) -> Path:
    averaged = [
        dataclasses.replace(state, moments={**state.moments, EMA: state.weight / 2 + step}) for state in states(step)
    ]
    retention = Retention(checkpoints=checkpoints, weights=9)
    return save_checkpoint(run, averaged, {"step": step}, retention=retention, weights_metadata={"step": str(step)})


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def weight_steps(run: Path) -> list[int]:
    return sorted(int(file.stem[5:]) for file in (run / "weights").glob("*.safetensors"))


def pointer(run: Path) -> str:
    return (run / "checkpoints" / "latest").read_text()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "a run's folder"


def test_what_is_written(run: Path) -> None:
    path = save(run, 20, position={"epoch": 1})
    assert path == run / "checkpoints" / "step-00000020"
    assert names(run / "checkpoints") == ["latest", "step-00000020"]
    assert names(path) == ["manifest.json", "part-00000.safetensors", "state.json"]
    assert names(run / "weights") == ["SHA256SUMS", "step-00000020.safetensors"]
    assert pointer(run) == "step-00000020\n"
    state = json.loads((path / "state.json").read_text())
    assert (state["step"], state["position"], state["format_version"]) == (20, {"epoch": 1}, 2)
    assert set(state["versions"]) == {"python", "dist_transformer", "torch", "deepspeed"}
    stored = safetensors.torch.load_file(path / "part-00000.safetensors")
    assert set(stored) == {f"{kind}/{name}" for kind in ("weight", *MOMENTS) for name in SHAPES}


def test_the_manifest_states_size_and_hash_of_every_file(run: Path) -> None:
    path = save(run, 1)
    stated = json.loads((path / "manifest.json").read_text())["files"]
    assert sorted(stated) == ["part-00000.safetensors", "state.json"]
    for name, entry in stated.items():
        content = (path / name).read_bytes()
        assert entry == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    assert checkpoint_problem(path) is None


def test_the_manifest_says_what_it_is_a_checkpoint_of(run: Path) -> None:
    writer = CheckpointWriter(run, config={"seed": 7})
    state = {"step": 4, "position": {"epoch": 2}, "tokenizer_sha256": "ab"}
    writer.start(states(4), state, retention=Retention(checkpoints=1, weights=1), weights_metadata={})
    saved = writer.wait()
    assert saved is not None
    manifest = json.loads((saved.path / "manifest.json").read_text())
    assert {key: manifest[key] for key in ("step", "position", "tokenizer_sha256", "config", "format_version")} == {
        **state, "config": {"seed": 7}, "format_version": 2,
    }  # fmt: skip
    assert set(manifest["versions"]) == {"python", "dist_transformer", "torch", "deepspeed"}


def test_weight_files_have_their_hash_as_sha256sum_checks_it(run: Path) -> None:
    for step in (1, 2, 3):
        save(run, step, weights=2)
    command = ["sha256sum", "--check", "SHA256SUMS"]
    done = subprocess.run(command, check=False, cwd=run / "weights", capture_output=True, text=True)
    assert done.stdout.splitlines() == [f"step-0000000{step}.safetensors: OK" for step in (2, 3)], done.stderr
    file = run / "weights" / "step-00000003.safetensors"
    assert weights_problem(file) is None
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert weights_problem(file) == f"{file} is damaged: its SHA-256 is not what SHA256SUMS states"
    # A file that was copied away has no hash beside it.
    assert weights_problem(file.rename(run / "copied.safetensors")) is None


def test_files_are_for_whoever_may_read_the_run_folder(run: Path) -> None:
    path = save(run, 1)
    mode = (path / "state.json").stat().st_mode
    for file in (path / "part-00000.safetensors", run / "weights" / "step-00000001.safetensors"):
        assert file.stat().st_mode == mode


def test_a_snapshot_does_not_see_what_training_does_next(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writing waits until every tensor that was given has another value."""
    given, trained = list(states(8)), threading.Event()
    monkeypatch.setattr(module, "save_file", lambda *a, **k: (trained.wait(30), safetensors.torch.save_file(*a, **k)))
    state = {"step": 8, "position": {"epoch": 1}}
    writer = CheckpointWriter(run)
    writer.start(given, state, retention=Retention(checkpoints=1, weights=1), weights_metadata={})
    assert writer.poll() is None
    for parameter in given:
        parameter.weight.fill_(9.0)
        for moment in parameter.moments.values():
            moment.fill_(9.0)
    state["step"], state["position"]["epoch"] = 9, 9  # type: ignore[index]
    trained.set()
    saved = writer.wait()
    assert saved is not None
    assert 0 <= saved.stall <= saved.seconds
    reader = CheckpointReader(saved.path)
    stored = safetensors.torch.load_file(run / "weights" / "step-00000008.safetensors")
    for wanted in states(8):
        read = reader.parameter(wanted.name)
        assert torch.equal(read.weight, wanted.weight)
        assert torch.equal(stored[wanted.name], wanted.weight)
        assert all(torch.equal(read.moments[key], wanted.moments[key]) for key in MOMENTS)
    assert (reader.state["step"], reader.state["position"]) == (8, {"epoch": 1})
    assert writer.poll() is None
    assert writer.wait() is None


def test_weights_and_moments_come_back_bit_for_bit(run: Path) -> None:
    reader = CheckpointReader(save(run, 3, note="ä"))
    assert sorted(reader.parameter_names()) == sorted(SHAPES)
    assert reader.state["note"] == "ä"
    for wanted in states(3):
        read = reader.parameter(wanted.name)
        assert read.name == wanted.name
        assert read.weight.dtype == torch.float32
        assert torch.equal(read.weight, wanted.weight)
        assert torch.equal(reader.weight(wanted.name), wanted.weight)
        assert list(read.moments) == list(MOMENTS)
        for key in MOMENTS:
            assert torch.equal(read.moments[key], wanted.moments[key])


def test_the_weight_file_holds_the_weights_alone(run: Path) -> None:
    save(run, 3)
    file = run / "weights" / "step-00000003.safetensors"
    stored = safetensors.torch.load_file(file)
    assert set(stored) == set(SHAPES)
    for wanted in states(3):
        assert torch.equal(stored[wanted.name], wanted.weight)
    with safetensors.safe_open(file, framework="pt") as opened:
        assert opened.metadata() == {"step": "3"}


def test_averaged_weights_have_a_file_of_their_own(run: Path) -> None:
    for step in (3, 6, 9):
        path = save_averaged(run, step, checkpoints=2)
    files = [f"{kind}-{step:08}.safetensors" for kind, steps in ((EMA, (6, 9)), ("step", (3, 6, 9))) for step in steps]
    assert names(run / "weights") == ["SHA256SUMS", *files]
    assert sorted(weight_hashes(run / "weights")) == files
    raw, averaged = (safetensors.torch.load_file(run / "weights" / f"{kind}-00000009.safetensors")
                     for kind in ("step", EMA))  # fmt: skip
    reader = CheckpointReader(path)
    for wanted in states(9):
        assert torch.equal(raw[wanted.name], wanted.weight)
        assert torch.equal(averaged[wanted.name], wanted.weight / 2 + 9)
        read = reader.parameter(wanted.name)
        assert list(read.moments) == [*MOMENTS, EMA]
        assert torch.equal(read.moments[EMA], averaged[wanted.name])
    save(run, 12, checkpoints=1)
    assert [name for name in names(run / "weights") if name.startswith(EMA)] == ["ema-00000009.safetensors"]


def test_the_newest_are_kept_each_by_its_own_number(run: Path) -> None:
    for step in (5, 10, 15, 20, 100):
        save(run, step, checkpoints=2, weights=3)
    assert names(run / "checkpoints") == ["latest", "step-00000020", "step-00000100"]
    assert names(run / "weights") == ["SHA256SUMS", *(f"step-{step:08}.safetensors" for step in (15, 20, 100))]
    assert pointer(run) == "step-00000100\n"


def test_what_is_removed_loses_its_name_first(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed in the middle of it, no half-removed folder looks like a checkpoint."""
    removed: list[str] = []
    original = shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", lambda path: (removed.append(path.name), original(path)))
    save(run, 5)
    damage(save(run, 10), "flip")
    save(run, 10, checkpoints=1)
    assert removed == [".step-00000010.removed.tmp", ".step-00000005.removed.tmp"]
    assert names(run / "checkpoints") == ["latest", "step-00000010"]


def test_a_checkpoint_of_the_same_step_is_replaced(run: Path) -> None:
    save(run, 5)
    damage(save(run, 10), "flip")
    path = save(run, 10, again=True)
    assert checkpoint_problem(path) is None
    assert CheckpointReader(path).state["again"] is True
    assert names(run / "checkpoints") == ["latest", "step-00000005", "step-00000010"]


def test_a_damaged_newer_checkpoint_does_not_push_out_the_one_just_written(run: Path) -> None:
    """The run fell back from step 30 to 10 and saves more often now."""
    save(run, 10)
    damage(save(run, 30), "flip")
    path = save(run, 20, checkpoints=1)
    assert checkpoint_problem(path) is None
    assert (run / "checkpoints" / pointer(run).strip()).is_dir()
    assert newest_checkpoint(run, lambda _: None) == path


def test_nothing_in_a_run_folder_is_a_pickle(run: Path) -> None:
    save(run, 1)
    files = [path for path in run.rglob("*") if path.is_file()]
    assert len(files) == 6
    for file in files:
        # A pickle of protocol 2 or later, and the zip that torch.save writes.
        assert not file.read_bytes().startswith((b"\x80", b"PK")), file


def test_a_run_folder_without_checkpoints_starts_anew(run: Path) -> None:
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
    (path / "manifest.json").write_bytes(manifest_content(manifest))


def _entry(file: Path) -> dict[str, Any]:
    return {"bytes": file.stat().st_size, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}


def _flip(path: Path, *, at: float = 0.5) -> None:
    part = path / "part-00000.safetensors"
    content = bytearray(part.read_bytes())
    content[int((len(content) - 1) * at)] ^= 1
    part.write_bytes(content)


def _truncate(path: Path, size: int | None = None) -> None:
    part = path / "part-00000.safetensors"
    os.truncate(part, part.stat().st_size - 1 if size is None else size)


def _edit_state(path: Path) -> None:
    """The same size: the step is another."""
    text = (path / "state.json").read_text()
    edited = text.replace('"step": 20', '"step": 21')
    assert edited != text
    (path / "state.json").write_text(edited)


def _outside_name(path: Path) -> None:
    outside = path.parent / "step-00000010" / "state.json"
    _rewrite_manifest(path, lambda m: m["files"].update({"../step-00000010/state.json": _entry(outside)}))


def _symlink(path: Path, name: str = "part-00000.safetensors") -> None:
    """The content is right, but it is not the checkpoint's own."""
    elsewhere = path.parents[1] / f"elsewhere-{name}"
    (path / name).rename(elsewhere)
    (path / name).symlink_to(elsewhere)


def _linked_folder(path: Path) -> None:
    path.rename(path.parents[1] / "elsewhere")
    path.symlink_to(path.parents[1] / "elsewhere")


def _extra_part(path: Path) -> None:
    """A reader takes every part that it finds, so each must be in the manifest."""
    part = path / "part-00000.safetensors"
    (path / "part-00001.safetensors").write_bytes(part.read_bytes())


def _forge(path: Path, name: str) -> None:
    """A pickle in place of a file, and a manifest that states its hash."""
    (path / name).write_bytes(pickle.dumps({"weight": 1.0}))
    _rewrite_manifest(path, lambda m: m["files"].update({name: _entry(path / name)}))


def _folder_for_file(path: Path) -> None:
    (path / "state.json").unlink()
    (path / "state.json").mkdir()


# Each kind of damage, and the file that the warning must name.
DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "flip": (_flip, "part-00000.safetensors"),
    "flip the first byte": (lambda path: _flip(path, at=0), "part-00000.safetensors"),
    "flip the last byte": (lambda path: _flip(path, at=1), "part-00000.safetensors"),
    "truncated": (_truncate, "part-00000.safetensors"),
    "empty part": (lambda path: _truncate(path, 0), "part-00000.safetensors"),
    "no part": (lambda path: (path / "part-00000.safetensors").unlink(), "part-00000.safetensors"),
    "one byte more": (lambda path: (path / "state.json").open("a").write("\n"), "state.json"),
    "edited state": (_edit_state, "state.json"),
    "empty state": (lambda path: (path / "state.json").write_text(""), "state.json"),
    "no state": (lambda path: (path / "state.json").unlink(), "state.json"),
    "folder for file": (_folder_for_file, "state.json"),
    "pickle for a part": (lambda path: _forge(path, "part-00000.safetensors"), "part-00000.safetensors"),
    "pickle for the state": (lambda path: _forge(path, "state.json"), "state.json"),
    "no manifest": (lambda path: (path / "manifest.json").unlink(), "manifest.json"),
    "empty manifest": (lambda path: (path / "manifest.json").write_text(""), "manifest.json"),
    "manifest of another kind": (lambda path: (path / "manifest.json").write_text("[]"), "manifest.json"),
    "manifest without files": (lambda path: (path / "manifest.json").write_text("{}"), ""),
    "files are a list": (lambda path: _rewrite_manifest(path, lambda m: m.update(files=["state.json"])), ""),
    "no hash": (lambda path: _rewrite_manifest(path, lambda m: m["files"]["state.json"].pop("sha256")), ""),
    "nothing stated": (lambda path: _rewrite_manifest(path, lambda m: m["files"].clear()), ""),
    "part not stated": (
        lambda path: _rewrite_manifest(path, lambda m: m["files"].pop("part-00000.safetensors")),
        "part-00000.safetensors",
    ),
    "a part too many": (_extra_part, "part-00001.safetensors"),
    "name outside": (_outside_name, "../step-00000010/state.json"),
    "link": (_symlink, "part-00000.safetensors"),
    "linked state": (lambda path: _symlink(path, "state.json"), "state.json"),
    "linked manifest": (lambda path: _symlink(path, "manifest.json"), "manifest.json"),
    "linked folder": (_linked_folder, "step-00000020"),
    "nested too deep": (lambda path: (path / "manifest.json").write_text("[" * 10**5), ""),
    "newer format": (
        lambda path: _rewrite_manifest(path, lambda m: m.update(format_version=FORMAT_VERSION + 1)),
        "newer version",
    ),
    "format is a text": (lambda path: _rewrite_manifest(path, lambda m: m.update(format_version="1")), ""),
}


def damage(path: Path, kind: str) -> str:
    action, named = DAMAGES[kind]
    action(path)
    return named


@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_is_found_and_the_older_checkpoint_is_taken(kind: str, run: Path) -> None:
    older, path = save(run, 10), save(run, 20)
    named = damage(path, kind)
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
    for name in ("manifest.json", "part-00000.safetensors", "state.json"):
        content = (path / name).read_bytes()
        for at in range(0, len(content), 7):
            (path / name).write_bytes(content[:at] + bytes([content[at] ^ 0x10]) + content[at + 1 :])
            assert checkpoint_problem(path) is not None
        (path / name).write_bytes(content)
    assert checkpoint_problem(path) is None


def test_the_first_format_whose_manifest_states_no_hash_is_read(run: Path) -> None:
    path = save(run, 20)
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["sha256"]
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert "no usable manifest ('sha256')" in str(checkpoint_problem(path))
    (path / "manifest.json").write_text(json.dumps({**manifest, "format_version": 1}))
    assert checkpoint_problem(path) is None


def test_when_all_are_damaged_training_does_not_start_anew(run: Path) -> None:
    for step, kind in ((10, "flip"), (20, "truncated"), (30, "no manifest")):
        damage(save(run, step), kind)
    warned: list[str] = []
    message = rf"no checkpoint in {re.escape(str(run))}/checkpoints is usable: restore one from a backup, or choose"
    with pytest.raises(UserError, match=message):
        newest_checkpoint(run, warned.append)
    assert ["step-000000" + warning.split("step-000000")[1][:2] for warning in warned] == [
        "step-00000030", "step-00000020", "step-00000010",
    ]  # fmt: skip


def test_a_link_in_place_of_all_checkpoints_is_refused(run: Path) -> None:
    save(run, 10)
    (run / "checkpoints").rename(run / "elsewhere")
    (run / "checkpoints").symlink_to("elsewhere")
    with pytest.raises(UserError, match=r"checkpoints is a link: put the real folder there"):
        newest_checkpoint(run, pytest.fail)


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


class _FullDisk:
    """Counts the calls of a function; one of them finds the disk full."""

    def __init__(self, function: Callable[..., Any], failing_call: int = 0) -> None:
        self.function, self.failing_call = function, failing_call
        self.calls = 0

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self.calls += 1
        if self.calls == self.failing_call:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.function(*arguments, **options)


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
    original = getattr(owner, name)
    counter = _FullDisk(original)
    monkeypatch.setattr(owner, name, counter)
    save(tmp_path / "count", 10)
    assert counter.calls >= least
    left: dict[int, list[str]] = {}
    for call in range(1, counter.calls + 1):
        run = tmp_path / str(call)
        older = save(run, 10)
        before = _contents(run)
        monkeypatch.setattr(owner, name, _FullDisk(original, call))
        with pytest.raises(UserError) as refused:
            save(run, 20, checkpoints=1, weights=1)
        monkeypatch.setattr(owner, name, original)
        message = str(refused.value)
        assert message.startswith("cannot write the checkpoint: ")
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
    with pytest.raises(UserError, match=r"cannot write the checkpoint: .*free space or fix the folder"):
        save(run, 1)


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


def test_weights_of_the_best_steps_stay(run: Path) -> None:
    for step in range(1, 6):
        save(run, step, weights=2, best=(2,))
    assert weight_steps(run) == [2, 4, 5]
    save(run, 6, weights=2, best=(4,))
    assert weight_steps(run) == [4, 5, 6]
