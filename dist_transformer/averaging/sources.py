"""Sources of weights to average, opened and checked: weight files of a run, checkpoints, model folders.

A whole file is verified when it is opened, and every piece again when it is read. The averaged numbers therefore have
the recorded hashes, even if files change meanwhile. Numbers are read in pieces; only the header of a file and the
states of its hash stay in memory, so that memory hardly grows with the number of sources.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from dist_transformer.base.errors import UserError
from dist_transformer.base.files import is_pickle
from dist_transformer.base.tensor_file import TensorFile, open_tensors
from dist_transformer.base.verified import Stated, read_verified
from dist_transformer.config.plain import from_plain
from dist_transformer.config.settings import ModelConfig
from dist_transformer.model_folder import TOKENIZER_FILE, WEIGHTS_FILE, ModelInfo, read_model_info, stated_weights
from dist_transformer.run.checkpoint import reader
from dist_transformer.run.checkpoint.tensors import parameter_shapes
from dist_transformer.run.layout import STATE_FILE

# Prefix of weights in a checkpoint, which also holds moments.
_CHECKPOINT_PREFIX = "weight/"
_REMEDY = "leave it out, or restore it"


@dataclass(frozen=True, slots=True)
class Piece:
    """Some rows of a parameter."""

    name: str
    first: int
    end: int
    """Index after the last row."""


@dataclass(frozen=True, slots=True)
class WeightSource:
    """One set of weights, of one training step or the mean of several."""

    path: Path
    info: ModelInfo
    tokenizer_file: Path
    files: Mapping[str, TensorFile]
    """File of each parameter, by the parameter's name."""
    prefix: str = ""
    """Prefix of parameter names in the files, which selects one of several sets of weights."""

    def read(self, pieces: Sequence[Piece]) -> Iterator[torch.Tensor]:
        """Read the numbers of each piece.

        Raises:
            UserError: a file has changed since it was opened.
        """
        for piece in pieces:
            yield self.files[piece.name].rows(self.prefix + piece.name, piece.first, piece.end)


def open_weights(path: Path) -> WeightSource:
    """Open a weight file, a checkpoint or a model folder.

    Raises:
        UserError: it is none of these, its recorded hash is missing or differs, or its tensors are not the parameters
            of its model in fp32.
    """
    source = _open(path)
    _check_tensors(source)
    return source


def weight_file_metadata(file: Path) -> dict[str, Any]:
    """Read the metadata of a weight file of a run, without verifying the file.

    Raises:
        UserError: it is not a weight file of a run, or cannot be read.
    """
    try:
        return _described(open_tensors(file).metadata(), file)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file} cannot be read ({error}): {_REMEDY}") from None


def check_together(sources: Sequence[WeightSource]) -> None:
    """Raise a UserError that names the first source that cannot be averaged with the others, and why."""
    first, seen = sources[0], dict[int, Path]()
    for source in sources:
        if not source.info.steps:
            raise UserError(f"{source.path} has no training step: {_REMEDY}")
        if source.path.resolve() in {path.resolve() for path in seen.values()}:
            raise UserError(f"{source.path} is listed twice: name each source once")
        for step in source.info.steps:
            if step in seen:
                raise UserError(
                    f"{source.path} and {seen[step]} are both from step {step}: each step counts once, leave one out"
                )
        seen.update(dict.fromkeys(source.info.steps, source.path))
        if difference := _difference(first.info, source.info):
            raise UserError(f"{source.path} {difference} {first.path}: average one run's weights")


def _difference(first: ModelInfo, other: ModelInfo) -> str | None:
    """Describe why weights are not from one run, as a phrase that the first one's name completes."""
    if other.tokenizer_sha256 != first.tokenizer_sha256:
        return "was trained with another tokenizer than"
    for name in (field.name for field in dataclasses.fields(ModelConfig)):
        before, now = getattr(first.model, name), getattr(other.model, name)
        if now != before:
            return f"has another model configuration ({name} {now!r}, not {before!r}) than"
    directions = [", ".join(map(str, info.all_directions)) for info in (first, other)]
    if directions[0] != directions[1]:
        return f"was trained on other data ({directions[1]}, not {directions[0]}) than"
    for name in ("corpus", "synthetic"):
        before, now = getattr(first, name), getattr(other, name)
        if now != before:
            return f"was trained on other data ({name} {now!r}, not {before!r}) than"
    # Neurons of two seeds do not correspond to each other, so the mean of their weights is useless.
    if None not in (other.run, first.run) and other.run != first.run:
        return "is from another run (seed, batch or data) than"
    return None


def _open(path: Path) -> WeightSource:
    if path.is_file():
        if is_pickle(path):
            raise UserError(
                f"{path} is a pickle, which can run any code when it is loaded, so it is not read: use .safetensors "
                "files"
            )
        file = TensorFile.on_disk(path, reader.stated_weights(path))
        info = _model_info(_described(file.metadata, path), path)
        return WeightSource(path, info, path.absolute().parents[1] / TOKENIZER_FILE, _names(file))
    if (path / STATE_FILE).exists():
        stated = reader.stated_files(path)
        state = _read_state(path / STATE_FILE, stated[path / STATE_FILE])
        files: dict[str, TensorFile] = {}
        for part in sorted(file for file in stated if file.suffix == ".safetensors"):
            files.update(_names(TensorFile.on_disk(part, stated[part]), _CHECKPOINT_PREFIX))
        info = _model_info(state, path)
        return WeightSource(path, info, path.absolute().parents[1] / TOKENIZER_FILE, files, _CHECKPOINT_PREFIX)
    if (path / WEIGHTS_FILE).exists():
        info = read_model_info(path)
        file = TensorFile.on_disk(path / WEIGHTS_FILE, stated_weights(path))
        return WeightSource(path, info, path / TOKENIZER_FILE, _names(file))
    raise UserError(f"{path} is not a weight file, a checkpoint or a model folder: check the path")


def _read_state(file: Path, stated: Stated) -> dict[str, Any]:
    try:
        state = json.loads(read_verified(file, stated))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} cannot be read as JSON ({error}): {stated.remedy}") from None
    if not isinstance(state, dict):
        raise UserError(f"{file} must hold a JSON object, not {type(state).__name__}: {stated.remedy}")
    return state


def _check_tensors(source: WeightSource) -> None:
    expected = parameter_shapes(source.info.model)
    for name in sorted(expected.keys() | source.files.keys()):
        if name not in source.files:
            raise UserError(f"{source.path} lacks {name!r}, a parameter of its model: {_REMEDY}")
        if name not in expected:
            raise UserError(f"{source.path} holds {name!r}, which is not a parameter of its model: {_REMEDY}")
        file = source.files[name]
        shape, dtype = file.shape(source.prefix + name), file.dtype(source.prefix + name)
        if shape != expected[name]:
            raise UserError(
                f"{source.path} holds {name!r} in the shape {shape}, but its model has {expected[name]}: {_REMEDY}"
            )
        if dtype != "F32":
            raise UserError(f"{source.path} stores {name!r} as {dtype}, but weights must be F32: {_REMEDY}")


def _described(metadata: Mapping[str, str] | None, path: Path) -> dict[str, Any]:
    """Parse the metadata of a weight file: JSON values in the header."""
    header = {key: value for key, value in (metadata or {}).items() if key != "format"}
    try:
        described = {key: json.loads(value) for key, value in header.items()}
    except (ValueError, RecursionError):
        described = {}
    if "model" not in described:
        raise UserError(f"{path} is not a weight file of a run: use files of RUN/weights, checkpoints or model folders")
    return described


def _model_info(described: dict[str, Any], path: Path) -> ModelInfo:
    names = ("model", "tokenizer_sha256", "source_language", "target_language", "corpus", "synthetic")
    try:
        values = {**{name: described[name] for name in names}, "steps": [described["step"]]}
    except KeyError as missing:
        raise UserError(f"{path} has no {missing}: it was not written by this program, leave it out") from None
    newer: dict[str, Any] = {
        name: described[name]
        for name in ("directions", "marks", "longest_source", "several_sentences", "run")
        if name in described
    }
    return from_plain(ModelInfo, {**values, **newer}, str(path))


def _names(file: TensorFile, prefix: str = "") -> dict[str, TensorFile]:
    return {name.removeprefix(prefix): file for name in file.names() if name.startswith(prefix)}
