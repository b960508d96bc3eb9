"""The mean itself: its numbers and its memory."""

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from dist_transformer.averaging import mean
from dist_transformer.averaging.mean import average
from dist_transformer.base.errors import UserError
from dist_transformer.data.vocabulary.byte_bpe import learn_byte_bpe
from dist_transformer.data.vocabulary.normalization import Normalization
from dist_transformer.model.transformer import parameter_shapes
from dist_transformer.model_folder import load_model, read_model_info
from dist_transformer.run.folder import run_identity
from dist_transformer.run.layout import step_name
from tests.averaging.conftest import (
    MODEL,
    TOKENIZER,
    Weights,
    describe,
    random_weights,
    record_hash,
    save,
    save_both,
    save_model,
)
from tests.conftest import ROOT


def assert_mean(out: Path, steps: list[int]) -> None:
    """Every number is the exact mean, rounded to fp32: sums by `math.fsum`, which does not round."""
    stored = safetensors.torch.load_file(out / "model.safetensors")
    all_weights = [random_weights(step) for step in steps]
    assert set(stored) == set(all_weights[0])
    for name, tensor in stored.items():
        columns = zip(*(weights[name].flatten().tolist() for weights in all_weights), strict=True)
        exact = np.array([math.fsum(column) / len(steps) for column in columns], dtype=np.float32)
        assert tensor.dtype == torch.float32
        assert np.array_equal(tensor.flatten().numpy(), exact), name


def test_the_mean_of_different_kinds_of_sources(mixed: list[Path], tmp_path: Path) -> None:
    info = average(mixed, tmp_path / "out")
    assert_mean(tmp_path / "out", [1, 2, 3])
    assert info == read_model_info(tmp_path / "out")
    assert info.steps == (1, 2, 3)
    assert (info.model, info.corpus, info.synthetic, info.run) == (MODEL, "hand-written", False, run_identity({}))
    model, tokenizer, _ = load_model(tmp_path / "out", torch.device("cpu"))
    assert tokenizer.sha256 == TOKENIZER.sha256
    assert model.embedding.shape[0] == TOKENIZER.vocab_size


@pytest.mark.parametrize("numbers", [1, 20, 1000])
def test_the_mean_does_not_depend_on_where_blocks_end(
    numbers: int, mixed: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows have 1 to 16 numbers, parameters 8 to 2,400."""
    monkeypatch.setattr(mean, "_BLOCK_NUMBERS", numbers)
    average(mixed, tmp_path / "out")
    assert_mean(tmp_path / "out", [1, 2, 3])


def filled(value: float) -> Weights:
    return {name: torch.full_like(weight, value) for name, weight in random_weights(1).items()}


def numbers_of(out: Path) -> set[float]:
    stored = safetensors.torch.load_file(out / "model.safetensors")
    return {number for tensor in stored.values() for number in tensor.flatten().tolist()}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        # 2^24 + 1 + 1 is 2^24 in fp32, whatever the order.
        ((2.0**24, 1.0, 1.0, -(2.0**24)), 0.5),
        # Their sum is not finite in fp32.
        ((torch.finfo(torch.float32).max,) * 2, torch.finfo(torch.float32).max),
    ],
)
def test_the_mean_is_not_that_of_sums_in_fp32(
    values: tuple[float, ...], expected: float, run: Path, tmp_path: Path
) -> None:
    average([save(run, step, filled(value)) for step, value in enumerate(values)], tmp_path / "out")
    assert numbers_of(tmp_path / "out") == {expected}


def test_the_mean_of_a_mean_counts_its_steps(run: Path, tmp_path: Path) -> None:
    """(3 · 2 + 6) / 4, not (2 + 6) / 2."""
    info = average([save_model(tmp_path / "m", filled(2.0), (1, 2, 3)), save(run, 4, filled(6.0))], tmp_path / "out")
    assert info.steps == (1, 2, 3, 4)
    assert numbers_of(tmp_path / "out") == {3.0}


def test_the_card_says_how_text_is_normalised(run: Path, tmp_path: Path) -> None:
    rules: dict[Normalization, str] = {"clean": "clean text, NFKC, lowercase", "nfc": "NFC, lowercase"}
    for normalization, rule in rules.items():
        tokenizer = learn_byte_bpe(["a b"], vocab_size=300, lowercase=True, normalization=normalization)
        average([save(run / normalization, 1, tokenizer=tokenizer)], tmp_path / rule)
        card = (tmp_path / rule / "README.md").read_text(encoding="utf-8")
        assert f"- Normalisation of text: {rule}\n" in card


@pytest.mark.parametrize("kind", [0, 1, 2])
def test_a_single_source_is_itself(kind: int, mixed: list[Path], tmp_path: Path) -> None:
    assert average([mixed[kind]], tmp_path / "out").steps == (kind + 1,)
    assert_mean(tmp_path / "out", [kind + 1])


def test_an_average_may_replace_one_of_its_sources(mixed: list[Path], tmp_path: Path) -> None:
    """In any order."""
    average(mixed[::-1], mixed[2])
    assert_mean(mixed[2], [1, 2, 3])


def test_paths_relative_to_the_run_folder(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in save_both(run, 1):
        monkeypatch.chdir(path.parent)
        average([Path(path.name)], tmp_path / path.parent.name)
        assert_mean(tmp_path / path.parent.name, [1])


def test_other_files_are_not_replaced(run: Path, tmp_path: Path) -> None:
    """And nothing is read before that is said."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match="holds files that are not of a model"):
        average([run / "nothing"], tmp_path / "out")
    assert (tmp_path / "out" / "thesis.tex").read_text() == "years of work"


# Prints the peak of this process's memory in KiB: at first, with 2 files, with 12. Not `ru_maxrss`: a process inherits
# that of the one that started it.
MEASURE = """
import sys
from pathlib import Path
from dist_transformer.averaging.mean import average
_, out, small, *files = map(Path, sys.argv)
for paths in ([small], files[:2], files):
    average(paths, out)
    print(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])
"""


def large_weight_files(run: Path, count: int) -> list[Path]:
    """Weight files of a model of 79 MB, nearly all of it one matrix; of zeros, which take no room on disk."""
    model = dataclasses.replace(MODEL, width=2**16, head_width=1, ffn_width=1, max_positions=1)
    shapes = parameter_shapes(model)
    (run / "weights").mkdir(parents=True)
    TOKENIZER.save(run / "tokenizer.json")
    files = []
    for step in range(1, count + 1):
        header: dict[str, Any] = {
            "__metadata__": {key: json.dumps(value) for key, value in describe(step, model).items()}
        }
        place = 0
        for name, shape in shapes.items():
            end = place + 4 * math.prod(shape)
            header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [place, end]}
            place = end
        encoded = json.dumps(header).encode()
        files.append(run / "weights" / f"{step_name(step)}.safetensors")
        with files[-1].open("wb") as file:
            file.write(len(encoded).to_bytes(8, "little") + encoded)
            file.truncate(8 + len(encoded) + place)
        record_hash(files[-1])
    return files


@pytest.mark.system
def test_memory_stays_below_two_models_for_any_number(run: Path, tmp_path: Path) -> None:
    """Measure the whole process: mapped files and the writing of the model are counted."""
    files = large_weight_files(run, 12)
    size = files[0].stat().st_size
    small = save(tmp_path / "small", 1)
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, tmp_path / "out", small, *files],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    first, two, twelve = (int(peak) * 1024 for peak in done.stdout.split())
    assert size > 75e6
    # The result alone is one model: less would mean that this does not measure.
    assert size <= two - first <= 2 * size
    # The heap's own ups and downs are a third of it.
    assert twelve - two <= size / 2
