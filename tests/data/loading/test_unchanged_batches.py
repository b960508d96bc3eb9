"""Nothing that happens to the files of a data folder after it was opened changes a batch."""

import itertools
import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch

from dist_transformer.config.presets import PRESETS
from dist_transformer.config.settings import TrainConfig
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.data.loading.collate import Collator, epoch_steps
from dist_transformer.data.loading.loader import open_training_data
from dist_transformer.data.loading.plan import Step
from dist_transformer.training.validation import Validator


@pytest.fixture
def config(toy_data: DataFolder, tmp_path: Path) -> TrainConfig:
    shutil.copytree(toy_data.path, tmp_path / "data")
    return PRESETS["tiny"].changed(data=(str(tmp_path / "data"),), run_dir=tmp_path / "run")


def tensors(steps: Iterable[Step], collator: Collator) -> list[torch.Tensor]:
    """List the tensors with which training computes each step."""
    batches = [micro.batch for step in steps for micro in collator.micro_batches(step, rank=0, world_size=1)]
    return [
        tensor
        for batch in batches
        for tensor in (batch.source.tokens_T, batch.source.offsets_N, batch.target.tokens_T, batch.labels_T)
    ]


def overwrite(file: Path) -> None:
    """Change the content in place, for every process that maps it: sentences have one token, texts and ids differ."""
    content = bytearray(file.read_bytes())
    if file.name == "lengths.npy":
        lengths = np.load(file)
        content[len(content) - lengths.nbytes :] = np.ones_like(lengths).tobytes()
    else:
        content[len(content) // 2 :] = bytes(byte ^ 1 for byte in content[len(content) // 2 :])
    with file.open("r+b") as opened:
        opened.write(content)


def test_lengths_that_change_during_training_change_no_step(config: TrainConfig) -> None:
    """Across windows and epochs; an untouched folder gives what is expected."""
    found = []
    for is_changed in (False, True):
        data = open_training_data(config.corpora, config.batch, seed=config.seed)
        steps = data.plan.steps(data.plan.start(), config.batch.packs_per_step)
        first = tensors(itertools.islice(steps, 3), data.collator)
        if is_changed:
            overwrite(Path(config.corpora.data[0]) / "lengths.npy")
        found.append(first + tensors(itertools.islice(steps, 60), data.collator))
    assert all(torch.equal(before, after) for before, after in zip(*found, strict=True))


def test_validation_files_that_change_during_training_change_no_validation(config: TrainConfig) -> None:
    data = open_training_data(config.corpora, config.batch, seed=config.seed)
    validator = Validator(data.first, data.budgets, config.batch, positions=1024, sentences=5, named=False)

    def validation() -> list[torch.Tensor]:
        ((plan, collator),) = validator.parts
        return tensors(epoch_steps(plan, packs_per_step=2), collator)

    # Not read before the files change: held since the validator was made.
    valid = Path(config.corpora.data[0]) / "valid"
    sources, whole = validator.sources, {file: file.read_bytes() for file in valid.iterdir()}
    for file in whole:
        overwrite(file)
    after = validation()
    for file, content in whole.items():
        file.write_bytes(content)
    again = open_training_data(config.corpora, config.batch, seed=config.seed)
    validator = Validator(again.first, again.budgets, config.batch, positions=1024, sentences=5, named=False)
    assert all(torch.equal(*both) for both in zip(after, validation(), strict=True))
    assert validator.sources == sources
