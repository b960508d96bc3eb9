"""Conversion to Hugging Face's `MarianMTModel`.

Marian is the paper's post-norm model with one difference: its position vectors have all sines first, then all cosines;
the paper interleaves them. The order of the residual dimension is free, so the conversion permutes it.
"""

import itertools
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from dist_transformer.base.errors import UserError
from dist_transformer.config.settings import ModelConfig
from dist_transformer.data.vocabulary.m2m100 import M2M100Vocabulary
from dist_transformer.data.vocabulary.marian import MarianVocabulary
from dist_transformer.data.vocabulary.tokenizer import BOS_ID, EOS_ID, PAD_ID, Vocabulary
from dist_transformer.model.transformer import Transformer

if TYPE_CHECKING:
    from transformers import MarianMTModel

BIAS = "final_logits_bias"
_ENCODER, _DECODER = "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"
_SHARED, _OUTPUT = "model.shared.weight", "lm_head.weight"
# Marian's name of each part of a layer, and the dimension of its weight that is the residual one.
_PARTS = {
    "self_attention.qkv": ("self_attn.{}_proj", 1),
    "self_attention.output": ("self_attn.out_proj", 0),
    "self_residual.norm": ("self_attn_layer_norm", 0),
    "cross_attention.qkv": ("encoder_attn.{}_proj", 1),
    "cross_attention.output": ("encoder_attn.out_proj", 0),
    "cross_residual.norm": ("encoder_attn_layer_norm", 0),
    "feed_forward.inner": ("fc1", 1),
    "feed_forward.outer": ("fc2", 0),
    "ffn_residual.norm": ("final_layer_norm", 0),
}
_OF_A_LAYER = re.compile(r"(encoder|decoder)\.(\d+)\.(\w+\.[a-z]+)[._](weight|bias)")

Ids = tuple[Sequence[int], Sequence[int]]
"""Id in a folder of MarianMT of each entry of our vocabularies, of sources and of targets. `<s>` shares that of `<pad>`
if their decoder begins with `<pad>`."""


def ids_of(vocabulary: Vocabulary | None, config: ModelConfig) -> Ids:
    """Return the ids of a model in a folder: those of the folder that it was imported from, or else our own."""
    if is_of_marian(vocabulary, config) or isinstance(vocabulary, M2M100Vocabulary):
        return vocabulary.their_ids
    return range(config.vocab_size), range(config.output_size)


def ours_of(theirs: Sequence[int]) -> list[int]:
    """Return our id of each of theirs; one that `<s>` and `<pad>` share is that of `<pad>`."""
    found = {number: ours for ours, number in reversed([*enumerate(theirs)])}
    return [found[i] for i in range(len(found))]


def matrices_of(config: ModelConfig) -> dict[str, tuple[str, int]]:
    """Return Marian's matrices with a row per entry: our name, and the side whose entries they have."""
    if config.tie_embeddings == "all":
        return dict.fromkeys((_SHARED, _ENCODER, _DECODER, _OUTPUT), ("embedding", 1))
    output = "target_embedding" if config.tie_embeddings == "target" else "output_projection"
    return {_ENCODER: ("embedding", 0), _DECODER: ("target_embedding", 1), _OUTPUT: (output, 1)}


def is_of_marian(vocabulary: Vocabulary | None, config: ModelConfig) -> TypeGuard[MarianVocabulary]:
    """Return whether a model can have a folder with the ids of a vocabulary's own table, which has no `<s>`."""
    return isinstance(vocabulary, MarianVocabulary) and config.begin_with_pad


def marian_model(model: Transformer, vocabulary: Vocabulary | None = None) -> "MarianMTModel":
    """Build a `MarianMTModel` that computes the same function; its parameters are copies.

    Args:
        vocabulary: vocabulary that may bring ids of its own; None: the ids are ours.

    Raises:
        UserError: it does not support the configuration.
    """
    from transformers import MarianConfig, MarianMTModel

    config = model.config
    refuse_what_marian_lacks(config)
    ids = ids_of(vocabulary, config)
    entries, target = [ours_of(side) for side in ids], ids[1]
    marian = MarianMTModel(
        MarianConfig(
            vocab_size=len(entries[0]),
            decoder_vocab_size=len(entries[1]),
            **network_of(config),
            scale_embedding=True,
            share_encoder_decoder_embeddings=config.tie_embeddings == "all",
            tie_word_embeddings=config.tie_embeddings != "none",
            # Both embeddings must have it; attention does not read it.
            pad_token_id=min(side[PAD_ID] for side in ids),
            bos_token_id=target[BOS_ID],
            eos_token_id=target[EOS_ID],
            decoder_start_token_id=target[BOS_ID],
            forced_eos_token_id=None,
        )
    )
    outputs = [*entries[1]]
    if config.begin_with_pad:
        entries[1][target[BOS_ID]] = PAD_ID
    weights = weights_with(entries, outputs, model)
    # Its table of positions is a constant, which has no counterpart among our weights.
    marian.load_state_dict(marian.state_dict() | weights)
    return marian


def network_of(config: ModelConfig) -> dict[str, Any]:
    """Return the settings of a network by the names that transformers' configs of Marian and M2M100 share."""
    return {
        "d_model": config.width,
        "encoder_layers": config.encoder_layers,
        "decoder_layers": config.decoder_layers,
        "encoder_attention_heads": config.heads,
        "decoder_attention_heads": config.heads,
        "encoder_ffn_dim": config.ffn_width,
        "decoder_ffn_dim": config.ffn_width,
        "max_position_embeddings": config.max_positions,
        "activation_function": config.activation,
        "dropout": config.dropout,
        "attention_dropout": config.attention_dropout,
        "activation_dropout": config.ffn_dropout,
    }


def weights_with(
    entries: Sequence[Sequence[int]], outputs: Sequence[int], model: Transformer
) -> dict[str, torch.Tensor]:
    """Return weights by Marian's names, in Marian's order of the residual dimension.

    Args:
        entries: our id of each row of the embeddings, of sources and of targets.
        outputs: our id of each number of the output's bias.
    """
    order = residual_order(model.config.width).to(model.device)
    weights = {
        name: part if dim is None else part.index_select(dim, order)
        for name, (part, dim) in marian_parts(model).items()
    }
    if BIAS in weights:
        weights[BIAS] = weights[BIAS][:, outputs]
    for name, (_, side) in matrices_of(model.config).items():
        weights[name] = weights[name][entries[side]]
    return weights


def refuse_what_marian_lacks(config: ModelConfig) -> None:
    """Raise a UserError that names a setting that `MarianMTModel` does not support."""
    wanted = {"norm": "post", "norm_epsilon": 1e-5, "positions": "sinusoidal", "attention": "softmax"}
    refuse_others("MarianMTModel", config, wanted | {"begin_with_zeros": False})


def refuse_others(program: str, config: ModelConfig, wanted: dict[str, object]) -> None:
    """Raise a UserError that names a setting with another value than the one that a program has, or a head width."""
    for name, value in wanted.items():
        if getattr(config, name) != value:
            raise UserError(f"{program} does not support {name} = {getattr(config, name)!r}: only {value!r}")
    if config.heads * config.attention_head_width != config.width:
        raise UserError(f"{program} has no separate head width: model.head_width must be width ÷ heads")


def residual_order(width: int) -> torch.Tensor:
    """Return our place in the residual dimension of each of Marian's."""
    return torch.cat([torch.arange(0, width, 2), torch.arange(1, width, 2)])


def marian_parts(model: Transformer) -> dict[str, tuple[torch.Tensor, int | None]]:
    """Return the part of our parameters that each of Marian's weights is, as a view, by Marian's names.

    With it comes the dimension that Marian has in `residual_order`, or None.
    """
    state = model.state_dict()
    out: dict[str, tuple[torch.Tensor, int | None]] = {}
    for name, tensor in state.items():
        if match := _OF_A_LAYER.fullmatch(name):
            side, layer, part, kind = match.groups()
            theirs, dim = _PARTS[part]
            letters = "qkv" if part.endswith("qkv") else "-"
            for letter, view in zip(letters, tensor.chunk(len(letters)), strict=True):
                place = f"model.{side}.layers.{layer}.{theirs.format(letter)}.{kind}"
                # A bias has the dimension of the output.
                out[place] = view, None if kind == "bias" and dim == 1 else dim
    out |= {name: (state[ours], 1) for name, (ours, _) in matrices_of(model.config).items()}
    for side, kind in itertools.product(("encoder", "decoder"), ("weight", "bias")):
        # Models with pre-norm, such as M2M100, have these two.
        if (part := state.get(f"{side}_norm.{kind}")) is not None:
            out[f"model.{side}.layer_norm.{kind}"] = part, 0
    if "output_bias" in state:
        out[BIAS] = state["output_bias"][None], None
    return out
