"""Check that safetensors files of a run hold the model's parameters, each once, in fp32."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError

from dist_transformer.base.tensor_file import open_tensors
from dist_transformer.config.settings import ModelConfig
from dist_transformer.model.transformer import Transformer
from dist_transformer.run.checkpoint.reader import CheckpointReader
from dist_transformer.run.checkpoint.state import EMA, MOMENTS

Shapes = Mapping[str, tuple[int, ...]]


def parameter_shapes(model: ModelConfig) -> Shapes:
    """Return names and shapes of the parameters without allocating them."""
    with torch.device("meta"):
        return {name: tuple(parameter.shape) for name, parameter in Transformer(model).named_parameters()}


def checkpoint_shapes(parameters: Shapes, *, averaged: bool) -> Shapes:
    """Return the tensors of a checkpoint: weight and both moments of each parameter, and the average if one is kept."""
    parts = ("weight", *MOMENTS, *([EMA] if averaged else []))
    return {f"{part}/{name}": shape for part in parts for name, shape in parameters.items()}


def tensors_problem(files: Sequence[Path], expected: Shapes) -> str | None:
    """Describe what is wrong with the headers of the tensors that the files hold together; None if nothing is."""
    place: dict[str, Path] = {}
    for file in files:
        try:
            with open_tensors(file) as stored:
                for name in stored.keys():  # noqa: SIM118
                    if name in place:
                        return f"{file} holds tensor {name!r:.60}, and so does {place[name]}"
                    place[name] = file
                    header = stored.get_slice(name)
                    problem = _header_problem(tuple(header.get_shape()), header.get_dtype(), expected.get(name))
                    if problem:
                        return f"{file}: tensor {name!r:.60} {problem}"
        except (SafetensorError, OSError, RuntimeError) as error:
            return f"{file} cannot be read as safetensors ({error})"
    if missing := sorted(expected.keys() - place.keys()):
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        return f"tensor {missing[0]!r}{more} is in none of the files of {files[0].parent}"
    return None


def differing_weight(file: Path, checkpoint: CheckpointReader, *, part: str) -> str | None:
    """Return the first parameter whose values in a weight file differ from the checkpoint of the same step.

    Args:
        part: `weight`, or `ema` for a file of averaged weights.
    """
    with open_tensors(file) as stored:
        for name in checkpoint.parameter_names():
            if not stored.get_tensor(name).equal(checkpoint.tensor(part, name)):
                return name
    return None


def _header_problem(shape: tuple[int, ...], dtype: str, expected: tuple[int, ...] | None) -> str | None:
    if expected is None:
        return "is not a parameter of its model"
    if shape != expected:
        return f"has shape {shape}, but its model has {expected}"
    return None if dtype == "F32" else f"is {dtype}, not F32"
