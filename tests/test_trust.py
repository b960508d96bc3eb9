"""A user may rely on this: no file of ours runs code, none runs code on us, and no secret is written down."""

import contextlib
import hashlib
import io
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
from tests import lived as words_of
from tests.commands import Commands

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
    return words_of.live(commands, toy_data.path, tmp_path_factory.mktemp("lived"), **SECRETS)


def code_called_by(content: bytes) -> list[str]:
    """List the code that unpickling would call first."""
    names: list[str] = []

    class Asked(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            # The opcode is the letter c and the module the rest of the line: a list of hashes may begin with one, too.
            if all(part.isidentifier() for part in module.split(".")):
                names.append(f"{module}.{name}")
            raise pickle.UnpicklingError

    with contextlib.suppress(Exception):
        Asked(io.BytesIO(content)).load()
    return names


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


def hash_and_size(content: bytes) -> tuple[str, str]:
    return hashlib.sha256(content).hexdigest(), f'"bytes": {len(content)}'


def seal_around(folder: Path, file: Path, before: bytes) -> None:
    """Record the hash and size of a file's new content in place of the old ones, and then those of the records."""
    old, new = hash_and_size(before), hash_and_size(file.read_bytes())
    for record in (path for path in folder.rglob("*") if path.suffix == ".json" or path.name == "SHA256SUMS"):
        text = record.read_text(errors="surrogateescape")
        if record != file and old[0] in text:
            record.write_text(text.replace(old[0], new[0]).replace(old[1], new[1]))
            seal_around(folder, record, text.encode(errors="surrogateescape"))


REFUSING = {
    "data/index.json": "inspect fresh verify_data doctor plan sweep",
    "data/tokenizer.json": "inspect fresh resumed prepare",
    "data/lengths.npy": "inspect fresh resumed verify_data doctor plan",
    "data/valid/lengths.npy": "inspect fresh",
    "data/train-00000.arrow": "inspect fresh",
    "data/valid/valid-00000.arrow": "fresh",
    "data/valid/source.txt": "fresh sweep",
    f"{words_of.NEWEST}/state.json": "verify average_checkpoint resumed",
    f"{words_of.NEWEST}/part-00000.safetensors": "verify average_checkpoint resumed",
    f"{words_of.NEWEST}/manifest.json": "verify average_checkpoint",
    "run/checkpoints/latest": "verify",
    "run/weights/step-00000002.safetensors": "verify last",
    "run/weights/ema-00000002.safetensors": "verify",
    "run/weights/SHA256SUMS": "verify last",
    "run/config.json": "verify report best sweep against",
    "run/tokenizer.json": "verify last",
    "run/metrics.jsonl": "verify best against",
    "run/ledger.jsonl": "verify",
    "run/environment.json": "verify against",
    "run/samples/step-00000002.json": "verify report",
    "run/bleu.json": "verify",
    "run/model/config.json": "verify translate evaluate begin_with average_model",
    "run/model/model.safetensors": "verify translate evaluate begin_with average_model",
    "run/model/tokenizer.json": "verify translate evaluate begin_with average_model",
}
"""Commands that read a file, and refuse a pickle in its place."""

FORGIVING = {"run/bleu.json": "report", "run/metrics.jsonl": "report", "run/config.json": "resumed"}
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
    for name in (*REFUSING[place].split(), *FORGIVING.get(place, "").split()):
        words = getattr(words_of, name.upper())
        ended = commands.run(words, folder, stdin=folder / "in.en")
        assert not canary.exists(), words
        assert "Traceback" not in ended.output, f"{words}\n{ended.output}"
        assert ended.status == (1 if name in REFUSING[place].split() else 0), f"{words}\n{ended.output}"
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
