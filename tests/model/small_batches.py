"""Small models and batches that several tests compute with."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from dist_transformer.config.settings import ModelConfig
from dist_transformer.model.packed import IGNORED, PackedBatch, PackedTokens, pack_side
from dist_transformer.model.transformer import Transformer

PAD, BOS, EOS, FIRST_WORD = 0, 2, 3, 4

Pair = tuple[list[int], list[int]]

# Without dropout, so that one run equals another; options are set on it.
SMALL = ModelConfig(
    width=16, encoder_layers=2, decoder_layers=2, heads=2, ffn_width=24, dropout=0.0, vocab_size=40, max_positions=32
)


def make_pairs(lengths: Sequence[tuple[int, int]], vocab_size: int = 40, seed: int = 0) -> list[Pair]:
    rng = np.random.default_rng(seed)
    words = [rng.integers(FIRST_WORD, vocab_size, size).tolist() for pair in lengths for size in pair]
    return list(zip(words[::2], words[1::2], strict=True))


def pack(sentences: list[list[int]], size: int, cap: int) -> PackedTokens:
    flat = np.array([token for sentence in sentences for token in sentence], dtype=np.int64)
    lengths = np.array([len(sentence) for sentence in sentences], dtype=np.int64)
    # Equally many offsets on both sides, whatever their caps.
    return pack_side(flat, lengths, size=size, offset_count=len(lengths) + 20, max_length=cap)


def make_batch(pairs: list[Pair], tail: int = 5, *, cap: int = 32, size: int = 0) -> PackedBatch:
    """Pack pairs with a tail, or into buffers of a size; those of the targets have eight more rows."""
    sources, targets = [[*source, EOS] for source, _ in pairs], [[BOS, *target] for _, target in pairs]
    source_size, target_size = (size or sum(map(len, side)) + tail for side in (sources, targets))
    labels = [token for _, target in pairs for token in (*target, EOS)]
    return PackedBatch(
        source=pack(sources, source_size, cap),
        target=pack(targets, target_size + 8, cap),
        labels_T=torch.tensor(labels + [IGNORED] * (target_size + 8 - len(labels))),
    )


def make_model(seed: int = 0, **options: object) -> Transformer:
    torch.manual_seed(seed)
    return Transformer(replace(SMALL, **options))  # type: ignore[arg-type]


def gradients(model: Transformer, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


def hidden_states(model: Transformer, batch: PackedBatch) -> torch.Tensor:
    with torch.no_grad():
        return model.decode(batch.target, model.encode(batch.source), batch.source)


def count_parameters(config: ModelConfig) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Transformer(config).parameters())


PAIRS = make_pairs([(5, 7), (1, 2), (12, 9), (0, 0), (6, 15), (9, 1)])

BATCH = make_batch(PAIRS)
