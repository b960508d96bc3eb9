"""Files and folders that averaging opens, and those that it refuses with name and reason."""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from dist_transformer.averaging.mean import average
from dist_transformer.base.errors import UserError
from dist_transformer.data.vocabulary.byte_bpe import learn_byte_bpe
from tests.averaging.conftest import random_weights, record_hash, save, save_both, save_model
from tests.small_model import forge_weights


def other_run(run: Path) -> Path:
    return save(run / "other", 2, run="b" * 16)


class Bomb:
    """Unpickling it ends the tests."""

    def __reduce__(self) -> tuple[Callable[[int], None], tuple[int]]:
        return os._exit, (99,)


def torch_pickle(run: Path) -> Path:
    torch.save({"embedding": Bomb()}, run / "model.pt")
    return run / "model.pt"


def torch_pickle_named_safetensors(run: Path) -> Path:
    record_hash(shutil.copyfile(torch_pickle(run), run / "model.safetensors"))
    return run / "model.safetensors"


def folder_of_no_step(run: Path) -> Path:
    return save_model(run / "model", random_weights(2), ())


def file_without_hash(run: Path) -> Path:
    file = save(run, 2)
    (file.parent / "SHA256SUMS").unlink()
    record_hash(run / "weights" / "step-00000001.safetensors")
    return file


def foreign_file(run: Path) -> Path:
    safetensors.torch.save_file({"embedding": torch.ones(2)}, run / "foreign.safetensors", metadata={"format": "pt"})
    record_hash(run / "foreign.safetensors")
    return run / "foreign.safetensors"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (other_run, r"is from another run \(model, data, seed or batch\) than .*average one run's weights"),
        (torch_pickle_named_safetensors, "cannot be read .*leave it out, or restore it"),
        (folder_of_no_step, "has no training step"),
        (file_without_hash, "has no hash in .*SHA256SUMS, so it cannot be checked: use weight files in"),
        (foreign_file, "is not a weight file of a run: use files of RUN/weights"),
        (lambda run: run / "nothing", "is not a weight file, a checkpoint or a model folder: check the path"),
    ],
)
def test_a_source_that_does_not_fit_is_refused_by_name(
    make: Callable[[Path], Path], message: str, run: Path, tmp_path: Path
) -> None:
    first = save(run, 1)
    second = make(run)
    with pytest.raises(UserError, match=message) as refused:
        average([first, second], tmp_path / "out")
    assert str(refused.value).startswith(str(second))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        (0, "is damaged (its SHA-256 is not what SHA256SUMS states): leave it out, or restore it"),
        (1, "): choose another checkpoint"),
        (2, "is damaged (its SHA-256 is not what config.json states): write the folder again"),
    ],
)
def test_one_flipped_bit_anywhere_in_a_source_is_found(kind: int, problem: str, run: Path, tmp_path: Path) -> None:
    """In headers, names and numbers; in the state of a checkpoint; in the folder's config."""
    source = [*save_both(run, 5), save_model(tmp_path / "m", random_weights(5), (5,))][kind]
    ignored = {"README.md", "tokenizer.json", "manifest.json"}
    files = [source] if source.is_file() else sorted(file for file in source.iterdir() if file.name not in ignored)
    assert len(files) == [1, 2, 2][kind]
    found = set[str]()
    for file in files:
        whole = file.read_bytes()
        for place in np.linspace(0, len(whole) - 1, 25).astype(int):
            content = bytearray(whole)
            content[place] ^= 1
            file.write_bytes(content)
            with pytest.raises(UserError, match=re.escape(file.name)) as refused:
                average([source], tmp_path / "out")
            assert not (tmp_path / "out").exists()
            found.add(str(refused.value))
        file.write_bytes(whole)
    assert any(problem in message for message in found)
    average([source], tmp_path / "out")


@pytest.mark.parametrize("number", [float("nan"), float("-inf")])
@pytest.mark.parametrize("kind", [0, 1, 2])
def test_a_number_that_is_not_finite_is_refused_with_its_file(
    kind: int, number: float, run: Path, tmp_path: Path
) -> None:
    """Whichever of the sources it is."""
    weights = random_weights(5)
    weights["embedding"][3, 1] = number
    folder = save_model(tmp_path / "m", random_weights(5), (5,))
    forge_weights(folder, weights)
    bad = [*save_both(run, 5, weights), folder][kind]
    good = [save(run, 1), save(run, 2)]
    for order in ([bad, *good], [good[0], bad, good[1]], [*good, bad]):
        with pytest.raises(
            UserError, match="has numbers in embedding that are not finite: leave this one out"
        ) as refused:
            average(order, tmp_path / "out")
        assert str(refused.value).startswith(str(bad))
    assert not (tmp_path / "out").exists()


def test_a_step_counts_once(run: Path, tmp_path: Path) -> None:
    """The file itself, a copy, the checkpoint of the same step, a mean that holds it."""
    (first, checkpoint), second = save_both(run, 1), save(run, 2)
    copy = Path(shutil.copyfile(first, first.with_name("step-00000009.safetensors")))
    record_hash(copy)
    folder = save_model(tmp_path / "mean", random_weights(1), (1, 3))
    for again in (first, copy, checkpoint, folder):
        with pytest.raises(UserError) as refused:
            average([first, second, again], tmp_path / "out")
        assert str(refused.value) == (f"{again} and {first} are both from step 1: each step counts once, leave one out")
    assert not (tmp_path / "out").exists()


def test_another_tokenizer_in_the_run_folder_is_refused(run: Path, tmp_path: Path) -> None:
    file = save(run, 1)
    learn_byte_bpe(["a b"], vocab_size=300, lowercase=True).save(run / "tokenizer.json")
    with pytest.raises(UserError, match=r"tokenizer\.json is not the tokenizer of .*restore"):
        average([file], tmp_path / "out")
