"""A run that begins with the weights of a model folder: fine-tuning, or another try from there."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import torch

from dist_transformer.config.settings import ModelConfig
from dist_transformer.errors import UserError
from dist_transformer.files import sha256_of
from dist_transformer.model_folder import TOKENIZER_FILE, WEIGHTS_FILE, ModelInfo, load_model, read_model_info

# What a run may set anew: rates of dropout, and how weights are drawn, which these are not.
_FREE = {"dropout", "attention_dropout", "ffn_dropout", "embedding_init"}


@dataclass(frozen=True, kw_only=True, slots=True)
class InitialWeights:
    """What a run begins with."""

    sha256: str
    """Of the weight file."""
    tensors: dict[str, torch.Tensor]
    """fp32, on the host, by the names of `Transformer.named_parameters()`."""

    def parameter_names(self) -> list[str]:
        return list(self.tensors)

    def weight(self, name: str) -> torch.Tensor:
        return self.tensors[name]


def read_initial_weights(source: Path, model: ModelConfig, *, tokenizer_sha256: str) -> InitialWeights:
    """Read the weights of the model folder `source` for a run of this model and tokenizer.

    Raises:
        UserError: it is no model folder, it is damaged, or it is of another tokenizer or of another network.
    """
    if not (source / WEIGHTS_FILE).is_file():
        raise UserError(
            f"--init-from {source} is not a model folder (it has no {WEIGHTS_FILE}): make one of weight files or "
            "checkpoints with dist-transformer average, or check the path"
        )
    info = read_model_info(source)
    _require_fit(source, info, model, tokenizer_sha256)
    loaded, *_ = load_model(source, torch.device("cpu"))
    tensors = {name: parameter.detach() for name, parameter in loaded.named_parameters()}
    return InitialWeights(sha256=sha256_of(source / WEIGHTS_FILE), tensors=tensors)


def _require_fit(source: Path, info: ModelInfo, model: ModelConfig, tokenizer_sha256: str) -> None:
    if info.tokenizer_sha256 != tokenizer_sha256:
        raise UserError(
            f"--init-from {source} was trained with another vocabulary than that of --data: prepare the data anew with "
            f"dist-transformer prepare --tokenizer {source / TOKENIZER_FILE}, or leave --init-from out"
        )
    free = _FREE | ({"max_positions"} if model.positions == "sinusoidal" else set())
    names = [field.name for field in dataclasses.fields(model) if field.name not in free]
    differing = [
        f"model.{name} = {getattr(info.model, name)!r}, not {getattr(model, name)!r}"
        for name in names
        if getattr(info.model, name) != getattr(model, name)
    ]
    if differing:
        raise UserError(
            f"--init-from {source} has {'; '.join(differing)}: give this run the values of the model, or leave "
            "--init-from out"
        )
