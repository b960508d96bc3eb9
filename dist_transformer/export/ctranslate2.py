"""Export to CTranslate2, an inference engine: its model specification, filled from our weights."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dist_transformer.base.errors import UserError
from dist_transformer.config.settings import ModelConfig
from dist_transformer.data.vocabulary.tokenizer import BOS_ID, EOS_ID, PAD_ID, SPECIALS, UNK_ID
from dist_transformer.model.transformer import Transformer

Pieces = tuple[Sequence[str], Sequence[str]]
"""Vocabularies of sources and of targets."""

_END = SPECIALS[EOS_ID]
# Never part of an output; for <unk>, CTranslate2 has its own flag.
SUPPRESSED = [[SPECIALS[0]], [SPECIALS[BOS_ID]]]


def refuse_what_ctranslate2_lacks(config: ModelConfig) -> None:
    """Raise a UserError that names a setting that CTranslate2 does not support."""
    if config.heads * config.attention_head_width != config.width:
        raise UserError("CTranslate2 has no separate head width: model.head_width must be width ÷ heads")
    if config.attention != "softmax":
        raise UserError(f"model.attention is {config.attention}: CTranslate2 supports only softmax attention")


def save_for_ctranslate2(model: Transformer, pieces: Pieces, out: Path, *, quantization: str | None = None) -> None:
    """Fill the folder `out` with a CTranslate2 model. Its tokens are pieces; a source ends with `</s>`.

    Args:
        pieces: vocabularies of sources and targets by id.
        quantization: a `libraries.Quantization`; None: fp32.

    Raises:
        UserError: CTranslate2 does not support the configuration.
    """
    from ctranslate2.specs import TransformerSpec
    from ctranslate2.specs.common_spec import Activation

    config = model.config
    refuse_what_ctranslate2_lacks(config)
    pre_norm = config.norm == "pre"
    spec = TransformerSpec.from_config(
        (config.encoder_layers, config.decoder_layers),
        config.heads,
        pre_norm=pre_norm,
        activation={"relu": Activation.RELU, "gelu": Activation.GELU, "swish": Activation.SWISH}[config.activation],
    )
    state = {name: tensor.detach().float().cpu().numpy() for name, tensor in model.state_dict().items()}
    # Constant position vectors are not part of the state.
    positions = model.position_vectors(config.max_positions).detach().float().cpu().numpy()
    for side in ("encoder", "decoder"):
        _fill_side(getattr(spec, side), side, state, positions)
        if pre_norm:
            _norm(getattr(spec, side).layer_norm, state, f"{side}_norm")
    if config.begin_with_pad:
        name = "embedding" if config.tie_embeddings == "all" else "target_embedding"
        state[name] = state[name].copy()
        state[name][BOS_ID] = state[name][PAD_ID]
    source = state["embedding"]
    target = state.get("target_embedding", source)
    spec.encoder.embeddings[0].weight = source
    spec.decoder.embeddings.weight = target
    spec.decoder.projection.weight = state.get("output_projection", target)
    if "output_bias" in state:
        spec.decoder.projection.bias = state["output_bias"]
    spec.decoder.start_from_zero_embedding = False
    spec.register_source_vocabulary(list(pieces[0]))
    spec.register_target_vocabulary(list(pieces[1]))
    spec.config.bos_token, spec.config.eos_token, spec.config.unk_token = SPECIALS[BOS_ID], _END, SPECIALS[UNK_ID]
    spec.config.decoder_start_token = SPECIALS[BOS_ID]
    spec.config.layer_norm_epsilon = config.norm_epsilon
    # The tokenizer adds </s> already.
    spec.config.add_source_eos = False
    spec.validate()
    # This also stores a tied matrix only once.
    spec.optimize(quantization=quantization)
    out.mkdir(parents=True, exist_ok=True)
    spec.save(str(out))


def _fill_side(side: Any, name: str, state: dict[str, np.ndarray], positions: np.ndarray) -> None:
    side.scale_embeddings = True
    side.position_encodings.encodings = positions
    for i, layer in enumerate(side.layer):
        ours = f"{name}.{i}"
        qkv = (state[f"{ours}.self_attention.qkv_weight"], state[f"{ours}.self_attention.qkv_bias"])
        _linear(layer.self_attention.linear[0], *qkv)
        _output(layer.self_attention.linear[1], state, f"{ours}.self_attention")
        _norm(layer.self_attention.layer_norm, state, f"{ours}.self_residual.norm")
        if name == "decoder":
            weight, bias = (state[f"{ours}.cross_attention.qkv_{kind}"] for kind in ("weight", "bias"))
            inner = len(weight) // 3
            _linear(layer.attention.linear[0], weight[:inner], bias[:inner])
            _linear(layer.attention.linear[1], weight[inner:], bias[inner:])
            _output(layer.attention.linear[2], state, f"{ours}.cross_attention")
            _norm(layer.attention.layer_norm, state, f"{ours}.cross_residual.norm")
        for theirs, part in ((layer.ffn.linear_0, "inner"), (layer.ffn.linear_1, "outer")):
            _linear(theirs, *(state[f"{ours}.feed_forward.{part}.{kind}"] for kind in ("weight", "bias")))
        _norm(layer.ffn.layer_norm, state, f"{ours}.ffn_residual.norm")


def _linear(theirs: Any, weight: np.ndarray, bias: np.ndarray) -> None:
    theirs.weight, theirs.bias = weight, bias


def _output(theirs: Any, state: dict[str, np.ndarray], attention: str) -> None:
    _linear(theirs, state[f"{attention}.output.weight"], state[f"{attention}.output.bias"])


def _norm(theirs: Any, state: dict[str, np.ndarray], name: str) -> None:
    theirs.gamma, theirs.beta = state[f"{name}.weight"], state[f"{name}.bias"]


def translate_ids(
    translator: Any,
    pieces: Pieces,
    sources: Sequence[list[int]],
    *,
    beam_size: int,
    length_penalty: float,
    longest: int,
    patience: float = 1.0,
    tags: Sequence[str] = (),
    max_batch_tokens: int = 2048,
) -> list[list[int]]:
    """Return the best hypothesis of each source as ids without special tokens.

    Args:
        pieces: vocabularies of sources and targets by id.
        longest: most tokens per output.
        patience: the search ends when `patience` × `beam_size` hypotheses have ended.
        tags: tags of the vocabulary, which are never part of an output.
        max_batch_tokens: padded source tokens per batch.
    """
    found = translator.translate_batch(
        [[*(pieces[0][token] for token in source), _END] for source in sources],
        beam_size=beam_size,
        length_penalty=length_penalty,
        patience=patience,
        max_input_length=0,
        max_decoding_length=longest,
        # An output may be empty, as in our search.
        min_decoding_length=0,
        max_batch_size=max_batch_tokens,
        batch_type="tokens",
        disable_unk=True,
        suppress_sequences=[*SUPPRESSED, *([tag] for tag in tags)],
    )
    ids = {piece: token for token, piece in enumerate(pieces[1])}
    return [[ids[piece] for piece in result.hypotheses[0]] for result in found]
