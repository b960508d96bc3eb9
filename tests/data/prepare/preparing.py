"""Helpers of the tests of preparation: small corpora, a preparation of them, and its outcome."""

import subprocess
from pathlib import Path
from typing import Any

import datasets

from dist_transformer.data.folder.format import DataIndex
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.data.prepare.pipeline import prepare
from dist_transformer.data.prepare.settings import PrepareSettings
from dist_transformer.data.text.pairs import line_files
from tests.conftest import run_python

ROOT = Path(__file__).parents[3]
FULL_WIDTH = ("a dog, a cat", "一条狗，一只猫！")


def corpus(count: int) -> list[tuple[str, str]]:
    """Pairs that are all different and of about equal length."""
    return [(f"word number {i} is here", f"Wort Nummer {i} ist da") for i in range(count)]


def write_pairs(folder: Path, name: str, pairs: list[tuple[str, str]]) -> tuple[Path, Path]:
    paths = folder / f"{name}.en", folder / f"{name}.de"
    for side, path in enumerate(paths):
        path.write_text("".join(f"{pair[side]}\n" for pair in pairs), encoding="utf-8", newline="\n")
    return paths


def run(folder: Path, pairs: list[tuple[str, str]], out: str = "out", **changes: Any) -> tuple[DataIndex, list[str]]:
    source, target = write_pairs(folder, "train", pairs)
    settings = {"sources": tuple(line_files([source], [target])), "vocab_size": 400, **changes}
    report: list[str] = []
    index = prepare(PrepareSettings(out=folder / out, **settings), report.append)
    return index, report


def with_validation(folder: Path, pairs: list[tuple[str, str]]) -> dict[str, Any]:
    source, target = write_pairs(folder, "valid", pairs)
    return {"validation": tuple(line_files([source], [target]))}


def train_text(data: DataFolder) -> list[tuple[str, str]]:
    tokenizer = data.tokenizer()
    pairs = []
    for shard in data.index.train.shards:
        dataset = datasets.Dataset.from_file(str(data.path / shard.file))
        pairs += [(tokenizer.decode(row["src"]), tokenizer.decode(row["tgt"])) for row in dataset]
    return pairs


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return run_python("tools/prepare_data.py", *arguments)
