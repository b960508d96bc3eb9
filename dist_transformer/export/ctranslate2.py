"""The same model for CTranslate2, an inference engine: its specification filled from our weights."""

from pathlib import Path
from typing import Any

import numpy as np

from dist_transformer.data.tokenizer import BOS_ID, EOS_ID, PAD_ID, UNK_ID
from dist_transformer.errors import UserError
from dist_transformer.model.transformer import Transformer


def word(token_id: int) -> str:
    """The name of an id in CTranslate2's vocabulary; we exchange ids, not text."""
    special = {PAD_ID: "<pad>", UNK_ID: "<unk>", BOS_ID: "<s>", EOS_ID: "</s>"}
    return special.get(token_id, str(token_id))


def save_for_ctranslate2(model: Transformer, out: Path) -> None:
    """Write a CTranslate2 model folder whose tokens are `word(id)`.

    Raises:
        UserError: the configuration is not one that is translated here.
    """
    from ctranslate2.specs import TransformerSpec
    from ctranslate2.specs.common_spec import Activation

    config = model.config
    if config.heads * config.attention_head_width != config.width:
        raise UserError("CTranslate2 has no head width of its own: model.head_width must be width ÷ heads")
    if config.norm != "post":
        raise UserError(f"model.norm is {config.norm}: only post-norm models are written for CTranslate2")
    if config.attention != "softmax":
        raise UserError(f"model.attention is {config.attention}: only softmax attention is written for CTranslate2")
    spec = TransformerSpec.from_config(
        (config.encoder_layers, config.decoder_layers),
        config.heads,
        pre_norm=False,
        activation=Activation.RELU if config.activation == "relu" else Activation.GELU,
    )
    state = {name: tensor.detach().float().cpu().numpy() for name, tensor in model.state_dict().items()}
    # Constant vectors are not part of the state.
    positions = model.position_vectors(config.max_positions).detach().float().cpu().numpy()
    for side in ("encoder", "decoder"):
        _fill_side(getattr(spec, side), side, state, positions)
    source = state["embedding"]
    spec.encoder.embeddings[0].weight = source
    spec.decoder.embeddings.weight = state.get("target_embedding", source)
    spec.decoder.projection.weight = state.get("output_projection", source)
    spec.decoder.start_from_zero_embedding = False
    vocabulary = [word(i) for i in range(config.vocab_size)]
    spec.register_source_vocabulary(vocabulary)
    spec.register_target_vocabulary(vocabulary)
    spec.config.bos_token, spec.config.eos_token, spec.config.unk_token = word(BOS_ID), word(EOS_ID), word(UNK_ID)
    spec.config.decoder_start_token = word(BOS_ID)
    spec.config.add_source_eos = True
    spec.validate()
    out.mkdir(parents=True)
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
    translator: Any, sources: list[list[int]], *, beam_size: int, length_penalty: float, max_extra_tokens: int
) -> list[list[int]]:
    """The best hypothesis of each source, ids without special tokens."""
    found = translator.translate_batch(
        [[word(token) for token in source] for source in sources],
        beam_size=beam_size,
        length_penalty=length_penalty,
        max_decoding_length=max(map(len, sources)) + max_extra_tokens,
        max_batch_size=2048,
        batch_type="tokens",
        disable_unk=True,
    )
    return [[int(token) for token in result.hypotheses[0] if token.isdigit()] for result in found]
