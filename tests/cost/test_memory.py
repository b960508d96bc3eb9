"""Memory by hand, and activations against what autograd really keeps. States: tests/distributed/test_memory.py."""

import dataclasses

import numpy as np
import pytest
import torch

from dist_transformer.config.presets import PRESETS
from dist_transformer.config.settings import ModelConfig
from dist_transformer.cost.memory import (
    MicroBatch,
    ZeroSettings,
    activation_bytes,
    model_sizes,
    predict_memory,
)
from dist_transformer.model.packed import PackedBatch, PackedTokens, pack_side
from dist_transformer.model.transformer import Transformer
from dist_transformer.training.engine.ds_config import load_ds_config
from tests.conftest import ROOT

BIG = dataclasses.replace(PRESETS["big"].model, vocab_size=37_000)
BUCKETS = {"reduce_bucket_size": 25_000_000}
STAGE_3_BUCKETS = {"reduce_bucket_size": 25_000_000, "stage3_prefetch_bucket_size": 25_000_000}
MICRO = MicroBatch(source_tokens=3136, target_tokens=3136)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("zero0", ZeroSettings(stage=0)),
        ("zero1", ZeroSettings(stage=1, overlap_comm=True, **BUCKETS)),
        ("zero2", ZeroSettings(stage=2, overlap_comm=True, **BUCKETS)),
        ("zero3", ZeroSettings(stage=3, overlap_comm=True, **STAGE_3_BUCKETS)),
        (
            "zero3_offload",
            ZeroSettings(stage=3, overlap_comm=True, offload_optimizer=True, offload_param=True, **STAGE_3_BUCKETS),
        ),
    ],
)
def test_settings_are_those_of_the_ds_config(name: str, expected: ZeroSettings) -> None:
    assert ZeroSettings.from_ds_config(load_ds_config(ROOT / "ds_configs" / f"{name}.json")) == expected


def test_the_papers_big_has_its_parameters() -> None:
    """213 million, table 3 of the paper; small tensors are biases and norms."""
    sizes = model_sizes(BIG, ZeroSettings(stage=3))
    assert round(sizes.parameters / 1e6) == 214
    # Of 12 layers: 18 attentions with 4 biases of 1,024, 12 feed-forwards with 4,096 + 1,024, 30 norms with 2 of 1,024.
    assert sizes.persistent == 18 * 4 * 1024 + 12 * (4096 + 1024) + 30 * 2 * 1024
    # The table of 1,024 sinusoids, in fp32.
    assert sizes.constants == 1024 * 1024 * 4


@pytest.mark.parametrize(
    ("stage", "precision", "accumulation", "expected"),
    [
        # weights, copy, moments, gradients, update: bytes a parameter on 4 ranks.
        (0, "bf16", 1, (2, 4, 8, 4, 4)),
        (0, "fp32", 1, (4, 0, 8, 4, 4)),
        (1, "bf16", 1, (2, 1, 2, 4, 0)),
        (1, "bf16", 2, (2, 1, 2, 4, 0)),
        (1, "fp32", 1, (4, 1, 2, 1, 1)),
        (1, "fp32", 2, (4, 1, 2, 5, 1)),
        (2, "bf16", 2, (2, 1, 2, 1, 0)),
        (2, "fp32", 2, (4, 1, 2, 1, 1)),
        (3, "bf16", 2, (0.5, 1, 2, 1, 1)),
        (3, "fp32", 2, (1, 1, 2, 1, 1)),
    ],
)
def test_states_by_hand(stage: int, precision: str, accumulation: int, expected: tuple[float, ...]) -> None:
    memory = predict_memory(
        BIG, ZeroSettings(stage=stage), world_size=4, precision=precision, accumulation=accumulation, micro=MICRO
    )
    parameters = model_sizes(BIG, ZeroSettings(stage=stage)).parameters
    found = (memory.weights - 1024 * 1024 * 4, memory.masters, memory.moments, memory.gradients, memory.update)
    assert found == pytest.approx([value * parameters for value in expected], rel=1e-6)


def test_offload_leaves_no_states_on_the_gpu() -> None:
    zero = ZeroSettings(stage=3, offload_optimizer=True, offload_param=True)
    memory = predict_memory(BIG, zero, world_size=2, precision="bf16", accumulation=1, micro=MICRO)
    parameters = model_sizes(BIG, zero).parameters
    assert (memory.masters, memory.moments, memory.gradients, memory.update) == (0, 0, 0, 0)
    assert memory.weights == 1024 * 1024 * 4
    # Copies, moments, gradients summed and for the update, and the weights: 4 + 8 + 4 + 4 + 2 bytes, of half of them.
    assert memory.host == pytest.approx(11 * parameters, rel=1e-6)


def test_buckets_are_doubled_where_communication_overlaps() -> None:
    def buffers(zero: ZeroSettings) -> int:
        return predict_memory(BIG, zero, world_size=2, precision="bf16", accumulation=1, micro=MICRO).buffers

    # Two bytes in the bucket, four while it is sent.
    assert buffers(ZeroSettings(stage=2, reduce_bucket_size=1000)) == 2000 + 4000
    assert buffers(ZeroSettings(stage=2, reduce_bucket_size=1000, overlap_comm=True)) == 4000 + 4000
    live = ZeroSettings(stage=3, reduce_bucket_size=1000, stage3_max_live_parameters=5000)
    assert buffers(live) == 4000 + 10_000


def test_the_loss_holds_one_block_of_logits() -> None:
    """2 bytes and twice 4 for each logit of 3,136 tokens; the projection's gradient in fp32 and bf16; hidden states."""
    memory = predict_memory(BIG, ZeroSettings(stage=1), world_size=1, precision="bf16", accumulation=1, micro=MICRO)
    assert memory.loss == 3136 * 37_000 * 10 + 37_000 * 1024 * 6 + 2 * 3136 * 1024 * 2
    compiled = predict_memory(
        BIG, ZeroSettings(stage=1), world_size=1, precision="bf16", accumulation=1, micro=MICRO, compiled=True
    )
    assert compiled.loss == 3136 * 37_000 * 2 + 37_000 * 1024 * 6 + 2 * 3136 * 1024 * 2
    # R-Drop: twice as many rows, a copy of the hidden states, and four halves of the block in fp32.
    twice = dataclasses.replace(MICRO, passes=2)
    rdrop = predict_memory(BIG, ZeroSettings(stage=1), world_size=1, precision="bf16", accumulation=1, micro=twice)
    part = 2**27 // 74_000 * 2
    assert rdrop.loss == 37_000 * (6272 * 2 + part * 16) + 37_000 * 1024 * 6 + 3 * 6272 * 1024 * 2
    # 2^30 elements are a block: 29,020 rows; 2^27 of them are in fp32 at a time.
    many = predict_memory(
        BIG,
        ZeroSettings(stage=1),
        world_size=1,
        precision="bf16",
        accumulation=1,
        micro=MicroBatch(source_tokens=100_000, target_tokens=100_000),
    )
    assert many.loss == 29_020 * 37_000 * 2 + 2**27 // 37_000 * 37_000 * 8 + 37_000 * 1024 * 6 + 2 * 100_000 * 1024 * 2


def equal_sentences(count: int, length: int) -> PackedTokens:
    tokens, lengths = np.full(count * length, 7), np.full(count, length)
    return pack_side(tokens, lengths, size=count * length, offset_count=count + 1, max_length=length)


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("activation", ["relu", "gelu", "swish"])
def test_activations_are_what_autograd_keeps(norm: str, activation: str) -> None:
    """Measure real tensors, without dropout (its mask is larger on a CPU), in fp32, where attention is explicit."""
    config = ModelConfig(
        width=64,
        heads=4,
        ffn_width=192,
        encoder_layers=3,
        decoder_layers=3,
        dropout=0.0,
        vocab_size=50,
        norm=norm,
        activation=activation,  # type: ignore[arg-type]
    )
    model = Transformer(config)
    # 16 keys fill the groups of attention without padding.
    side = equal_sentences(32, 16)
    batch = PackedBatch(source=side, target=side, labels_T=torch.full((512,), 7))
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        memory = model.encode(batch.source)
        hidden = model.decode(batch.target, memory, batch.source)
    micro = MicroBatch(source_tokens=512, target_tokens=512, sentence_tokens=16)
    assert hidden.shape == (512, 64)
    assert activation_bytes(config, micro, "fp32") == pytest.approx(sum(kept.values()), rel=0.1)


def test_dropout_keeps_a_byte_an_element() -> None:
    """The model `big` has 6 + 6 layers, 2 and 3 sublayers in each, and the embeddings."""
    with_dropout = activation_bytes(BIG, MICRO, "bf16")
    without = activation_bytes(dataclasses.replace(BIG, dropout=0.0), MICRO, "bf16")
    assert with_dropout - without == (6 * 2 + 6 * 3 + 2) * 1024 * 3136


def test_the_peak_is_at_the_loss_or_at_the_update() -> None:
    def memory(tokens: int) -> tuple[int, int, int]:
        micro = MicroBatch(source_tokens=tokens, target_tokens=tokens)
        found = predict_memory(BIG, ZeroSettings(stage=0), world_size=2, precision="bf16", accumulation=1, micro=micro)
        states = found.weights + found.masters + found.moments + found.gradients
        return found.peak - states, found.activations + found.loss, found.update

    extra, at_loss, at_update = memory(16)
    assert extra == at_update > at_loss
    extra, at_loss, at_update = memory(10_000)
    assert extra == at_loss > at_update
