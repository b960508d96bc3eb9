"""A user may rely on this: no file of ours runs code, none runs code on us, and no secret is written down."""

import contextlib
import hashlib
import io
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dist_transformer.data.folder.reader import DataFolder
from tests.commands import Commands
from tests.lived import (
    AGAINST,
    AVERAGE_CHECKPOINT,
    AVERAGE_MODEL,
    BEGIN_WITH,
    BEST,
    DOCTOR,
    EVALUATE,
    FRESH,
    INSPECT,
    LAST,
    NEWEST,
    PLAN,
    PREPARE,
    REPORT,
    RESUMED,
    SMALL,
    SWEEP,
    TRANSLATE,
    VERIFY,
    VERIFY_DATA,
    live,
)
from tests.run.sound_run import seal

# One process after the other uses what one fixture made.
pytestmark = pytest.mark.slice(name="pickles")

SECRETS = {
    "HF_TOKEN": "canary-token",
    "WANDB_API_KEY": "canary-key",
    "AWS_SECRET_ACCESS_KEY": "canary-secret",
    "DB_PASSWORD": "canary-password",
}


@pytest.fixture(scope="module")
def lived(commands: Commands, toy_data: DataFolder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `data/`, a `run/` with its model, scores and report, and `output.txt`: what the commands printed.

    All were started among secrets.
    """
    return live(commands, toy_data.path, tmp_path_factory.mktemp("lived"), **SECRETS)


class Asked(pickle.Unpickler):
    """An unpickler that returns no class and records each request."""

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content))
        self.names: list[str] = []

    def find_class(self, module: str, name: str) -> Any:
        # The opcode is the letter c and the module the rest of the line: a list of hashes may begin with one, too.
        if all(part.isidentifier() for part in module.split(".")):
            self.names.append(f"{module}.{name}")
        raise pickle.UnpicklingError


def code_called_by(content: bytes) -> list[str]:
    """List the code that unpickling would call first."""
    asked = Asked(content)
    with contextlib.suppress(Exception):
        asked.load()
    return asked.names


def test_no_file_of_ours_runs_code(lived: Path) -> None:
    """Nothing that calls code when it is unpickled, no zip, no program."""
    files = [file for file in lived.rglob("*") if file.is_file()]
    suffixes = {file.suffix or file.name for file in files}
    allowed = {".json", ".jsonl", ".npy", ".arrow", ".txt", ".en", ".de", ".safetensors", ".md", ".html", ".0"}
    assert suffixes == allowed | {"SHA256SUMS", "latest", "lock"}
    for file in files:
        content = file.read_bytes()
        assert code_called_by(content) == [], file
        # The header of a safetensors file begins with its length, which may be any byte.
        assert file.suffix == ".safetensors" or not content.startswith((b"PK\x03\x04", b"\x7fELF", b"#!", b"\x80"))
        assert file.stat().st_mode & 0o111 == 0, file
    for file in lived.rglob("*.npy"):
        assert np.load(file, allow_pickle=False).dtype == np.uint16


def test_no_secret_is_written_or_printed(lived: Path) -> None:
    for file in (file for file in lived.rglob("*") if file.is_file()):
        content = file.read_bytes()
        for name, secret in SECRETS.items():
            assert secret.encode() not in content, f"{name} in {file}"
            assert name.encode() not in content, f"{name} in {file}"


@pytest.mark.parametrize("tool", ["train", "doctor"])
def test_a_password_in_a_url_is_not_taken(tool: str, commands: Commands, lived: Path) -> None:
    """Launchers print their command, and a run folder its settings."""
    url = ("--data", "ftp://me:hunter2@localhost/data", "--run-dir", "elsewhere")
    ended = commands.run((tool, *SMALL, *url) if tool == "train" else (tool, *url), lived)
    assert ended.status == 1
    said = " ".join(ended.output.split())
    assert "ftp://***@localhost/data holds a password, a query or a fragment" in said
    assert "hunter2" not in ended.output
    assert not (lived / "elsewhere" / "config.json").exists()


class Bomb:
    """Unpickling it leaves a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch '{self.file}'",)


def plain(bomb: Bomb) -> bytes:
    return pickle.dumps(bomb)


def zipped(bomb: Bomb) -> bytes:
    content = io.BytesIO()
    torch.save({"embedding": bomb}, content)
    return content.getvalue()


def array(bomb: Bomb) -> bytes:
    content = io.BytesIO()
    np.save(content, np.array([bomb], dtype=object), allow_pickle=True)
    return content.getvalue()


def sealed_index(folder: Path, file: Path, before: bytes) -> None:
    """The index states what is there now, and the run that it is its data."""
    content, index_file = file.read_bytes(), folder / "data/index.json"
    old, new = (hashlib.sha256(bytes_).hexdigest() for bytes_ in (before, content))
    index = json.loads(index_file.read_text().replace(old, new))
    for shard in (*index["train"]["shards"], *index["valid"]["shards"]):
        shard["bytes"] = len(content) if shard["sha256"] == new else shard["bytes"]
    index_file.write_text(json.dumps(index))
    settings = json.loads((folder / "run/config.json").read_text())
    settings["data_sha256"] = [hashlib.sha256(index_file.read_bytes()).hexdigest()]
    (folder / "run/config.json").write_text(json.dumps(settings))


def seal_around(folder: Path, file: Path, before: bytes) -> None:
    """Replace every recorded hash of a file by that of its new content."""
    if file.is_relative_to(folder / "data") and file.name != "index.json":
        sealed_index(folder, file, before)
    if file.parent.name.startswith("step-") and file.name != "manifest.json":
        seal(file.parent)
    if file.parent.name == "weights" and file.name != "SHA256SUMS":
        sums = file.parent / "SHA256SUMS"
        old, new = (hashlib.sha256(content).hexdigest() for content in (before, file.read_bytes()))
        sums.write_text(sums.read_text().replace(old, new))
    if file.parent.name == "model" and file.name == "tokenizer.json":
        settings = json.loads((file.parent / "config.json").read_text())
        settings["tokenizer_sha256"] = hashlib.sha256(file.read_bytes()).hexdigest()
        (file.parent / "config.json").write_text(json.dumps(settings))


REFUSING: dict[str, list[tuple[str, ...]]] = {
    "data/index.json": [INSPECT, FRESH, VERIFY_DATA, DOCTOR, PLAN, SWEEP],
    "data/tokenizer.json": [INSPECT, FRESH, RESUMED, PREPARE],
    "data/lengths.npy": [INSPECT, FRESH, RESUMED, VERIFY_DATA, DOCTOR, PLAN],
    "data/valid/lengths.npy": [INSPECT, FRESH],
    "data/train-00000.arrow": [INSPECT, FRESH],
    "data/valid/valid-00000.arrow": [FRESH],
    "data/valid/source.txt": [FRESH, SWEEP],
    f"{NEWEST}/state.json": [VERIFY, AVERAGE_CHECKPOINT, RESUMED],
    f"{NEWEST}/part-00000.safetensors": [VERIFY, AVERAGE_CHECKPOINT, RESUMED],
    f"{NEWEST}/manifest.json": [VERIFY, AVERAGE_CHECKPOINT],
    "run/checkpoints/latest": [VERIFY],
    "run/weights/step-00000002.safetensors": [VERIFY, LAST],
    "run/weights/ema-00000002.safetensors": [VERIFY],
    "run/weights/SHA256SUMS": [VERIFY, LAST],
    "run/config.json": [VERIFY, REPORT, BEST, SWEEP, AGAINST],
    "run/tokenizer.json": [VERIFY, LAST],
    "run/metrics.jsonl": [VERIFY, BEST, AGAINST],
    "run/ledger.jsonl": [VERIFY],
    "run/environment.json": [VERIFY, AGAINST],
    "run/samples/step-00000002.json": [VERIFY, REPORT],
    "run/bleu.json": [VERIFY],
    "run/model/config.json": [VERIFY, TRANSLATE, EVALUATE, BEGIN_WITH, AVERAGE_MODEL],
    "run/model/model.safetensors": [VERIFY, TRANSLATE, EVALUATE, BEGIN_WITH, AVERAGE_MODEL],
    "run/model/tokenizer.json": [VERIFY, TRANSLATE, EVALUATE, BEGIN_WITH, AVERAGE_MODEL],
}
"""Commands that read a file, and refuse a pickle in its place."""

FORGIVING: dict[str, list[tuple[str, ...]]] = {
    "run/bleu.json": [REPORT],
    "run/metrics.jsonl": [REPORT],
    "run/config.json": [RESUMED],
}
"""A report shows what can be read of a run, and the newest checkpoint repeats the settings."""


def payload(place: str) -> Callable[[Bomb], bytes]:
    """The kind of pickle that a careless reader of such a file would load."""
    return {".npy": array, ".safetensors": zipped}.get(Path(place).suffix, plain)


@pytest.mark.parametrize("place", REFUSING)
def test_a_pickle_is_refused_and_never_loaded(place: str, commands: Commands, lived: Path, tmp_path: Path) -> None:
    folder, canary = tmp_path / "copy", tmp_path / "it ran"
    shutil.copytree(lived, folder)
    before = (folder / place).read_bytes()
    (folder / place).write_bytes(payload(place)(Bomb(canary)))
    seal_around(folder, folder / place, before)
    for words in (*REFUSING[place], *FORGIVING.get(place, [])):
        ended = commands.run(words, folder, stdin=folder / "in.en")
        assert not canary.exists(), words
        assert "Traceback" not in ended.output, f"{words}\n{ended.output}"
        assert ended.status == (1 if words in REFUSING[place] else 0), f"{words}\n{ended.output}"
        if ended.status:
            assert ended.output.splitlines()[-1].startswith("error: "), ended.output
    assert not (folder / "fresh/checkpoints").exists()
    assert not (folder / "more").exists()


def test_the_bombs_would_explode(tmp_path: Path) -> None:
    for make in (plain, zipped, array):
        canary, file = tmp_path / make.__name__, tmp_path / "bomb"
        file.write_bytes(make(Bomb(canary)))
        if make is array:
            np.load(file, allow_pickle=True)
        elif make is zipped:
            torch.load(file, weights_only=False)
        else:
            pickle.loads(file.read_bytes())
        assert canary.exists()
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert code_called_by(pickle.dumps(Bomb(tmp_path), protocol)) == ["posix.system"]


def test_a_hash_that_begins_with_c_is_no_bomb() -> None:
    assert code_called_by(b"c0ffee  a.safetensors\nf00d  b.safetensors\n") == []
