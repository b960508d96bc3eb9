"""Folders of 0.1.0, and of 0.2.0 with two vocabularies of SentencePiece, segmentations, tags and a run of two ranks."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from dist_transformer.config.plain import from_plain, to_plain
from dist_transformer.config.settings import RUN_IDENTITY, TrainConfig
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.inference.trained_model import TrainedModel
from dist_transformer.run.layout import read_records
from tests.conftest import run_command

ALL = Path(__file__).parent / "stored"
STORED = ALL / "0.1.0"
TOOL = (sys.executable, "-m", "dist_transformer")


def test_two_vocabularies_keep_their_ids() -> None:
    pair = DataFolder.open(ALL / "0.2.0" / "data").tokenizer()
    assert (pair.source.kind, pair.source.tags) == ("SentencePiece unigram with byte fallback", ("<2de>",))
    for text, ids in json.loads((ALL / "0.2.0" / "ids.json").read_text(encoding="utf-8")).items():
        assert [pair.source.encode(text), pair.target.encode(text)] == ids


def test_a_vocabulary_keeps_its_rule_and_its_ids() -> None:
    tokenizer = DataFolder.open(STORED / "data").tokenizer().source
    assert (tokenizer.normalization, tokenizer.kind, tokenizer.tags) == ("nfkc", "byte-level BPE", ("<2de>",))
    for text, ids in json.loads((STORED / "ids.json").read_text(encoding="utf-8")).items():
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == tokenizer.normalize(text)


@pytest.mark.parametrize("version", ["0.1.0", "0.2.0"])
def test_a_model_translates_as_before(version: str) -> None:
    lines, expected = (
        (ALL / version / name).read_text(encoding="utf-8").splitlines() for name in ("source.txt", "translations.txt")
    )
    assert TrainedModel.load(ALL / version / "model").translate(lines) == expected


def test_the_settings_of_a_run_are_written_as_before() -> None:
    """A setting that is newer than the run appears in them only if it is not its default."""
    stored = json.loads((STORED / "run" / "config.json").read_text(encoding="utf-8"))
    settings = {name: value for name, value in stored.items() if name not in RUN_IDENTITY}
    assert to_plain(from_plain(TrainConfig, settings, "config.json")) == settings


@pytest.mark.slow
@pytest.mark.parametrize("version", ["0.1.0", "0.2.0"])
def test_a_run_resumes(version: str, tmp_path: Path) -> None:
    for name in ("data", "run"):
        shutil.copytree(ALL / version / name, tmp_path / name)
    folders = ("--data", tmp_path / "data", "--run-dir", tmp_path / "run")
    settings = json.loads((ALL / version / "run" / "config.json").read_text(encoding="utf-8"))
    model = (
        word
        for name in ("width", "heads", "ffn-width", "encoder-layers", "decoder-layers")
        for word in (f"--model.{name}", settings["model"][name.replace("-", "_")])
    )
    words = ("--preset", "tiny", *model, "--batch.max-target-tokens", 512, "--ema-decay", 0.9, "--validate-every", 2)
    # The stored runs are in fp32; a processor with instructions for bf16 has another default.
    steps = ("--precision", "fp32", "--save-every", 4, "--log-every", settings["log_every"], "--max-steps", 8)
    said = run_command(*TOOL, "train", *words, *folders, *steps)
    assert "resumed from" in said
    assert "finished at step 8" in said
    run_command(*TOOL, "verify", tmp_path / "run", "--data", tmp_path / "data")
    if version == "0.2.0":
        recorded = (ALL / version / "resumed.jsonl").read_text(encoding="utf-8")
        assert (tmp_path / "run" / "ledger.jsonl").read_text(encoding="utf-8").endswith(recorded)
        # The losses of the run that continued after the folder was stored.
        losses = [record["loss"] for record in read_records(tmp_path / "run", "train")][-4:]
        assert losses == pytest.approx([6.444659, 6.491202, 6.492956, 6.480899], abs=1e-4)
