"""Files of every format that are far larger than any that a run writes: real readers refuse them, or read a part.

Hashes that other files state are made to fit, so that nothing is refused for its hash alone.
"""

import gzip
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from string import ascii_lowercase

import numpy as np
import torch

from dist_transformer.averaging.choice import best_weights
from dist_transformer.averaging.sources import open_weights
from dist_transformer.base.errors import UserError
from dist_transformer.base.files import sha256_of
from dist_transformer.config.plain import read_json
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.data.text.files import LineFiles, read_aligned
from dist_transformer.model_folder import load_model
from dist_transformer.reporting.html.run import load_run
from dist_transformer.run.checkpoint.content import content_problem
from dist_transformer.run.checkpoint.reader import CheckpointReader, newest_checkpoint
from dist_transformer.run.environment import read_environments
from dist_transformer.run.folder import lost_records, settings_of
from dist_transformer.run.ledger import chain_link, truncate_jsonl
from dist_transformer.run.verify import verify_run
from tests.fuzz.formats import FORMATS, Lab, exhaust
from tests.fuzz.harness import MEMORY, attempt
from tests.run.sound_run import NEWEST, PART, WEIGHTS, seal
from tests.small_model import restate

# A little more than a reader may take.
_HOLE = MEMORY + 2**24
_LISTS = 2**27
# Twice the records that are kept.
_RECORDS = 2**26

Grow = Callable[[Path], object]
Use = Callable[[Lab], object]


def hole(path: Path) -> None:
    """The file continues with zeros, which take no room on the disk."""
    os.truncate(path, _HOLE)


def lists(path: Path) -> None:
    """JSON whose values take 26 times the memory of the text."""
    path.write_bytes(b'{"a": [' + b"[]," * (_LISTS // 3) + b"[]]}")


def header(path: Path) -> None:
    """A header of a safetensors file, of nearly the library's limit, with many small values."""
    content = b'{"a": [' + b"[]," * 31_000_000 + b"[]]}"
    path.write_bytes(len(content).to_bytes(8, "little") + content)


def records(path: Path) -> None:
    """Records of many fields, whose values take 14 times the memory of the text."""
    fields = ",".join(f'"{one}{two}":1' for one in ascii_lowercase[:4] for two in ascii_lowercase)
    lines = "".join(f'{{"kind":"train","step":%d{digit},{fields}}}\n' for digit in range(10))
    with path.open("w") as file:
        for step in range(_RECORDS // len(lines)):
            file.write(lines % ((step,) * 10))


def left_out(path: Path) -> None:
    """Continue a ledger with shards that were left out, in a chain that holds."""
    lines = path.read_text().splitlines()
    chain, shard = json.loads(lines[-1])["chain"], {"corpus": 0, "shard": 0, "epoch": 0, "window": 0, "packs": 0}
    with path.open("a") as file:
        for step in range(len(lines) + 1, len(lines) + 120):
            entry = {"step": step, "hash": "0", "target_tokens": 1, "left_out": [shard] * 10_000}
            chain = chain_link(chain, entry)
            file.write(json.dumps({**entry, "chain": chain}) + "\n")


def bomb(path: Path) -> None:
    """A small file that unpacks to a line of one GiB."""
    block = gzip.compress(bytes(2**24), 9)
    path.write_bytes(block * (_HOLE // 2**24))


@dataclass(frozen=True, kw_only=True, slots=True)
class Grown:
    """A file of the lab that grows, what then states its hash, and its readers."""

    file: str
    grow: Grow
    read: Use
    seal: Use = lambda lab: None

    @property
    def name(self) -> str:
        return f"{self.grow.__name__} in {self.file.rpartition('/')[2]}"


def seal_checkpoint(lab: Lab) -> None:
    seal(lab.run / NEWEST)


def seal_weights(lab: Lab) -> None:
    restate(lab.model, weights={"sha256": sha256_of(lab.model / "model.safetensors"), "dtype": "fp32", "finite": True})


def seal_tokenizer(lab: Lab) -> None:
    restate(lab.model, tokenizer_sha256=sha256_of(lab.model / "tokenizer.json"))
    edit_index(lab, lambda index: index.update(tokenizer_sha256=sha256_of(lab.data / "tokenizer.json")))


def seal_lengths(lab: Lab) -> None:
    edit_index(lab, lambda index: index["train"].update(lengths_sha256=sha256_of(lab.data / "lengths.npy")))


def seal_valid(lab: Lab) -> None:
    sha256 = sha256_of(lab.data / "valid" / "source.txt")
    edit_index(lab, lambda index: index["valid_text"].update(source_sha256=sha256))


def seal_run_weights(lab: Lab) -> None:
    file = lab.run / WEIGHTS
    (file.parent / "SHA256SUMS").write_text(f"{sha256_of(file)}  {file.name}\n")


def edit_index(lab: Lab, edit: Callable[[dict], object]) -> None:  # type: ignore[type-arg]
    file = lab.data / "index.json"
    index = json.loads(file.read_text())
    edit(index)
    file.write_text(json.dumps(index))


def read_model(lab: Lab) -> None:
    load_model(lab.model, torch.device("cpu"))


def read_data(lab: Lab) -> None:
    data = DataFolder.open(lab.data)
    data.valid_text()
    data.tokenizer()
    data.train.tokens(np.arange(3))


def read_run(lab: Lab) -> None:
    """Every reader of a run folder; what one refuses, the next reads all the same."""
    file, refusal = lab.run / "config.json", None
    uses: tuple[Callable[[], object], ...] = (
        lambda: verify_run(lab.run),
        lambda: load_run(lab.run),
        lambda: read_environments(lab.run),
        lambda: lost_records(lab.run, 4),
        lambda: best_weights(lab.run, 1, "nll"),
        lambda: settings_of(read_json(file), file),
        lambda: newest_checkpoint(lab.run, lambda _: None, content_problem),
        lambda: open_weights(lab.run / WEIGHTS),
    )
    for use in uses:
        try:
            use()
        except UserError as error:
            refusal = error
    if refusal is not None:
        raise refusal


def resume(lab: Lab) -> None:
    path = newest_checkpoint(lab.run, lambda _: None, content_problem)
    assert path is not None
    CheckpointReader(path)


def truncate(lab: Lab) -> None:
    truncate_jsonl(lab.run / "metrics.jsonl", 3)


def read_lines(lab: Lab) -> None:
    file = lab.folder / "lines.gz"
    exhaust(LineFiles(source=file, target=lab.folder / "lines"))
    read_aligned(file)


def of_format(name: str) -> Use:
    read = next(kind.read for kind in FORMATS if kind.name == name)
    return lambda lab: read(lab, b"")


def grown(grow: Grow, read: Use, *files: str, seal: Use = lambda lab: None) -> list[Grown]:
    return [Grown(file=file, grow=grow, read=read, seal=seal) for file in files]


_LOGS = ("run/metrics.jsonl", "run/ledger.jsonl")
_OF_RUN = ("run/config.json", "run/environment.json", "run/samples/step-00000004.json", "run/scores/test.json")
_MANIFEST, _STATE = (f"run/{NEWEST}/{name}" for name in ("manifest.json", "state.json"))
KINDS: dict[str, list[Grown]] = {
    "holes": [
        *grown(hole, read_model, "model/config.json"),
        *grown(hole, read_model, "model/model.safetensors", seal=seal_weights),
        *grown(hole, read_model, "model/tokenizer.json", seal=seal_tokenizer),
        *grown(hole, read_data, "data/index.json", "data/train-00000.arrow"),
        *grown(hole, read_data, "data/tokenizer.json", seal=seal_tokenizer),
        *grown(hole, read_data, "data/lengths.npy", seal=seal_lengths),
        *grown(hole, read_data, "data/valid/source.txt", seal=seal_valid),
        *grown(hole, read_run, *_OF_RUN, *_LOGS, "run/checkpoints/latest", "run/weights/SHA256SUMS"),
        *grown(hole, truncate, "run/metrics.jsonl"),
        *grown(hole, resume, _MANIFEST),
        *grown(hole, resume, _STATE, f"run/{PART}", seal=seal_checkpoint),
        *grown(hole, read_run, f"run/{WEIGHTS}", seal=seal_run_weights),
    ],
    "many values": [
        *grown(lists, read_model, "model/config.json"),
        *grown(lists, read_data, "data/index.json"),
        *grown(lists, read_data, "data/tokenizer.json", seal=seal_tokenizer),
        *grown(lists, read_run, *_OF_RUN, *_LOGS),
        *grown(lists, resume, _MANIFEST),
        *grown(lists, resume, _STATE, seal=seal_checkpoint),
        *grown(records, lambda lab: load_run(lab.run), "run/metrics.jsonl"),
        *grown(left_out, read_run, "run/ledger.jsonl"),
        *grown(header, read_model, "model/model.safetensors", seal=seal_weights),
        *grown(header, resume, f"run/{PART}", seal=seal_checkpoint),
        *grown(header, read_run, f"run/{WEIGHTS}", seal=seal_run_weights),
    ],
    "texts": [
        *grown(hole, of_format("JSONL"), "text.jsonl"),
        *grown(hole, of_format("TSV"), "text.tsv"),
        *grown(hole, of_format("Parquet"), "table.parquet"),
        *grown(lists, of_format("JSONL"), "text.jsonl"),
        *grown(bomb, read_lines, "lines.gz"),
    ],
}


def outcome_of(case: Grown, lab: Lab) -> str:
    """Let a file grow, read it, and put the sound ones back; gives the harness's outcome."""
    file, sums = lab.folder / case.file, lab.run / WEIGHTS
    kept = {path: path.read_bytes() if path.exists() else None for path in (file, sums.with_name("SHA256SUMS"))}
    file.parent.mkdir(exist_ok=True)
    file.touch()
    try:
        case.grow(file)
        case.seal(lab)
        return attempt(lambda: case.read(lab), isolated=True)
    finally:
        for path, content in kept.items():
            path.unlink()
            if content is not None:
                path.write_bytes(content)
        lab.restore()
