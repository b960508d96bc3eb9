"""Hostile names and pickles in place of the files of a run, a model and a data folder.

Each pickle would make a file, the canary, if anything ran it. Hashes that a file of the folder states are made to fit,
so that nothing is refused for its hash alone.
"""

import hashlib
import io
import json
import pickle
import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dist_transformer.base.verified import with_own_hash
from dist_transformer.run.checkpoint.reader import checkpoint_problem
from tests.conftest import ROOT, run_command
from tests.faults.campaign import Campaign, Case, Found, Lab, failing

_STEPS = 4
_FLAGS = ("--max-steps", _STEPS, "--save-every", 2)


class Canary:
    """Unpickled, it makes the file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return open, (str(self.path), "w")


def pickled(canary: Path, *, protocol: int = 4) -> bytes:
    return pickle.dumps(Canary(canary), protocol=protocol)


def zipped(canary: Path) -> bytes:
    """Make a file as torch.save writes it."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("archive/data.pkl", pickled(canary, protocol=2))
        archive.writestr("archive/version", "3\n")
    return content.getvalue()


class Victims:
    """A run, a model and a data folder to do harm to."""

    def __init__(self, whole: Path, model: Path, lab: Lab) -> None:
        self.run, self.model, self.data = (lab.folder / name for name in ("run", "model", "data"))
        self.canary = lab.folder / "canary"
        self.elsewhere = lab.folder / "elsewhere"
        for source, copy in ((whole, self.run), (model, self.model), (lab.data.path, self.data)):
            shutil.copytree(source, copy)
        self.checkpoint = self.run / "checkpoints" / f"step-{_STEPS:08d}"
        self.weights = self.run / "weights" / f"step-{_STEPS:08d}.safetensors"

    def restate(self, name: str, content: bytes, stated: str | None = None) -> None:
        """Give a file of the checkpoint other content, and the manifest its size and hash, under `stated` if given."""
        path = self.checkpoint / name
        path.unlink(missing_ok=True)
        path.write_bytes(content)
        self.edit_manifest(name, stated or name, {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()})

    def edit_manifest(self, name: str, stated: str, entry: dict[str, Any]) -> None:
        file = self.checkpoint / "manifest.json"
        manifest = json.loads(file.read_text())
        del manifest["files"][name]
        manifest["files"][stated] = entry
        file.write_bytes(with_own_hash(manifest))


PART, STATE = "part-00000.safetensors", "state.json"


def outside(victims: Victims, name: str) -> None:
    """The manifest states a part that lies elsewhere."""
    content = (victims.checkpoint / PART).read_bytes()
    place = (victims.checkpoint / name).resolve()
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(content)
    victims.edit_manifest(PART, name, {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()})
    (victims.checkpoint / PART).unlink()


def edit_index(victims: Victims, name: str) -> None:
    """A shard of the data has another name, and lies there."""
    file = victims.data / "index.json"
    index = json.loads(file.read_text())
    shard = index["train"]["shards"][0]
    place = victims.data / name
    if place.parent.is_dir() and len(place.name) < 200:
        shutil.copy(victims.data / shard["file"], place)
    shard["file"] = name
    file.write_text(json.dumps(index))


def linked(victims: Victims) -> None:
    victims.checkpoint.rename(victims.elsewhere)
    victims.checkpoint.symlink_to(victims.elsewhere)


Harm = Callable[[Victims], object]
CASES: list[tuple[str, str, Harm]] = [
    ("pickle for a part", "resume", lambda v: v.restate(PART, pickled(v.canary))),
    ("torch file for a part", "resume", lambda v: v.restate(PART, zipped(v.canary))),
    ("pickle for the state", "resume", lambda v: v.restate(STATE, pickled(v.canary))),
    ("pickle for the manifest", "resume", lambda v: (v.checkpoint / "manifest.json").write_bytes(pickled(v.canary))),
    ("part named with ..", "resume", lambda v: outside(v, f"../../../elsewhere/{PART}")),
    ("part named from the root", "resume", lambda v: outside(v, str(v.elsewhere / PART))),
    ("checkpoint that is a link", "resume", linked),
    ("pointer that leads out", "resume", lambda v: (v.run / "checkpoints" / "latest").write_text("../../elsewhere\n")),
    ("pickle for a weight file", "average", lambda v: v.weights.write_bytes(pickled(v.canary))),
    ("torch file for a weight file", "average", lambda v: v.weights.write_bytes(zipped(v.canary))),
    ("pickle for a model", "translate", lambda v: (v.model / "model.safetensors").write_bytes(pickled(v.canary))),
    ("torch file for a model", "init", lambda v: (v.model / "model.safetensors").write_bytes(zipped(v.canary))),
    ("pickle for a tokenizer", "translate", lambda v: (v.model / "tokenizer.json").write_bytes(pickled(v.canary))),
    ("shard named with ..", "data", lambda v: edit_index(v, "../elsewhere.arrow")),
    ("shard with a command for a name", "data", lambda v: edit_index(v, f"$(touch {v.canary.name}).arrow/../x")),
]


def run(case: Case, lab: Lab) -> Found:
    whole = lab.undisturbed("hostile", *_FLAGS, world=1)
    model = lab.scratch / "model"
    if not model.exists():
        average = [sys.executable, "tools/average_checkpoints.py", "--run-dir", whole]
        run_command(*average, "--last", 1, "--out", model)
    name, use, harm = CASES[case.number]
    victims = Victims(whole, model, lab)
    harm(victims)
    checks = resumed(victims, name, lab) if use == "resume" else used(victims, use, lab)
    checks["the canary ran"] = not victims.canary.exists() and not (ROOT / victims.canary.name).exists()
    return Found(problems=tuple(f"{name}: {problem}" for problem in failing(checks)))


def resumed(victims: Victims, name: str, lab: Lab) -> dict[str, object]:
    """A start resumes from an older checkpoint; if the pointer is wrong, from the newest."""
    job = lab.job(victims.run, *_FLAGS, "--max-steps", _STEPS + 1).start_ranks(1)
    statuses = job.statuses()
    expected = _STEPS if name.startswith("pointer") else _STEPS - 2
    return {
        f"status {statuses}: {job.output[-1500:]}": statuses == [0],
        "another checkpoint was chosen": f"resumed from {victims.run}/checkpoints/step-{expected:08d}\n" in job.output,
        "the checkpoint is not sound again": checkpoint_problem(victims.checkpoint) is None or expected == _STEPS,
    }


def used(victims: Victims, use: str, lab: Lab) -> dict[str, object]:
    """The command is refused with one clear error."""
    if use in ("init", "data"):
        new = ("--init-from", victims.model) if use == "init" else ("--data", victims.data)
        job = lab.job(lab.folder / "new", "--max-steps", 2, *new).start_ranks(1)
        status, output = job.statuses()[0], job.output
    else:
        tool = {
            "average": ["tools/average_checkpoints.py", "--checkpoints", victims.weights, "--out", lab.folder / "out"],
            "translate": ["tools/translate.py", "--model", victims.model],
        }[use]
        status, output = 1, run_command(sys.executable, *tool, status=1)
    return {f"status {status}": status == 1, f"not one clear error: {output[-1500:]}": is_clear(output)}


def is_clear(output: str) -> bool:
    return output.count("error: ") == 1 and "Traceback" not in output


CAMPAIGN = Campaign(
    name="hostile",
    must_hold="refused with one clear error, or an older checkpoint is taken; the canary never runs",
    full={"names and pickles": len(CASES)},
    run=run,
)
