"""Run by one rank or two: how far the gradient that the optimizer sees is from a float64 sum, in bf16.

Usage: worker_sums.py OUT. Rank 0 writes OUT; the tests read it.
"""

import json
import sys
from pathlib import Path

import torch

from dist_transformer.config.settings import BatchConfig, ModelConfig, TrainConfig
from dist_transformer.model.packed import PackedBatch
from dist_transformer.model.transformer import Transformer
from dist_transformer.runtime.process_group import process_group
from dist_transformer.runtime.world import read_world
from dist_transformer.training.engine.deepspeed_engine import Engine
from dist_transformer.training.engine.ds_config import load_ds_config
from tests.model.small_batches import make_batch, make_pairs

ROOT = Path(__file__).resolve().parents[2]
STAGES = range(4)
MICRO_BATCHES = (1, 32)
"""Micro-batches per rank and step."""
MODEL = ModelConfig(width=32, heads=2, ffn_width=64, encoder_layers=1, decoder_layers=1, dropout=0.0, vocab_size=64)
TOKENS = 16


def random_batch(index: int) -> PackedBatch:
    return make_batch(make_pairs([(TOKENS // 2 - 1, TOKENS // 2 - 1)] * 2, MODEL.vocab_size, index))


def make_model() -> Transformer:
    torch.manual_seed(3)
    return Transformer(MODEL)


def exact_sums(micro_batches: int, *, stage: int) -> dict[str, torch.Tensor]:
    """Sums in float64 of the bf16 gradients of all micro-batches; DeepSpeed has no part in them.

    At stage 0 autograd adds the gradients of the shared embedding's three uses in fp32, at the others in bf16.
    """
    model = make_model().cast_parameters(torch.bfloat16)
    if stage == 0:
        for p in model.parameters():
            p.grad_dtype = torch.float32
    sums = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in model.named_parameters()}
    for index in range(micro_batches):
        model.zero_grad()
        (model(random_batch(index), 0.1).loss / (micro_batches * TOKENS)).backward()
        for name, p in model.named_parameters():
            assert p.grad is not None
            sums[name] += p.grad.double()
    return sums


def error_of(stage: int, micro_batches: int, wanted: dict[str, torch.Tensor], rank: int, world_size: int) -> float:
    """The largest relative error of a tensor. After one update Adam's first moment is (1 - β1) · gradient."""
    config = TrainConfig.of(
        data=("unused",),
        run_dir=Path("unused"),
        precision="bf16",
        model=MODEL,
        batch=BatchConfig(packs_per_step=micro_batches * world_size),
        deepspeed_config=ROOT / "ds_configs" / f"zero{stage}.json",
    )
    engine = Engine(make_model(), config, load_ds_config(config.deepspeed_config), world_size=world_size)
    for index in range(rank, micro_batches * world_size, world_size):
        engine.forward_backward(random_batch(index), step_tokens=micro_batches * world_size * TOKENS)
        engine.end_micro_batch()
    errors = {}
    for state in engine.parameter_states():
        gradient = state.moments["exp_avg"].double() / (1 - config.optimizer.beta1)
        errors[state.name] = float((gradient - wanted[state.name]).norm() / wanted[state.name].norm())
    return max(errors.values())


def main() -> None:
    world, errors = read_world(), {}
    with process_group(world, single=True):
        for micro_batches in MICRO_BATCHES:
            low, high = (exact_sums(micro_batches * world.size, stage=stage) for stage in (1, 0))
            for stage in STAGES:
                wanted = low if stage else high
                errors[f"{stage}/{micro_batches}"] = error_of(stage, micro_batches, wanted, world.rank, world.size)
    if world.is_main:
        Path(sys.argv[-1]).write_text(json.dumps(errors, indent=1))


if __name__ == "__main__":
    main()
