"""Reading of one model folder, or of several whose models decode together."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dist_transformer.base.errors import UserError
from dist_transformer.data.vocabulary.tokenizer import Vocabulary
from dist_transformer.model_folder import ModelInfo, load_model, read_model_info

# Commands check their arguments with this module, and torch costs seconds.
if TYPE_CHECKING:
    import torch

    from dist_transformer.inference.interface import DecodingModel


def read_joint_info(
    paths: Sequence[Path], direction: str | None = None, tags: Sequence[str] | None = None
) -> ModelInfo:
    """Read config.json of a model folder, or of all folders of an ensemble, for one direction.

    Returns:
        The info of the only model. For an ensemble, the first one's, but `corpus` names the data of all models,
        `longest_source` and `several_sentences` are the least that is known, and there are no `steps`, because no
        weights are averaged.

    Raises:
        UserError: a folder has no model, lacks the direction, or differs from the first one in vocabulary or direction.
    """
    infos = [read_model_info(path).facing(direction, tags) for path in paths]
    first, *others = infos
    for path, info in zip(paths[1:], others, strict=True):
        if info.tokenizer_sha256 != first.tokenizer_sha256:
            raise UserError(
                f"{path} has another vocabulary than {paths[0]}, and the models of an ensemble must share one: use "
                "models with the same tokenizer.json"
            )
        if info.direction != first.direction:
            raise UserError(
                f"{path} translates {info.direction.name} and {paths[0]} {first.direction.name}, or their tags differ: "
                "use models of one direction, or set it with --direction and --tag"
            )
    if not others:
        return first
    return replace(
        first,
        corpus=", ".join(dict.fromkeys(info.corpus for info in infos)),
        synthetic=any(info.synthetic for info in infos),
        steps=(),
        longest_source=min((info.longest_source for info in infos if info.longest_source is not None), default=None),
        several_sentences=min(
            (info.several_sentences for info in infos if info.several_sentences is not None), default=None
        ),
    )


def load_joint(
    paths: Sequence[Path],
    device: "torch.device",
    dtype: "torch.dtype | None" = None,
    in_int8: bool = False,
    *,
    direction: str | None = None,
    tags: Sequence[str] | None = None,
) -> "tuple[DecodingModel, Vocabulary, ModelInfo]":
    """Read a model folder, or several as an ensemble, for one direction; the model is in evaluation mode.

    Raises:
        UserError: `read_joint_info` or `load_model` failed.
    """
    from dist_transformer.inference.ensemble import Ensemble

    info = read_joint_info(paths, direction, tags)
    loaded = [load_model(path, device, dtype, in_int8) for path in paths]
    models = [model for model, _, _ in loaded]
    return models[0] if len(models) == 1 else Ensemble(models).eval(), loaded[0][1], info
