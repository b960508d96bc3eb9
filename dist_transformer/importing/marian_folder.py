"""Reading of Hugging Face's MarianMT folders: configuration, weights and vocabulary, as ours."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from dist_transformer.base.errors import UserError
from dist_transformer.config.plain import parse_json
from dist_transformer.config.settings import ModelConfig
from dist_transformer.data.vocabulary.marian import MarianVocabulary, wrap_marian
from dist_transformer.data.vocabulary.tokenizer import BOS_ID, EOS_ID, PAD_ID
from dist_transformer.export.marian import BIAS, marian_parts, matrices_of, residual_order
from dist_transformer.model.transformer import Transformer

CONFIG_FILE = "config.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
NEVER = -100.0
"""Bias of the output `<s>`, which their models lack: its probability is below e^-70 wherever theirs matter."""

Tied = Literal["target", "none"]

_ACTIVATIONS = {"swish": "swish", "silu": "swish", "relu": "relu", "gelu": "gelu"}
_REMEDY = "use a folder of MarianMTModel that transformers wrote"


def read_vocabulary(folder: Path) -> MarianVocabulary:
    """Read the files of the vocabulary: three, or four if the targets have a table of their own.

    Raises:
        UserError: one is missing, or cannot be used.
    """
    names = {"source": "source.spm", "target": "target.spm", "table": "vocab.json"}
    if _json(folder, TOKENIZER_CONFIG_FILE).get("separate_vocabs"):
        names["target_table"] = "target_vocab.json"
    files = {name: _read(folder, file) for name, file in names.items()}
    try:
        return wrap_marian(**files)
    except ValueError as error:
        raise UserError(f"{folder} {error}: {_REMEDY}") from None


def read_languages(folder: Path) -> tuple[str | None, str | None]:
    """Read source and target language from `tokenizer_config.json`; None where it names none."""
    values = _json(folder, TOKENIZER_CONFIG_FILE)
    source, target = (values.get(name) for name in ("source_lang", "target_lang"))
    return (source if isinstance(source, str) else None, target if isinstance(target, str) else None)


def read_config(folder: Path, vocabulary: MarianVocabulary) -> ModelConfig:
    """Read `config.json` as a model of ours.

    Args:
        vocabulary: that of the folder.

    Raises:
        UserError: it is not of a MarianMT model, or of one that our model cannot express.
    """
    values = _json(folder, CONFIG_FILE)
    path = folder / CONFIG_FILE
    if values.get("model_type") != "marian":
        raise UserError(f"{path} is of a model of type {values.get('model_type')!r}, not marian: {_REMEDY}")

    def lacks(what: str) -> UserError:
        return UserError(f"{path} has {what}, which a model here cannot express")

    wanted: dict[str, Any] = {
        "scale_embedding": True,
        "static_position_embeddings": True,
        "normalize_before": False,
        "normalize_embedding": False,
        "add_final_layer_norm": False,
        "add_bias_logits": False,
    }
    for name, value in wanted.items():
        if values.get(name, value) != value:
            raise lacks(f"{name} = {values[name]!r}")
    if (activation := values.get("activation_function")) not in _ACTIVATIONS:
        raise lacks(f"the activation {activation!r}")
    if values.get("encoder_attention_heads") != values.get("decoder_attention_heads"):
        raise lacks("different numbers of heads in encoder and decoder")
    if values.get("encoder_ffn_dim") != values.get("decoder_ffn_dim"):
        raise lacks("feed-forward layers of different widths in encoder and decoder")
    shares = values.get("share_encoder_decoder_embeddings", True)
    ties: Tied = "target" if values.get("tie_word_embeddings", True) else "none"
    if shares and ties == "none":
        raise lacks("one embedding and an output apart from it")
    ends = {ids[EOS_ID] for ids in vocabulary.their_ids}
    if len(ends) > 1:
        raise lacks("two ids of </s>")
    if values.get("decoder_start_token_id") != vocabulary.their_ids[1][PAD_ID]:
        raise lacks("a decoder that does not begin with <pad>")
    if vocabulary.sizes[1] and shares:
        raise lacks("two vocabularies with one embedding")
    try:
        return ModelConfig(
            width=values["d_model"],
            encoder_layers=values["encoder_layers"],
            decoder_layers=values["decoder_layers"],
            heads=values["encoder_attention_heads"],
            ffn_width=values["encoder_ffn_dim"],
            dropout=values.get("dropout", 0.1),
            attention_dropout=values.get("attention_dropout", 0.0),
            ffn_dropout=values.get("activation_dropout", 0.0),
            activation=_ACTIVATIONS[activation],  # type: ignore[arg-type]
            max_positions=values["max_position_embeddings"],
            output_bias=True,
            begin_with_pad=True,
            tie_embeddings="all" if shares else ties,
            vocab_size=values["vocab_size"],
            target_vocab_size=values["decoder_vocab_size"] if vocabulary.sizes[1] else 0,
        )
    except (KeyError, TypeError) as error:
        raise UserError(f"{path} is not the configuration of a MarianMT model ({error}): {_REMEDY}") from None


def our_weights(theirs: dict[str, torch.Tensor], config: ModelConfig, vocabulary: MarianVocabulary) -> Transformer:
    """Make our model of the weights of a folder. `<s>` has the vector of `<pad>`, and is no output.

    Args:
        theirs: by the names of `MarianMTModel.state_dict()`.

    Raises:
        UserError: the weights do not fit the configuration.
    """
    model = of_marian(theirs, config, vocabulary.their_ids)
    assert model.output_bias is not None
    with torch.no_grad():
        model.output_bias[BOS_ID] = NEVER
    return model


def of_marian(
    theirs: dict[str, torch.Tensor], config: ModelConfig, their_ids: tuple[Sequence[int], Sequence[int]]
) -> Transformer:
    """Make our model of their weights.

    Args:
        theirs: by the names of `MarianMTModel.state_dict()`.
        their_ids: id of each entry of our vocabularies, of sources and of targets, in theirs.

    Raises:
        UserError: the weights do not fit the configuration.
    """
    model = Transformer(config).eval()
    rows = [torch.tensor(ids) for ids in their_ids]
    matrices, order = matrices_of(config), residual_order(config.width)
    for name, (part, dim) in marian_parts(model).items():
        tensor = theirs.get(name)
        if tensor is not None and name == BIAS:
            tensor = _take(tensor, rows[1], dim=1)
        elif tensor is not None and name in matrices:
            tensor = _take(tensor, rows[matrices[name][1]], dim=0)
        if tensor is None or tensor.shape != part.shape:
            raise UserError(f"the weights have no {name} that fits config.json: {_REMEDY}")
        if not tensor.isfinite().all():
            raise UserError(f"the weights have numbers in {name} that are not finite: {_REMEDY}")
        if dim is None:
            part.copy_(tensor)
        else:
            part.index_copy_(dim, order, tensor.float())
    return model


def _take(tensor: torch.Tensor, places: torch.Tensor, *, dim: int) -> torch.Tensor | None:
    """Return the entries of our vocabulary; None if the tensor is of another size."""
    fits = tensor.dim() == 2 and tensor.shape[dim] == int(places.max()) + 1
    return tensor.index_select(dim, places) if fits else None


def _read(folder: Path, name: str) -> bytes:
    try:
        return (folder / name).read_bytes()
    except OSError as error:
        raise UserError(f"{folder / name} cannot be read ({error.strerror}): {_REMEDY}") from None


def _json(folder: Path, name: str) -> dict[str, Any]:
    try:
        values = parse_json(_read(folder, name))
    except ValueError as error:
        raise UserError(f"{folder / name} cannot be read as JSON ({error}): {_REMEDY}") from None
    if not isinstance(values, dict):
        raise UserError(f"{folder / name} is not a JSON object: {_REMEDY}")
    return values
