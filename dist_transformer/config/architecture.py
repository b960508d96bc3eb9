"""The architecture of a run that starts with the weights of a model folder: it is that of the folder."""

import dataclasses
from pathlib import Path

from dist_transformer.base.errors import UserError
from dist_transformer.config.plain import from_plain, read_json
from dist_transformer.config.settings import ModelConfig

NOT_OF_WEIGHTS = frozenset({"dropout", "attention_dropout", "ffn_dropout", "embedding_init"})
"""Settings of the network that such a run chooses itself, because loaded weights do not depend on them."""
OF_VOCABULARIES = frozenset({"vocab_size", "target_vocab_size"})
"""Settings of the network that the data's vocabularies decide."""

_CONFIG_FILE = "config.json"


def with_architecture(
    variant: ModelConfig, *, preset: ModelConfig, init_from: Path, run_dir: Path | None
) -> ModelConfig:
    """Return the network of a preset and a variant with the architecture that `init_from` gives the run.

    A run that exists has it in its own folder, so it resumes even if the model is gone. A path that is no model folder
    changes nothing: reading the weights reports that.

    Args:
        variant: the preset's network with a variant. What that changes stays, so that a contradiction is refused.

    Raises:
        UserError: a file has a wrong value; the message names it.
    """
    for folder in (run_dir or init_from, init_from):
        file = folder / _CONFIG_FILE
        try:
            values = read_json(file).get("model")
        except UserError:
            continue
        if isinstance(values, dict):
            model = from_plain(ModelConfig, values, str(file))
            names = {field.name for field in dataclasses.fields(model)} - NOT_OF_WEIGHTS - OF_VOCABULARIES
            same = [name for name in names if getattr(variant, name) == getattr(preset, name)]
            return dataclasses.replace(variant, **{name: getattr(model, name) for name in same})
    return variant
