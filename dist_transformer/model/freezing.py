"""Parts of the model that training leaves as they are."""

import fnmatch
import re
from collections.abc import Iterable, Sequence

from dist_transformer.base.errors import UserError

PARTS = {
    "embeddings": ("embedding", "target_embedding", "output_projection", "positions.*"),
    "encoder": ("encoder.*", "encoder_norm.*"),
    "decoder": ("decoder.*", "decoder_norm.*"),
    "cross_attention": ("decoder.*.cross_attention.*",),
    "norms": ("*.norm.*", "*_norm.*"),
    "biases": ("*bias",),
}
"""Patterns of the names of parameters, by part; a tied embedding is also the output projection."""

_LAYERS = re.compile(r"(encoder|decoder)\.(\d{1,4})(?:-(\d{1,4}))?")


def frozen_names(names: Iterable[str], parts: Sequence[str]) -> frozenset[str]:
    """Return the parameters that belong to any of these parts.

    Args:
        names: all parameters of a model.
        parts: names of `PARTS`, layers such as `encoder.0` or `encoder.0-3`, or patterns such as `*.cross_attention.*`.

    Raises:
        UserError: a part has no parameter, or nothing is left to train.
    """
    names, frozen = [*names], set[str]()
    for part in parts:
        found = {name for pattern in _patterns(part) for name in fnmatch.filter(names, pattern)}
        if not found:
            raise UserError(
                f"--freeze {part} matches no part of the model: use some of {', '.join(PARTS)}, layers such as "
                f"encoder.0-3, or a pattern of parameters such as {names[-1].partition('.')[0]}*"
            )
        frozen |= found
    if frozen and len(frozen) == len(names):
        raise UserError(f"--freeze {' '.join(parts)} leaves nothing to train: freeze less")
    return frozenset(frozen)


def _patterns(part: str) -> Sequence[str]:
    if layers := _LAYERS.fullmatch(part):
        stack, first, last = layers.groups()
        return [f"{stack}.{number}.*" for number in range(int(first), int(last or first) + 1)]
    return PARTS.get(part, (part,))
