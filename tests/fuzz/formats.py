"""The kinds of files, each with a sound one and its readers in real use."""

import bz2
import gzip
import json
import lzma
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from backports import zstd

from dist_transformer.averaging.choice import choose_weights
from dist_transformer.base.errors import UserError
from dist_transformer.config.plain import read_json
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.data.prepare.pipeline import prepare
from dist_transformer.data.prepare.settings import PrepareSettings
from dist_transformer.data.text.pairs import JsonlFile, PairSource, TsvFile, line_files, read_aligned
from dist_transformer.data.text.tables import ParquetFile
from dist_transformer.data.vocabulary.kinds import load_vocabulary
from dist_transformer.importing.marian_files import MarianWeights, find_marian_files, read_marian_vocabulary
from dist_transformer.model_folder import load_model
from dist_transformer.reporting.html.run import load_run
from dist_transformer.run.checkpoint.reader import CheckpointReader, newest_checkpoint
from dist_transformer.run.folder import settings_of
from dist_transformer.run.layout import scan_records
from dist_transformer.run.ledger import read_ledger, truncate_jsonl
from dist_transformer.run.verify import verify_run
from tests.averaging.conftest import random_weights, save_model
from tests.importing.marian_npz import write_model
from tests.run.sound_run import NEWEST, PART, make_run

_PACKERS = {".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress, ".zst": zstd.compress}


class Lab:
    """Sound folders of every kind, made once; a case writes one file."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        folder.mkdir()
        self.folder = folder
        save_model(folder / "model", random_weights(3), (3,))
        source, target = folder / "text.en", folder / "text.de"
        for side, file in enumerate((source, target)):
            file.write_text("".join(f"{'ab'[side]} sentence {number}\n" for number in range(60)))
        files = tuple(line_files([source], [target]))
        prepare(PrepareSettings(sources=files, vocab_size=270, pairs_per_shard=20, out=folder / "data"), lambda _: None)
        (folder / "run data").mkdir()
        make_run(folder / "run", folder / "run data")
        records = [
            {"kind": kind, "step": step, "nll": 2.5, "bleu": 3} for kind in ("train", "valid") for step in (2, 4)
        ]
        (folder / "run/metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        pq.write_table(pa.table({"en": ["a", "b"] * 40, "de": ["c", None] * 40}), folder / "table.parquet")
        (folder / "text.jsonl").write_text('{"en": "a", "de": "b"}\n' * 5)
        (folder / "text.tsv").write_text("a\tb\n" * 5)
        # A table of ids, and two models that split text.
        write_model(folder / "marian", tuple(file.read_text().splitlines() for file in (source, target)), "yml")
        shutil.copy(folder / "marian/source.spm", folder / "own.model")
        for suffix, pack in _PACKERS.items():
            (folder / f"lines{suffix}").write_bytes(pack(source.read_bytes()))


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    name: str
    file: str
    """A sound file of the lab; each case replaces its content."""
    read: Callable[[Lab], object]
    is_hashed: bool = False
    """Whether a hash is recorded elsewhere, so that no damage is read."""
    is_ours: bool = False
    """Whether only our own programs write it, so that any error is one line of the command line."""


def read_run(lab: Lab) -> None:
    verify_run(lab.folder / "run")
    load_run(lab.folder / "run")
    file = lab.folder / "run/config.json"
    settings_of(read_json(file), file)


def read_data(lab: Lab) -> None:
    data = DataFolder.open(lab.folder / "data")
    data.valid_text()
    data.verify()
    data.train.tokens(np.arange(min(3, data.index.train.pairs)))


def read_checkpoint(lab: Lab) -> None:
    """A start resumes from the newest checkpoint, or from the older one and reports it."""
    warned: list[str] = []
    path = newest_checkpoint(lab.folder / "run", warned.append)
    assert path is not None
    assert bool(warned) == (path.name != "step-00000004"), warned
    reader = CheckpointReader(path)
    for name in reader.parameter_names():
        reader.parameter(name)
    if warned:
        raise UserError(warned[0])


def read_ledger_file(lab: Lab) -> None:
    file = lab.folder / "run/ledger.jsonl"
    copy = Path(shutil.copy(file, lab.folder / "copy.jsonl"))
    truncate_jsonl(copy, 3)
    scan_records(copy)
    verify_run(lab.folder / "run")
    list(read_ledger(file))


def read_metrics(lab: Lab) -> None:
    load_run(lab.folder / "run")
    truncate_jsonl(Path(shutil.copy(lab.folder / "run/metrics.jsonl", lab.folder / "copy.jsonl")), 3)
    choose_weights(lab.folder / "run", best=1, by="nll")


def read_marian(lab: Lab) -> None:
    """The checks of an import begin after this."""
    files = find_marian_files(lab.folder / "marian")
    vocabulary, weights = read_marian_vocabulary(files), MarianWeights(files.weights)
    weights.tensors(weights.config(has_two=vocabulary.sizes[1] > 0))


def read_packed(suffix: str) -> Callable[[Lab], object]:
    return lambda lab: [
        exhaust(line_files([lab.folder / f"lines{suffix}"], [lab.folder / "text.de"])[0]),
        read_aligned(lab.folder / f"lines{suffix}"),
    ]


def exhaust(source: PairSource) -> None:
    for pair in source.pairs():
        assert pair is None or all(isinstance(side, str) for side in pair)


def read_model(lab: Lab) -> None:
    load_model(lab.folder / "model", torch.device("cpu"))


_NAMED = {"source_field": "en", "target_field": "de"}


# Name, file, reader, and what else is known of a file.
_HASHED, _OURS = {"is_hashed": True}, {"is_ours": True}
FORMATS = [
    Format(name=name, file=file, read=read, **known)
    for name, file, read, known in (
        ("config.json of a model", "model/config.json", read_model, _OURS),
        ("config.json of a run", "run/config.json", read_run, _OURS),
        ("index.json", "data/index.json", read_data, _OURS),
        ("manifest.json", f"run/{NEWEST}/manifest.json", read_checkpoint, _OURS),
        ("ledger.jsonl", "run/ledger.jsonl", read_ledger_file, _OURS),
        ("metrics.jsonl", "run/metrics.jsonl", read_metrics, _OURS),
        ("state.json", f"run/{NEWEST}/state.json", read_checkpoint, _HASHED),
        ("weights of a model", "model/model.safetensors", read_model, _HASHED),
        ("part of a checkpoint", f"run/{PART}", read_checkpoint, _HASHED),
        ("tokenizer.json", "data/tokenizer.json", read_data, _HASHED),
        ("tokenizer.json of a model", "model/tokenizer.json", read_model, _HASHED),
        ("Arrow shard", "data/train-00000.arrow", read_data, _HASHED),
        ("lengths.npy", "data/lengths.npy", read_data, _HASHED),
        ("JSONL", "text.jsonl", lambda lab: exhaust(JsonlFile(path=lab.folder / "text.jsonl", **_NAMED)), {}),
        ("TSV", "text.tsv", lambda lab: exhaust(TsvFile(path=lab.folder / "text.tsv")), {}),
        ("Parquet", "table.parquet", lambda lab: exhaust(ParquetFile(path=lab.folder / "table.parquet", **_NAMED)), {}),
        *((suffix, f"lines{suffix}", read_packed(suffix), {}) for suffix in _PACKERS),
        ("SentencePiece", "own.model", lambda lab: load_vocabulary(lab.folder / "own.model", is_foreign=True), {}),
        ("Marian's model.npz", "marian/model.npz", read_marian, {}),
        ("Marian's decoder.yml", "marian/decoder.yml", read_marian, {}),
        ("Marian's vocabulary", "marian/joint.yml", read_marian, {}),
    )
]
