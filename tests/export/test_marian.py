"""The same weights in our model and in Hugging Face's `MarianMTModel` give the same logits."""

import numpy as np
import pytest
import torch
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers import MarianMTModel

from dist_transformer.config.settings import ModelConfig
from dist_transformer.data.vocabulary.tokenizer import BOS_ID as BOS
from dist_transformer.data.vocabulary.tokenizer import EOS_ID as EOS
from dist_transformer.data.vocabulary.tokenizer import PAD_ID as PAD
from dist_transformer.export.marian import marian_model
from dist_transformer.model.packed import IGNORED, PackedBatch, PackedTokens, pack_side
from dist_transformer.model.transformer import Transformer
from tests.support.tiny import tiny_config

CONFIGS = {
    "base-like": tiny_config(encoder_layers=2, decoder_layers=3, heads=4, vocab_size=97, max_positions=64),
    "one head, deep encoder": tiny_config(width=24, encoder_layers=4, heads=1, vocab_size=31, max_positions=48),
    "swish, output bias": tiny_config(vocab_size=50, activation="swish", output_bias=True),
    "gelu": tiny_config(vocab_size=50, heads=8, activation="gelu"),
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


def make_marian(model: Transformer) -> MarianMTModel:
    marian = marian_model(model).eval()
    assert marian.final_logits_bias.any() == (model.output_bias is not None)
    ours, theirs = (
        sum(p.numel() for name, p in m.named_parameters() if p.requires_grad and name != "output_bias")
        for m in (model, marian)
    )
    assert ours == theirs
    return marian


def packed(sentences: list[list[int]], *, tail: int) -> PackedTokens:
    flat = np.array([token for sentence in sentences for token in sentence], dtype=np.int64)
    lengths = np.array([len(sentence) for sentence in sentences], dtype=np.int64)
    cap = int(lengths.max())
    return pack_side(flat, lengths, size=len(flat) + tail, offset_count=len(lengths) + 50, max_length=cap)


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
    tokens, target_tokens = (
        pad_sequence([*map(torch.tensor, side)], batch_first=True, padding_value=PAD) for side in (sources, target_in)
    )
    mask, target_mask = tokens.ne(PAD).long(), target_tokens.ne(PAD).long()
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
