"""Folders that version 0.1.0 wrote, before it had other kinds of vocabulary and rules for text."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from dist_transformer.config.plain import from_plain, to_plain
from dist_transformer.config.settings import RUN_IDENTITY, TrainConfig
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.inference.trained_model import TrainedModel
from tests.conftest import run_command

STORED = Path(__file__).parent / "stored" / "0.1.0"
TOOL = (sys.executable, "-m", "dist_transformer")


def test_a_vocabulary_keeps_its_rule_and_its_ids() -> None:
    tokenizer = DataFolder.open(STORED / "data").tokenizer().source
    assert (tokenizer.normalization, tokenizer.kind, tokenizer.tags) == ("nfkc", "byte-level BPE", ("<2de>",))
    for text, ids in json.loads((STORED / "ids.json").read_text(encoding="utf-8")).items():
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == tokenizer.normalize(text)


def test_a_model_translates_as_before() -> None:
    lines, expected = (
        (STORED / name).read_text(encoding="utf-8").splitlines() for name in ("source.txt", "translations.txt")
    )
    assert TrainedModel.load(STORED / "model").translate(lines) == expected


def test_the_settings_of_a_run_are_written_as_before() -> None:
    """A setting that is newer than the run appears in them only if it is not its default."""
    stored = json.loads((STORED / "run" / "config.json").read_text(encoding="utf-8"))
    settings = {name: value for name, value in stored.items() if name not in RUN_IDENTITY}
    assert to_plain(from_plain(TrainConfig, settings, "config.json")) == settings


@pytest.mark.slow
def test_a_run_resumes(tmp_path: Path) -> None:
    for name in ("data", "run"):
        shutil.copytree(STORED / name, tmp_path / name)
    folders = ("--data", tmp_path / "data", "--run-dir", tmp_path / "run")
    settings = json.loads((STORED / "run" / "config.json").read_text(encoding="utf-8"))
    model = (
        word
        for name in ("width", "heads", "ffn-width", "encoder-layers", "decoder-layers")
        for word in (f"--model.{name}", settings["model"][name.replace("-", "_")])
    )
    words = ("--preset", "tiny", *model, "--batch.max-target-tokens", 512, "--ema-decay", 0.9, "--validate-every", 2)
    said = run_command(*TOOL, "train", *words, *folders, "--save-every", 4, "--max-steps", 6)
    assert "resumed from" in said
    assert "finished at step 6" in said
    run_command(*TOOL, "verify", tmp_path / "run", "--data", tmp_path / "data")
