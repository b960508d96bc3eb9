"""Sources of weights to average, opened and checked: weight files of a run, checkpoints, model folders.

A whole file is verified when it is opened. Its numbers are read by rows, so that memory hardly grows with the number
of sources.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from dist_transformer.base.errors import UserError
from dist_transformer.base.tensor_file import open_tensors
from dist_transformer.config.plain import from_plain, read_json
from dist_transformer.model_folder import TOKENIZER_FILE, WEIGHTS_FILE, ModelInfo, read_model_info, stated_weights
from dist_transformer.run.checkpoint import reader
from dist_transformer.run.layout import STATE_FILE

# Prefix of weights in a checkpoint, which also holds moments.
_CHECKPOINT_PREFIX = "weight/"
_REMEDY = "leave it out, or restore it"


@dataclass(frozen=True, slots=True)
class WeightSource:
    """One set of weights, of one training step or the mean of several."""

    path: Path
    info: ModelInfo
    tokenizer_file: Path
    files: Mapping[str, Path]
    """File of each tensor, by the tensor's name."""
    prefix: str = ""
    """Prefix of parameter names in the files, which selects one of several sets of weights."""

    def read(self, name: str, rows: slice) -> torch.Tensor:
        """Read some rows of a parameter."""
        name = self.prefix + name
        # Opened each time: the pages of a mapped file count as memory of the process until it is closed.
        with open_tensors(self.files[name]) as stored:
            return stored.get_slice(name)[rows]


def open_weights(path: Path) -> WeightSource:
    """Open a weight file, a checkpoint or a model folder.

    Raises:
        UserError: it is none of these, or its recorded hash is missing or differs.
    """
    tokenizer = path.absolute().parent.parent / TOKENIZER_FILE
    if path.is_file():
        reader.stated_weights(path).check(path)
        return WeightSource(path, _model_info(weight_file_metadata(path), path), tokenizer, _files_of(path))
    if (path / STATE_FILE).exists():
        if problem := reader.checkpoint_problem(path):
            raise UserError(f"{problem}: choose another checkpoint")
        info = _model_info(read_json(path / STATE_FILE), path)
        files = _files_of(*path.glob("part-*.safetensors"))
        return WeightSource(path, info, tokenizer, files, _CHECKPOINT_PREFIX)
    if (path / WEIGHTS_FILE).exists():
        info = read_model_info(path)
        stated_weights(path).check(path / WEIGHTS_FILE)
        return WeightSource(path, info, path / TOKENIZER_FILE, _files_of(path / WEIGHTS_FILE))
    raise UserError(f"{path} is not a weight file, a checkpoint or a model folder: check the path")


def weight_file_metadata(file: Path) -> dict[str, Any]:
    """Read the metadata of a weight file of a run, without verifying the file.

    Raises:
        UserError: it is not a weight file of a run, or cannot be read.
    """
    try:
        header = open_tensors(file).metadata() or {}
        described = {key: json.loads(value) for key, value in header.items() if key != "format"}
    except ValueError:
        described = {}
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file} cannot be read ({error}): {_REMEDY}") from None
    if "model" not in described:
        raise UserError(f"{file} is not a weight file of a run: use files of RUN/weights, checkpoints or model folders")
    return described


def check_together(sources: Sequence[WeightSource]) -> None:
    """Raise a UserError that names the first source that cannot be averaged with the others, and why."""
    first, seen = sources[0], dict[int, Path]()
    for source in sources:
        if not source.info.steps:
            raise UserError(f"{source.path} has no training step: {_REMEDY}")
        for step in source.info.steps:
            if step in seen:
                raise UserError(
                    f"{source.path} and {seen[step]} are both from step {step}: each step counts once, leave one out"
                )
        seen.update(dict.fromkeys(source.info.steps, source.path))
        # Neurons of two seeds do not correspond to each other, so the mean of their weights is useless.
        if source.info.run != first.info.run:
            raise UserError(
                f"{source.path} is from another run (model, data, seed or batch) than {first.path}: average one run's "
                "weights"
            )


def _model_info(described: dict[str, Any], path: Path) -> ModelInfo:
    names = {field.name for field in dataclasses.fields(ModelInfo)}
    values = {name: value for name, value in described.items() if name in names}
    return from_plain(ModelInfo, {**values, "steps": [described.get("step")]}, str(path))


def _files_of(*paths: Path) -> dict[str, Path]:
    files: dict[str, Path] = {}
    for path in paths:
        with open_tensors(path) as stored:
            files |= dict.fromkeys(stored.keys(), path)
    return files
