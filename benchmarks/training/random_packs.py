"""An engine for one preset and batches of random tokens: a step without a data folder."""

import dataclasses
from typing import Any

import numpy as np
import torch

from dist_transformer.config.presets import PRESETS
from dist_transformer.config.settings import TrainConfig
from dist_transformer.model.packed import IGNORED, PackedBatch, pack_side
from dist_transformer.model.transformer import Transformer
from dist_transformer.runtime.distributed import world_size
from dist_transformer.training.engine import ds_config
from dist_transformer.training.engine.deepspeed_engine import Engine

_VOCABULARY = 37_000
_LONGEST = 100


def random_config(preset: str, *, packs: int, at_once: int, compile: bool) -> TrainConfig:
    """Make the settings of a preset with the paper's vocabulary, and so many packs per step and per micro-batch."""
    config = PRESETS[preset]
    return dataclasses.replace(
        config,
        compile="on" if compile else "off",
        model=dataclasses.replace(config.model, vocab_size=_VOCABULARY),
        batch=dataclasses.replace(config.batch, packs_per_step=packs, packs_per_micro_batch=at_once),
    )


def make_engine(config: TrainConfig, device: torch.device, *, stage: int) -> Engine:
    """Make the engine of one rank, inside of its process group."""
    torch.manual_seed(0)
    zero: dict[str, Any] = {**ds_config.DEFAULT_ZERO, "stage": stage} if stage else {"stage": 0}
    engine = Engine(Transformer(config.model).to(device), config, {"zero_optimization": zero}, world_size=world_size())
    engine.module.train()
    return engine


def random_batch(config: TrainConfig, seed: int) -> PackedBatch:
    """Draw sentences of 5 to 54 tokens that fill 97% of a micro-batch."""
    size = config.batch.max_target_tokens * config.batch.packs_at_once
    rng = np.random.default_rng(seed)
    lengths = rng.integers(5, 55, size)
    lengths = lengths[: int(np.searchsorted(np.cumsum(lengths), int(size * 0.97)))]
    total = int(lengths.sum())
    ids, labels = rng.integers(4, config.model.vocab_size, total), np.full(size, IGNORED)
    labels[:total] = rng.integers(4, config.model.vocab_size, total)
    sides = [pack_side(ids, lengths, size=size, offset_count=size // 8 + 40, max_length=_LONGEST) for _ in range(2)]
    batch = PackedBatch(source=sides[0], target=sides[1], labels_T=torch.from_numpy(labels))
    return batch.pin_memory() if torch.cuda.is_available() else batch


def train_step(engine: Engine, batches: list[PackedBatch], *, graph: bool = False) -> torch.Tensor:
    """Train on the micro-batches of one step; return the last loss.

    Args:
        graph: let the engine start the kernels by a CUDA graph, if its settings want that.
    """
    for batch in batches:
        moved = engine.on_device(batch) if graph else batch.to(engine.device)
        torch.manual_seed(7)
        loss = engine.forward_backward(moved, step_tokens=25_000).loss.detach()
        engine.end_micro_batch()
    return loss
