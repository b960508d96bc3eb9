"""Reading of Hugging Face's MarianMT folders: configuration, weights and vocabulary, as ours."""

from pathlib import Path
from typing import Any

import torch

from dist_transformer.base.errors import UserError
from dist_transformer.config.plain import read_json
from dist_transformer.config.settings import ModelConfig
from dist_transformer.data.vocabulary.m2m100 import M2M100Vocabulary
from dist_transformer.data.vocabulary.marian import MarianVocabulary, wrap_marian
from dist_transformer.data.vocabulary.tokenizer import BOS_ID, EOS_ID, PAD_ID
from dist_transformer.export.marian import BIAS, Ids, marian_parts, matrices_of, residual_order
from dist_transformer.export.tokenizer_files import TOKENIZER_CONFIG_FILE
from dist_transformer.model.transformer import Transformer
from dist_transformer.model_folder import CONFIG_FILE

Imported = MarianVocabulary | M2M100Vocabulary
NEVER = -100.0
"""Bias of the output `<s>`, which their models lack: its probability is below e^-70 wherever theirs matter."""

ACTIVATIONS: dict[Any, Any] = {"swish": "swish", "silu": "swish", "relu": "relu", "gelu": "gelu"}
_REMEDY = "use a folder of MarianMTModel that transformers wrote"
# Settings that every folder has, besides those with defaults.
_SIZES = (
    *("vocab_size", "d_model", "encoder_layers", "decoder_layers", "encoder_attention_heads"),
    *("decoder_attention_heads", "encoder_ffn_dim", "decoder_ffn_dim", "max_position_embeddings"),
)
# Values that our model has; folders without the setting have them, too.
_EXPRESSED = {
    "scale_embedding": True,
    "static_position_embeddings": True,
    "normalize_before": False,
    "normalize_embedding": False,
    "add_final_layer_norm": False,
    "add_bias_logits": False,
}


def read_vocabulary(folder: Path) -> MarianVocabulary:
    """Read the files of the vocabulary: three, or four if the targets have a table of their own.

    Raises:
        UserError: one is missing, or cannot be used.
    """
    names = {"source": "source.spm", "target": "target.spm", "table": "vocab.json"}
    if read_tokenizer_config(folder).get("separate_vocabs"):
        names["target_table"] = "target_vocab.json"
    files = {name: read_bytes(folder / file, _REMEDY) for name, file in names.items()}
    try:
        return wrap_marian(**files)
    except ValueError as error:
        raise UserError(f"{folder} {error}: {_REMEDY}") from None


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """Read `tokenizer_config.json`; without one, transformers has its defaults."""
    path = folder / TOKENIZER_CONFIG_FILE
    return read_json(path, remedy=_REMEDY) if path.exists() else {}


def read_settings(folder: Path) -> dict[str, Any]:
    """Read `config.json`.

    Raises:
        UserError: it is not of a MarianMT model.
    """
    path = folder / CONFIG_FILE
    values = read_json(path, remedy=_REMEDY)
    if "format_version" in values:
        raise UserError(f"{folder} is a model folder already: it needs no import")
    if values.get("model_type") != "marian":
        raise UserError(f"{path} is of a model of type {values.get('model_type')!r}, not marian: {_REMEDY}")
    return values


def read_config(path: Path, values: dict[str, Any], vocabulary: MarianVocabulary) -> ModelConfig:
    """Read settings of MarianMT as a model of ours.

    Args:
        path: file of the settings.
        vocabulary: that of the folder.

    Raises:
        UserError: our model cannot express theirs.
    """
    shares, is_tied = values.get("share_encoder_decoder_embeddings", True), values.get("tie_word_embeddings", True)
    begin, end = vocabulary.their_ids[1][PAD_ID], {ids[EOS_ID] for ids in vocabulary.their_ids}
    lacks = {f"{name} = {values.get(name)!r}": values.get(name, value) != value for name, value in _EXPRESSED.items()}
    lacks |= {
        "one embedding and an output apart from it": shares and not is_tied,
        "two ids of </s>": len(end) > 1,
        "a decoder that does not begin with <pad>": values.get("decoder_start_token_id") != begin,
        "two vocabularies with one embedding": shares and vocabulary.sizes[1] > 0,
    }
    return read_network(
        path,
        values,
        lacks,
        output_bias=True,
        begin_with_pad=True,
        tie_embeddings="all" if shares else "target" if is_tied else "none",
        vocab_size=values.get("vocab_size"),
        target_vocab_size=values.get("decoder_vocab_size") or values.get("vocab_size") if vocabulary.sizes[1] else 0,
    )


def read_network(path: Path, values: dict[str, Any], lacks: dict[str, bool], **others: Any) -> ModelConfig:
    """Read the settings that MarianMT and M2M100 have alike.

    Args:
        lacks: what our model has not, by its name, and whether theirs has it.
        others: other settings of our model.

    Raises:
        UserError: our model cannot express theirs.
    """
    if missing := [name for name in _SIZES if values.get(name) is None]:
        raise UserError(f"{path} lacks {', '.join(missing)}: use the whole folder of a model, as it was published")
    activation = values.get("activation_function")
    heads, ffn_width = values["encoder_attention_heads"], values["encoder_ffn_dim"]
    shared = {
        f"the activation {activation!r}": activation not in ACTIVATIONS,
        "different numbers of heads in encoder and decoder": heads != values["decoder_attention_heads"],
        "feed-forward layers of different widths in encoder and decoder": ffn_width != values["decoder_ffn_dim"],
    }
    refuse_lacks(path, shared | lacks)
    return ModelConfig(
        width=values["d_model"],
        encoder_layers=values["encoder_layers"],
        decoder_layers=values["decoder_layers"],
        heads=heads,
        ffn_width=ffn_width,
        dropout=values.get("dropout", 0.1),
        attention_dropout=values.get("attention_dropout", 0.0),
        ffn_dropout=values.get("activation_dropout", 0.0),
        activation=ACTIVATIONS[activation],
        max_positions=values["max_position_embeddings"],
        **others,
    )


def refuse_lacks(path: Path, lacks: dict[str, bool]) -> None:
    """Raise a UserError if a file has one of these properties, which models here lack.

    Args:
        lacks: whether the file has each of them.
    """
    if found := next((what for what, is_so in lacks.items() if is_so), None):
        raise UserError(f"{path} has {found}, which a model here cannot express")


def our_weights(theirs: dict[str, torch.Tensor], config: ModelConfig, vocabulary: Imported) -> Transformer:
    """Make our model of the weights of a folder. For MarianMT, `<s>` has the vector of `<pad>`, and is no output.

    Args:
        theirs: by the names of `MarianMTModel.state_dict()`.

    Raises:
        UserError: a weight is not finite.
    """
    model = of_marian(theirs, config, vocabulary.their_ids)
    if model.output_bias is not None:
        model.state_dict()["output_bias"][BOS_ID] = NEVER
    return model


def of_marian(theirs: dict[str, torch.Tensor], config: ModelConfig, their_ids: Ids) -> Transformer:
    """Make our model of their weights.

    Args:
        theirs: by the names of `MarianMTModel.state_dict()`; they fit the configuration.

    Raises:
        UserError: a weight is not finite.
    """
    model = Transformer(config).eval()
    matrices, order = matrices_of(config), residual_order(config.width)
    for name, (part, dim) in marian_parts(model).items():
        tensor = theirs[name].to(part.device, part.dtype)
        if not tensor.isfinite().all():
            raise UserError(f"the weights have numbers in {name} that are not finite: {_REMEDY}")
        if name == BIAS:
            tensor = tensor[:, [*their_ids[1]]]
        elif name in matrices:
            tensor = tensor[[*their_ids[matrices[name][1]]]]
        if dim is None:
            part.copy_(tensor)
        else:
            part.index_copy_(dim, order, tensor)
    return model


def read_bytes(file: Path, remedy: str) -> bytes:
    """Read a file; a UserError names it and the remedy."""
    try:
        return file.read_bytes()
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}): {remedy}") from None
