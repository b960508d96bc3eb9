"""tools/prepare_data.py as a user types it."""

import json
from pathlib import Path

import datasets
import pytest

from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.runtime.launch import as_typed, own_command
from tests.data.prepare.preparing import command, corpus, names
from tests.rights import wrong_rights


def test_command_prepares_the_toy_corpus(tmp_path: Path) -> None:
    result = command("--toy", "200", "--vocab-size", "500", "--out", tmp_path / "toy")
    assert (result.returncode, result.stderr) == (0, "")
    flags = ["--preset", "tiny", "--data", tmp_path / "toy", "--run-dir", "runs/toy"]
    assert f"\nnext: {as_typed(own_command('train', *flags))}\n" in result.stdout
    assert "\npreset: tiny " in result.stdout
    data = DataFolder.open(tmp_path / "toy")
    assert (data.index.corpus, data.index.synthetic) == ("toy grammar", True)
    assert (data.index.pairs_read, data.index.valid_text.pairs) == (200, 20)
    texts = {f"{split}.{language}" for split in ("train", "valid", "test") for language in ("en", "de")}
    assert names(tmp_path / "toy/text") == texts
    assert (tmp_path / "toy/text/valid.de").read_text().splitlines() == data.valid_text()[1]


def test_a_data_folder_is_for_whom_the_umask_lets(tmp_path: Path, umask: int) -> None:
    result = command("--toy", "200", "--vocab-size", "500", "--out", tmp_path / "new" / "toy")
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "new/toy/text/train.en").exists()
    assert wrong_rights(tmp_path / "new") == {}


@pytest.mark.system
def test_command_reads_jsonl_and_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    (tmp_path / "set").mkdir()
    for name, rows in (("train", corpus(35)[5:]), ("validation", corpus(5))):
        lines = [json.dumps({"en": source, "de": target}) for source, target in rows]
        (tmp_path / f"set/{name}.jsonl").write_text("\n".join(lines))
    common = ("--src-lang", "en", "--tgt-lang", "de", "--vocab-size", "400", "--out")
    result = command("--dataset", tmp_path / "set", "--dataset-valid-split", "validation", *common, tmp_path / "hub")
    assert result.returncode == 0, result.stderr
    fields = ("--src-field", "en", "--tgt-field", "de")
    result = command("--jsonl", tmp_path / "set/train.jsonl", *fields, *common, tmp_path / "jsonl")
    assert result.returncode == 0, result.stderr
    hub, jsonl = DataFolder.open(tmp_path / "hub"), DataFolder.open(tmp_path / "jsonl")
    assert (hub.index.pairs_read, hub.index.train.pairs, hub.index.valid_text.pairs) == (30, 30, 5)
    assert (jsonl.index.pairs_read, jsonl.index.train.pairs, jsonl.index.valid_text.pairs) == (30, 27, 3)


@pytest.mark.system
def test_command_reads_parquet_streams_and_patterns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    (tmp_path / "set").mkdir()
    rows = [{"translation": {"en": source, "de": target}} for source, target in corpus(30)]
    for part in (0, 1):
        datasets.Dataset.from_list(rows[part * 15 : part * 15 + 15]).to_parquet(tmp_path / f"set/train-{part}.parquet")
    common = ("--vocab-size", "400", "--out")
    fields = ("--src-field", "en", "--tgt-field", "de")
    result = command("--parquet", tmp_path / "set/*.parquet", *fields, *common, tmp_path / "files")
    assert (result.returncode, result.stderr) == (0, "")
    languages = ("--src-lang", "en", "--tgt-lang", "de")
    result = command("--dataset", tmp_path / "set", "--streaming", *languages, *common, tmp_path / "stream")
    assert result.returncode == 0, result.stderr
    files, stream = DataFolder.open(tmp_path / "files"), DataFolder.open(tmp_path / "stream")
    assert (files.index.sources, stream.index.sources) == (("train-0.parquet", "train-1.parquet"), ("set/train",))
    assert files.index.train == stream.index.train
    assert files.index.pairs_read == 30
    # Nothing of a stream is stored.
    assert not list((tmp_path / "cache").rglob("*.arrow"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--parquet", "a"), "error: --parquet needs the names of its two text fields: pass --src-field"),
        (("--toy", "9", "--vocabulary", "sentencepiece", "--max-tokens", "1"), "error: --max-tokens is 1: it must"),
        (("--tsv", "a", "--src-field", "en"), "error: --src-field needs --jsonl or --parquet: add one of them"),
        (("--toy", "9", "--valid-pairs", "3"), "error: --valid-pairs has no effect with --toy, which has"),
    ],
)
def test_command_refuses_in_one_sentence(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    result = command(*arguments, "--vocab-size", "400", "--out", tmp_path / "out")
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (1, "", 1)
    assert result.stderr.startswith(message)
