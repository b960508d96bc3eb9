"""The same weights in our model and in Hugging Face's `MarianMTModel` give the same logits.

Marian is the paper's post-norm model with one difference: its sinusoids are all sines, then all cosines, where the
paper interleaves them. The order of the residual dimension is free, so ours is permuted on the way.
"""

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers import MarianConfig, MarianMTModel

from dist_transformer.config import ModelConfig
from dist_transformer.model.transformer import Transformer
from dist_transformer.packed import IGNORED, PackedBatch, PackedTokens, pack_side

PAD, BOS, EOS = 0, 2, 3
CONFIGS = {
    "base-like": ModelConfig(
        width=64, encoder_layers=2, decoder_layers=3, heads=4, ffn_width=128, vocab_size=97, max_positions=64
    ),
    "one head, deep encoder": ModelConfig(
        width=24, encoder_layers=4, decoder_layers=1, heads=1, ffn_width=40, vocab_size=31, max_positions=48
    ),
    "gelu": ModelConfig(
        width=32, encoder_layers=1, decoder_layers=1, heads=8, ffn_width=64, vocab_size=50, activation="gelu"
    ),
}


def make_ours(config: ModelConfig) -> Transformer:
    """Every parameter random, biases and norms too: a forgotten one would otherwise be the zero or one it starts at."""
    torch.manual_seed(0)
    model = Transformer(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name != "embedding":
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def marian_weights(model: Transformer) -> dict[str, torch.Tensor]:
    """Our parameters under Marian's names, residual dimension in Marian's order."""
    width = model.config.width
    order = torch.cat([torch.arange(0, width, 2), torch.arange(1, width, 2)])
    state = model.state_dict()
    out: dict[str, torch.Tensor] = {}

    def norm(theirs: str, ours: str) -> None:
        for kind in ("weight", "bias"):
            out[f"{theirs}.{kind}"] = state[f"{ours}.norm.{kind}"][order]

    def attention(theirs: str, ours: str) -> None:
        for kind in ("weight", "bias"):
            for letter, part in zip("qkv", state[f"{ours}.qkv_{kind}"].chunk(3), strict=True):
                out[f"{theirs}.{letter}_proj.{kind}"] = part[:, order] if kind == "weight" else part
            out[f"{theirs}.out_proj.{kind}"] = state[f"{ours}.output.{kind}"][order]

    def feed_forward(theirs: str, ours: str) -> None:
        out[f"{theirs}.fc1.weight"] = state[f"{ours}.feed_forward.inner.weight"][:, order]
        out[f"{theirs}.fc1.bias"] = state[f"{ours}.feed_forward.inner.bias"]
        out[f"{theirs}.fc2.weight"] = state[f"{ours}.feed_forward.outer.weight"][order]
        out[f"{theirs}.fc2.bias"] = state[f"{ours}.feed_forward.outer.bias"][order]
        norm(f"{theirs}.final_layer_norm", f"{ours}.ffn_residual")

    for side, count in (("encoder", model.config.encoder_layers), ("decoder", model.config.decoder_layers)):
        for i in range(count):
            theirs, ours = f"model.{side}.layers.{i}", f"{side}.{i}"
            attention(f"{theirs}.self_attn", f"{ours}.self_attention")
            norm(f"{theirs}.self_attn_layer_norm", f"{ours}.self_residual")
            if side == "decoder":
                attention(f"{theirs}.encoder_attn", f"{ours}.cross_attention")
                norm(f"{theirs}.encoder_attn_layer_norm", f"{ours}.cross_residual")
            feed_forward(theirs, ours)
    shared = ("model.shared", "model.encoder.embed_tokens", "model.decoder.embed_tokens", "lm_head")
    out |= {f"{name}.weight": state["embedding"][:, order] for name in shared}
    return out


def make_marian(model: Transformer) -> MarianMTModel:
    config = model.config
    marian = MarianMTModel(
        MarianConfig(
            vocab_size=config.vocab_size,
            d_model=config.width,
            encoder_layers=config.encoder_layers,
            decoder_layers=config.decoder_layers,
            encoder_attention_heads=config.heads,
            decoder_attention_heads=config.heads,
            encoder_ffn_dim=config.ffn_width,
            decoder_ffn_dim=config.ffn_width,
            max_position_embeddings=config.max_positions,
            activation_function=config.activation,
            scale_embedding=True,
            share_encoder_decoder_embeddings=True,
            tie_word_embeddings=True,
            pad_token_id=PAD,
            eos_token_id=EOS,
            decoder_start_token_id=BOS,
            forced_eos_token_id=None,
        )
    ).eval()
    weights = marian_weights(model)
    # Nothing of Marian's is left at its own value but the constants, and nothing of ours is without a place.
    left, unknown = marian.load_state_dict(weights, strict=False)
    assert sorted(left) == [
        "final_logits_bias",
        "model.decoder.embed_positions.weight",
        "model.encoder.embed_positions.weight",
    ]
    assert unknown == []
    assert not marian.final_logits_bias.any()
    ours, theirs = (sum(p.numel() for p in m.parameters() if p.requires_grad) for m in (model, marian))
    assert ours == theirs
    return marian


def padded(sentences: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(len(sentence) for sentence in sentences)
    tokens = torch.tensor([sentence + [PAD] * (longest - len(sentence)) for sentence in sentences])
    mask = torch.tensor([[1] * len(sentence) + [0] * (longest - len(sentence)) for sentence in sentences])
    return tokens, mask


def packed(sentences: list[list[int]], *, tail: int) -> PackedTokens:
    flat = np.array([token for sentence in sentences for token in sentence], dtype=np.int64)
    lengths = np.array([len(sentence) for sentence in sentences], dtype=np.int64)
    cap = int(lengths.max())
    return pack_side(
        flat, lengths, size=len(flat) + tail, offset_count=len(lengths) + tail + 1, max_length=cap
    )  # fmt: skip


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_logits_and_loss_equal_those_of_marian(config: ModelConfig) -> None:
    ours = make_ours(config)
    marian = make_marian(ours)
    rng = np.random.default_rng(0)

    def sentences(lengths: list[int]) -> list[list[int]]:
        return [rng.integers(4, config.vocab_size, length).tolist() for length in lengths]

    sources = [[*words, EOS] for words in sentences([5, 1, 30, 12, 0, 17, 6])]
    targets = sentences([7, 3, 1, 25, 4, 0, 33])
    target_in, target_out = [[BOS, *words] for words in targets], [[*words, EOS] for words in targets]

    source, target = packed(sources, tail=9), packed(target_in, tail=40)
    labels = torch.tensor([token for sentence in target_out for token in sentence])
    labels_T = torch.cat([labels, torch.full((40,), IGNORED)])
    tokens, mask = padded(sources)
    target_tokens, target_mask = padded(target_in)
    with torch.no_grad():
        hidden_TD = ours.decode(target, ours.encode(source), source)
        logits = ours.logits(hidden_TD)[: sum(map(len, target_in))]
        sums = ours(PackedBatch(source=source, target=target, labels_T=labels_T), 0.1)
        theirs = marian(
            input_ids=tokens, attention_mask=mask, decoder_input_ids=target_tokens, decoder_attention_mask=target_mask
        ).logits[target_mask.bool()]

    worst = (logits - theirs).abs().max().item()
    assert worst < 1e-5, f"the largest difference is {worst:.2e} (logits up to {theirs.abs().max().item():.1f})"
    loss = functional.cross_entropy(theirs, labels, label_smoothing=0.1, reduction="sum")
    assert sums.loss.item() == pytest.approx(loss.item(), rel=1e-6)
    assert sums.tokens.item() == len(theirs)


def test_positions_are_those_of_marian_in_another_order() -> None:
    ours = make_ours(CONFIGS["base-like"])
    table = ours.positions.table
    theirs = make_marian(ours).model.encoder.embed_positions.weight
    torch.testing.assert_close(torch.cat([table[:, 0::2], table[:, 1::2]], dim=1), theirs, rtol=0, atol=1e-7)
