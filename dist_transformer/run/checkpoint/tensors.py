"""The parameters of a model, and their comparison between a weight file and a checkpoint."""

from collections.abc import Mapping
from pathlib import Path

from dist_transformer.base.tensor_file import open_tensors
from dist_transformer.config.settings import ModelConfig
from dist_transformer.model.transformer import shapes_only
from dist_transformer.run.checkpoint.reader import CheckpointReader

Shapes = Mapping[str, tuple[int, ...]]


def parameter_shapes(model: ModelConfig) -> Shapes:
    """Return names and shapes of the parameters without allocating them."""
    return {name: tuple(parameter.shape) for name, parameter in shapes_only(model).named_parameters()}


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
