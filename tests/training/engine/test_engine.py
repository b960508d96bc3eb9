"""Parts of the engine that need no DeepSpeed."""

import dataclasses

import torch

from dist_transformer.config.presets import PRESETS
from dist_transformer.model.transformer import Transformer
from dist_transformer.training.engine.engine import _parameter_groups


def test_weight_decay_is_for_matrices_only() -> None:
    with torch.device("meta"):
        model = Transformer(dataclasses.replace(PRESETS["tiny"].model, vocab_size=100))
    decayed, others = _parameter_groups(model, 0.1)
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert {p.dim() for p in decayed["params"]} == {2}
    assert {p.dim() for p in others["params"]} == {1}
    assert len(decayed["params"]) + len(others["params"]) == len(list(model.parameters()))
    (every,) = _parameter_groups(model, 0.0)
    assert len(every["params"]) == len(list(model.parameters()))
