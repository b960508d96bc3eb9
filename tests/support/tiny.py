"""The settings of a network that tests can afford."""

from typing import Any

from dist_transformer.config.settings import ModelConfig

TINY_FLAGS = (
    *("--preset", "tiny", "--model.width", "32", "--model.heads", "2", "--model.ffn-width", "64"),
    *("--model.encoder-layers", "1", "--model.decoder-layers", "1", "--batch.max-target-tokens", "256"),
)
"""Flags of a training that a test can afford."""


def tiny_config(**changes: Any) -> ModelConfig:
    sizes = {"width": 16, "heads": 2, "ffn_width": 32, "encoder_layers": 1, "decoder_layers": 1}
    return ModelConfig(**{**sizes, **changes})
