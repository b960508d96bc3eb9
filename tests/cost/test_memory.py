"""Memory by hand, and activations against what autograd really keeps. States: tests/distributed/test_memory.py."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from dist_transformer.config.presets import PRESETS
from dist_transformer.config.settings import BatchConfig, ModelConfig, TrainConfig
from dist_transformer.cost.memory import (
    SAVED_AT_ONCE,
    Memory,
    ZeroSettings,
    activation_bytes,
    choose_compilation,
    model_sizes,
    packs_that_fit,
    predict_memory,
)
from dist_transformer.model.packed import PackedBatch, PackedTokens, pack_side
from dist_transformer.model.transformer import Transformer
from dist_transformer.training.engine.ds_config import load_ds_config
from tests.conftest import ROOT

BIG = dataclasses.replace(PRESETS["big"].model, vocab_size=37_000)
RDROP = dataclasses.replace(PRESETS["big"].optimizer, rdrop_alpha=5.0)
# The table of 1,024 sinusoids, in fp32.
CONSTANTS = 1024 * 1024 * 4
BUCKETS = {"reduce_bucket_size": 25_000_000}
STAGE_3_BUCKETS = {"reduce_bucket_size": 25_000_000, "stage3_prefetch_bucket_size": 25_000_000}


def preset(name: str, batch: BatchConfig | None = None, **settings: Any) -> TrainConfig:
    config = PRESETS[name].changed(**{"precision": "bf16", **settings})
    model = dataclasses.replace(config.model, vocab_size=37_000)
    return dataclasses.replace(config, model=model, batch=batch or config.batch)


def memory_of(zero: ZeroSettings, *, tokens: int = 3136, world: int = 1, steps: int = 1, **settings: Any) -> Memory:
    """The model `big` with packs of so many tokens, one at a time, in `steps` micro-batches per rank."""
    batch = BatchConfig(max_target_tokens=tokens, packs_per_step=world * steps)
    config = preset("big", batch, **{"compile": "off", **settings})
    return predict_memory(config, zero, world_size=world, source_budget=tokens)


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
    assert sizes.constants == CONSTANTS


@pytest.mark.parametrize(
    ("stage", "precision", "steps", "expected"),
    [
        # weights, copy, moments, gradients, update: bytes per parameter on 4 ranks.
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
def test_states_by_hand(stage: int, precision: str, steps: int, expected: tuple[float, ...]) -> None:
    memory = memory_of(ZeroSettings(stage=stage), world=4, steps=steps, precision=precision)
    parameters = model_sizes(BIG, ZeroSettings(stage=stage)).parameters
    found = (memory.weights - CONSTANTS, memory.masters, memory.moments, memory.gradients, memory.update)
    assert found == pytest.approx([value * parameters for value in expected], rel=1e-6)


def test_offload_leaves_no_states_on_the_gpu() -> None:
    zero = ZeroSettings(stage=3, offload_optimizer=True, offload_param=True)
    memory = memory_of(zero, world=2)
    assert (memory.masters, memory.moments, memory.gradients, memory.update) == (0, 0, 0, 0)
    assert memory.weights == CONSTANTS
    # Copies, moments, gradients summed and for the update, and the weights: 4 + 8 + 4 + 4 + 2 bytes, of half of them.
    assert memory.host == pytest.approx(11 * model_sizes(BIG, zero).parameters, rel=1e-6)


def test_buckets_are_doubled_where_communication_overlaps() -> None:
    def buffers(stage: int, **keys: Any) -> int:
        return memory_of(ZeroSettings(stage=stage, reduce_bucket_size=1000, **keys), world=2).buffers

    # Two bytes in the bucket, four while it is sent.
    assert buffers(2) == 2000 + 4000
    assert buffers(2, overlap_comm=True) == 4000 + 4000
    assert buffers(3, stage3_max_live_parameters=5000) == 4000 + 10_000


def test_the_loss_holds_one_block_of_logits() -> None:
    """2 bytes and twice 4 for each logit of 3,136 tokens; the projection's gradient in fp32 and bf16; hidden states."""
    zero, projection = ZeroSettings(stage=1), 37_000 * 1024 * 6
    assert memory_of(zero).loss == 3136 * 37_000 * 10 + projection + 2 * 3136 * 1024 * 2
    assert memory_of(zero, compile="on").loss == 3136 * 37_000 * 2 + projection + 2 * 3136 * 1024 * 2
    # R-Drop: twice as many rows, a copy of the hidden states, and four halves of the block in fp32.
    rdrop = memory_of(zero, optimizer=RDROP)
    part = 2**27 // 74_000 * 2
    assert rdrop.loss == 37_000 * (6272 * 2 + part * 16) + projection + 3 * 6272 * 1024 * 2
    # 2^30 elements are a block: 29,020 rows; 2^27 of them are in fp32 at a time.
    logits = 29_020 * 37_000 * 2 + 2**27 // 37_000 * 37_000 * 8
    assert memory_of(zero, tokens=100_000).loss == logits + projection + 2 * 100_000 * 1024 * 2


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
    assert hidden.shape == (512, 64)
    assert activation_bytes(config, "fp32", 512, 512, 16) == pytest.approx(sum(kept.values()), rel=0.1)


def test_dropout_keeps_a_byte_an_element() -> None:
    """The model `big` has 6 + 6 layers, 2 and 3 sublayers in each, and the embeddings."""
    with_dropout, without = (
        activation_bytes(model, "bf16", 3136, 3136, 30.0) for model in (BIG, dataclasses.replace(BIG, dropout=0.0))
    )
    assert with_dropout - without == (6 * 2 + 6 * 3 + 2) * 1024 * 3136


@pytest.mark.parametrize(("on_cpu", "libraries"), [(False, 1.5), (True, 0.4)])
def test_what_is_needed_has_gaps_and_libraries(on_cpu: bool, libraries: float) -> None:
    config = preset("tiny")
    found = predict_memory(config, ZeroSettings(stage=1), world_size=1, source_budget=1024, on_cpu=on_cpu)
    assert found.needed == pytest.approx(1.05 * found.peak + libraries * 2**30, abs=2)


def test_stage_0_sends_a_copy_of_the_gradients_to_itself() -> None:
    assert memory_of(ZeroSettings(stage=0)).update == memory_of(ZeroSettings(stage=0), world=2).update > 0


@pytest.mark.parametrize(
    ("stage", "world", "decay", "stays", "tensors"),
    [
        # Weights, copy and moments that stay, in bytes per parameter; at stage 1 the gradients stay, too.
        (1, 4, 0.0, 2 + 1 + 2 + 4, 3),
        (2, 4, 0.0, 2 + 1 + 2, 3),
        (2, 4, 0.9, 2 + 1 + 3, 4),
        (2, 1, 0.0, 2 + 4 + 8, 0),
    ],
)
def test_a_save_gathers_pieces_of_states_that_several_ranks_share(
    stage: int, world: int, decay: float, stays: int, tensors: int
) -> None:
    zero = ZeroSettings(stage=stage, reduce_bucket_size=1000)
    found = memory_of(zero, world=world, tokens=16, ema_decay=decay)
    parameters = model_sizes(BIG, ZeroSettings(stage=stage)).parameters
    assert parameters > SAVED_AT_ONCE
    assert found.saving - CONSTANTS == pytest.approx(stays * parameters + tensors * 4 * SAVED_AT_ONCE, rel=1e-6)


@pytest.mark.parametrize(("tokens", "at"), [(16, "update"), (10_000, "loss")])
def test_the_peak_is_at_the_loss_or_at_the_update(tokens: int, at: str) -> None:
    found = memory_of(ZeroSettings(stage=0), tokens=tokens, world=2)
    states = found.weights + found.masters + found.moments + found.gradients
    extra = {"loss": found.activations + found.loss, "update": found.update}
    assert found.peak - states == extra[at] == max(extra.values())


def packs(name: str, gib: int, *, world_size: int = 1, batch: BatchConfig | None = None) -> int:
    config = preset(name, batch)
    budget, memory = config.batch.max_target_tokens, gib * 2**30
    zero = ZeroSettings(stage=1)
    return packs_that_fit(config, zero, world_size=world_size, source_budget=budget, memory_bytes=memory)


@pytest.mark.parametrize(
    ("name", "gib", "world_size", "expected"),
    [
        # 64 packs are a step of 25k tokens: all at once, or a rank's share.
        ("big", 80, 1, 64),
        ("base", 80, 1, 64),
        ("big", 80, 2, 32),
        ("big", 80, 3, 22),
        ("big", 80, 8, 8),
        ("big", 80, 64, 1),
        # By hand: `big` in bf16 keeps 18 bytes of each of 214 million parameters, 404 kB of a pair of tokens, 0.3 GB of
        # the projection's gradient and 2 bytes of each logit, with 8 more of 2^27 of them at most; 5% and 1.5 GiB more.
        # All need 18.3 GiB of 0.9 · 24; of 0.9 · 12 = 10.8 a half of them needs more, and a third does not.
        ("big", 24, 1, 64),
        ("big", 12, 1, 22),
        # If not even one fits, the error comes when it is tried.
        ("big", 4, 1, 1),
        # 128 packs of 3,584: no more than 32,768 tokens pay, and 15 parts of at most 9 are the fewest of those.
        ("big_large_batch", 80, 1, 9),
        ("big_large_batch", 80, 8, 8),
    ],
)
def test_the_largest_equal_part_that_fits(name: str, gib: int, world_size: int, expected: int) -> None:
    assert packs(name, gib, world_size=world_size) == expected


def test_a_pack_that_is_large_already_is_one_at_a_time() -> None:
    assert packs("base", 80, batch=BatchConfig(max_target_tokens=40_000, packs_per_step=4)) == 1


@pytest.mark.parametrize(
    ("settings", "stage", "at_once", "expected"),
    [
        # The measured gains on an H100: 1.20 at 25,088 tokens, 1.07 at 6,272, and 0.87 at 3,136.
        ({}, 1, 64, (True, "25,088 target tokens at once, at least 6,000")),
        ({}, 0, 16, (True, "6,272 target tokens at once, at least 6,000")),
        ({}, 2, 8, (False, "3,136 target tokens at once, below 6,000")),
        ({"compile": "on"}, 1, 8, (True, "--compile on")),
        ({"compile": "off"}, 1, 64, (False, "--compile off")),
        ({"compile": "on"}, 3, 64, (False, "ZeRO-3")),
        ({"compile": "on", "precision": "fp32"}, 1, 64, (False, "fp32")),
        # Both passes of R-Drop are computed at once.
        ({"optimizer": RDROP}, 1, 8, (True, "6,272 target tokens at once, at least 6,000")),
    ],
)
def test_layers_are_compiled_where_it_pays(
    settings: dict[str, Any], stage: int, at_once: int, expected: tuple[bool, str]
) -> None:
    batch = dataclasses.replace(PRESETS["big"].batch, packs_per_micro_batch=at_once)
    assert choose_compilation(preset("big", batch, **settings), stage=stage) == expected
