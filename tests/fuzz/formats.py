"""The formats that come from elsewhere, each with a sound file, ways to damage it, and the readers of a real use."""

import contextlib
import gzip
import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from dist_transformer.averaging.choice import best_weights
from dist_transformer.base.errors import UserError
from dist_transformer.config.plain import read_json
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.data.prepare.pipeline import prepare
from dist_transformer.data.prepare.settings import PrepareSettings
from dist_transformer.data.text.files import JsonlFile, PairSource, TsvFile, line_files, read_aligned
from dist_transformer.data.text.tables import ParquetFile
from dist_transformer.data.vocabulary.files import load_vocabulary
from dist_transformer.importing.marian_files import MarianWeights, find_marian_files, read_marian_vocabulary
from dist_transformer.model_folder import load_model
from dist_transformer.reporting.html.run import load_run
from dist_transformer.run.checkpoint.content import content_problem
from dist_transformer.run.checkpoint.reader import CheckpointReader, newest_checkpoint
from dist_transformer.run.folder import settings_of
from dist_transformer.run.layout import scan_records
from dist_transformer.run.ledger import read_ledger, truncate_jsonl
from dist_transformer.run.progress import Progress
from dist_transformer.run.verify import verify_run
from tests.fuzz import damage
from tests.importing.marian_npz import write_model
from tests.run.sound_run import NEWEST, PART, edit_manifest, make_run, seal
from tests.small_model import restate

MANIFEST = f"{NEWEST}/manifest.json"
_SUFFIXES = (".gz", ".xz", ".bz2", ".zst")
_LINES = "".join(f"line {number} of the text\n" for number in range(40)).encode()


class Lab:
    """Sound folders of every kind, made once; a case writes one file of a copy."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.model = Path(shutil.copytree(model, folder / "model"))
        self.data = folder / "data"
        source, target = folder / "text.en", folder / "text.de"
        for side, file in enumerate((source, target)):
            file.write_text("".join(f"{'ab'[side]} sentence {number}\n" for number in range(60)))
        settings = PrepareSettings(
            sources=tuple(line_files([source], [target])), vocab_size=270, pairs_per_shard=20, out=self.data
        )
        prepare(settings, lambda line: None)
        run_data = folder / "run data"
        run_data.mkdir()
        self.run = make_run(folder / "run", run_data)
        records = [
            {"kind": kind, "step": step, "nll": 2.5, "bleu": 3.0} for kind in ("train", "valid") for step in (2, 4)
        ]
        (self.run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        rows = {"en": ["a", "b"] * 40, "de": ["c", None] * 40}
        pq.write_table(pa.table(rows), folder / "table.parquet")
        (folder / "text.jsonl").write_text("".join(json.dumps({"en": "a", "de": "b"}) + "\n" for _ in range(5)))
        (folder / "text.tsv").write_text("a\tb\n" * 5)
        (folder / "lines").write_bytes(_LINES)
        # A table of ids, and two models that split text.
        write_model(folder / "marian", tuple(file.read_text().splitlines() for file in (source, target)), "yml")
        # The first byte says how the rest is packed.
        (folder / "lines.packed").write_bytes(b"\0" + gzip.compress(_LINES))
        sealing = (self.data / "index.json", self.run / MANIFEST, self.model / "config.json")
        self._sealing = {file: file.read_bytes() for file in sealing}

    def restore(self) -> None:
        """Put back what readers of a case seal."""
        for file, content in self._sealing.items():
            file.write_bytes(content)


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """A kind of file from elsewhere."""

    name: str
    file: str
    """A sound file of the lab; each case replaces its content."""
    damage: damage.Damage
    read: Callable[[Lab, bytes], object]
    """Sees to it that hashes fit, and reads; the file has the content already."""
    isolated: bool = False
    """Readers in C or Rust may end the process."""


def read_sealed_config(lab: Lab, content: bytes) -> None:
    """It states its own hash, where it is JSON at all."""
    with contextlib.suppress(ValueError, TypeError, RecursionError):
        restate(lab.model)
    load_model(lab.model, torch.device("cpu"))


def read_sealed_weights(lab: Lab, content: bytes) -> None:
    restate(lab.model, weights={"sha256": hashlib.sha256(content).hexdigest(), "dtype": "fp32", "finite": True})
    load_model(lab.model, torch.device("cpu"))


def read_run(lab: Lab, content: bytes) -> None:
    verify_run(lab.run)
    load_run(lab.run)
    file = lab.run / "config.json"
    settings_of(read_json(file), file)


def read_data(lab: Lab, content: bytes) -> None:
    data = DataFolder.open(lab.data)
    data.valid_text()
    data.verify()
    data.train.tokens(np.arange(min(3, data.index.train.pairs)))


def sealed_data(name: str) -> Callable[[Lab, bytes], None]:
    """The index states the size and the hash of what is there."""

    def read(lab: Lab, content: bytes) -> None:
        index_file = lab.data / "index.json"
        index = json.loads(index_file.read_text())
        sha256 = hashlib.sha256(content).hexdigest()
        if name == "lengths.npy":
            index["train"]["lengths_sha256"] = sha256
        else:
            index["train"]["shards"][0].update(bytes=len(content), sha256=sha256)
        index_file.write_text(json.dumps(index))
        read_data(lab, content)

    return read


def read_checkpoint(lab: Lab, content: bytes) -> None:
    """A start resumes from the newest checkpoint, or from the older one and reports it."""
    warned: list[str] = []
    path = newest_checkpoint(lab.run, warned.append, content_problem)
    assert path is not None
    assert bool(warned) == (path.name != "step-00000004"), warned
    reader = CheckpointReader(path)
    Progress.from_json(reader.state)
    for name in reader.parameter_names():
        reader.parameter(name)
    if warned:
        raise UserError(warned[0])


def read_sealed_checkpoint(lab: Lab, content: bytes) -> None:
    seal(lab.run / NEWEST)
    read_checkpoint(lab, content)


def read_manifest(lab: Lab, content: bytes) -> None:
    try:
        json.loads(content)["files"]
        edit_manifest(lab.run / NEWEST)
    except (ValueError, KeyError, TypeError, RecursionError, AttributeError):
        pass
    read_checkpoint(lab, content)


def read_the_ledger(lab: Lab, content: bytes) -> None:
    file = lab.run / "ledger.jsonl"
    copy = Path(shutil.copy(file, lab.folder / "copy.jsonl"))
    truncate_jsonl(copy, 3)
    scan_records(copy)
    verify_run(lab.run)
    list(read_ledger(file))


def read_metrics(lab: Lab, content: bytes) -> None:
    load_run(lab.run)
    truncate_jsonl(Path(shutil.copy(lab.run / "metrics.jsonl", lab.folder / "copy.jsonl")), 3)
    best_weights(lab.run, 1, "nll")


def read_tokenizer(lab: Lab, content: bytes) -> None:
    tokenizer = load_vocabulary(lab.data / "tokenizer.json")
    ids = tokenizer.encode("a sentence ½ </s>")
    assert tokenizer.decode(ids) == tokenizer.normalize("a sentence ½ </s>")
    assert max(ids) < tokenizer.vocab_size == len(tokenizer.pieces)


def read_marian(lab: Lab, content: bytes) -> None:
    """The checks of an import begin after this."""
    files = find_marian_files(lab.folder / "marian")
    vocabulary, weights = read_marian_vocabulary(files), MarianWeights(files.weights)
    vocabulary.source.encode("a sentence")
    weights.tensors(weights.config(has_two=vocabulary.sizes[1] > 0))


def read_packed(lab: Lab, content: bytes) -> None:
    """The first byte says how it is packed."""
    file = lab.folder / f"packed{_SUFFIXES[content[0] % len(_SUFFIXES)]}"
    file.write_bytes(content[1:])
    exhaust(line_files([file], [lab.folder / "lines"])[0])
    read_aligned(file)


def read_source(source: Callable[[Path], PairSource], file: str) -> Callable[[Lab, bytes], None]:
    return lambda lab, content: exhaust(source(lab.folder / file))


def exhaust(source: PairSource) -> None:
    for pair in source.pairs():
        assert pair is None or all(isinstance(side, str) for side in pair)


def _jsonl(path: Path) -> PairSource:
    return JsonlFile(path=path, source_field="en", target_field="de")


def _parquet(path: Path) -> PairSource:
    return ParquetFile(path=path, source_field="en", target_field="de")


FORMATS = [
    Format(name="config.json of a model", file="model/config.json", damage=damage.json_file, read=read_sealed_config),
    Format(name="config.json of a run", file="run/config.json", damage=damage.json_file, read=read_run),
    Format(name="index.json", file="data/index.json", damage=damage.json_file, read=read_data),
    Format(name="state.json", file=f"run/{NEWEST}/state.json", damage=damage.json_file, read=read_sealed_checkpoint),
    Format(name="manifest.json", file=f"run/{MANIFEST}", damage=damage.json_file, read=read_manifest),
    Format(name="ledger.jsonl", file="run/ledger.jsonl", damage=damage.json_lines, read=read_the_ledger),
    Format(name="metrics.jsonl", file="run/metrics.jsonl", damage=damage.json_lines, read=read_metrics),
    Format(name="JSONL", file="text.jsonl", damage=damage.json_lines, read=read_source(_jsonl, "text.jsonl")),
    Format(
        name="TSV",
        file="text.tsv",
        damage=damage.start_of(20),
        read=read_source(lambda path: TsvFile(path=path), "text.tsv"),
    ),
    Format(
        name="weights of a model",
        file="model/model.safetensors",
        damage=damage.safetensors_file,
        read=read_sealed_weights,
        isolated=True,
    ),
    Format(
        name="part of a checkpoint",
        file=f"run/{PART}",
        damage=damage.safetensors_file,
        read=read_sealed_checkpoint,
        isolated=True,
    ),
    Format(
        name="tokenizer.json",
        file="data/tokenizer.json",
        damage=damage.tokenizer_file,
        read=read_tokenizer,
        isolated=True,
    ),
    Format(
        name="Arrow shard",
        file="data/train-00000.arrow",
        damage=damage.start_of(700),
        read=sealed_data("train-00000.arrow"),
        isolated=True,
    ),
    Format(
        name="lengths.npy",
        file="data/lengths.npy",
        damage=damage.start_of(128),
        read=sealed_data("lengths.npy"),
        isolated=True,
    ),
    Format(
        name="Marian's model.npz",
        file="marian/model.npz",
        damage=damage.end_of(5000),
        read=read_marian,
        isolated=True,
    ),
    Format(
        name="Marian's decoder.yml",
        file="marian/decoder.yml",
        damage=damage.start_of(200),
        read=read_marian,
        isolated=True,
    ),
    Format(
        name="Marian's vocabulary",
        file="marian/joint.yml",
        damage=damage.start_of(2000),
        read=read_marian,
        isolated=True,
    ),
    Format(name="gz, xz, bz2", file="lines.packed", damage=damage.compressed_text, read=read_packed, isolated=True),
    Format(
        name="Parquet",
        file="table.parquet",
        damage=damage.end_of(900),
        read=read_source(_parquet, "table.parquet"),
        isolated=True,
    ),
]
