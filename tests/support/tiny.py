"""The settings of a network that tests can afford."""

from typing import Any

from dist_transformer.config.settings import ModelConfig


def tiny_config(**changes: Any) -> ModelConfig:
    sizes = {"width": 16, "heads": 2, "ffn_width": 32, "encoder_layers": 1, "decoder_layers": 1}
    return ModelConfig(**{**sizes, **changes})
