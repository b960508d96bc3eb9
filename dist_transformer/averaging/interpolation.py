"""Interpolation of two models or more (Wortsman et al. 2022): a tuned model and the one that it began with.

The weights of a model that was trained further, mixed with those of the model before, lose less of what that could do.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from dist_transformer.averaging.mean import weighted_mean
from dist_transformer.averaging.sources import WeightSource, open_weights
from dist_transformer.base.errors import UserError
from dist_transformer.config.settings import NOT_OF_WEIGHTS, ModelConfig
from dist_transformer.model_folder import ModelInfo, refuse_other_content, with_share, write_model_folder


def interpolate(paths: Sequence[Path], out: Path) -> ModelInfo:
    """Write the mean of weights with shares, `BASE:0.5 TUNED:0.5`, to the model folder `out`.

    Raises:
        UserError: the models differ in more than weights, or a path cannot be read. Nothing is left on disk.
    """
    refuse_other_content(out)
    named = [with_share(path) for path in paths]
    sources = [open_weights(path) for path, _ in named]
    for source in sources[1:]:
        _require_alike(sources[0], source)
    total = sum(share for _, share in named)
    shares = [share / total for _, share in named]
    infos = [source.info for source in sources]
    info = dataclasses.replace(
        infos[0],
        steps=tuple(sorted({step for each in infos for step in each.steps})),
        run=None,
        corpus=", ".join(dict.fromkeys(each.corpus for each in infos)),
        synthetic=any(each.synthetic for each in infos),
    )
    mixed = ", ".join(f"{share:.3g} of {source.path}" for share, source in zip(shares, sources, strict=True))
    write_model_folder(
        out,
        info=info,
        weights=weighted_mean(sources, shares),
        tokenizer_json=sources[0].tokenizer_file.read_bytes(),
        notes=[f"Interpolated: {mixed}"],
    )
    return info


def _require_alike(first: WeightSource, other: WeightSource) -> None:
    """Raise a UserError unless the weights of two models correspond to each other."""
    names = {field.name for field in dataclasses.fields(ModelConfig)} - NOT_OF_WEIGHTS
    differs = [name for name in sorted(names) if getattr(first.info.model, name) != getattr(other.info.model, name)]
    if first.info.tokenizer_sha256 != other.info.tokenizer_sha256:
        differs = ["vocabulary"]
    elif first.info.all_directions != other.info.all_directions:
        differs.append("direction")
    if differs:
        raise UserError(
            f"{other.path} has another {differs[0]} than {first.path}: interpolate a model and what was trained from "
            "it by --init-from"
        )
