"""Run by two ranks: the collectives of a step at each ZeRO stage, as DeepSpeed calls them.

Usage: worker_traffic.py OUT. Rank 0 writes OUT; the test reads it.
"""

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dist_transformer.config.presets import PRESETS
from dist_transformer.config.settings import BatchConfig
from dist_transformer.model.transformer import Transformer
from dist_transformer.runtime.process_group import process_group
from dist_transformer.runtime.world import read_world
from dist_transformer.training.engine.deepspeed_engine import Engine
from tests.distributed.worker_memory import VOCAB_SIZE
from tests.model.small_batches import BATCH

# Of 0.8 million parameters, so that several buckets are sent.
BUCKETS = {"reduce_bucket_size": 500_000, "stage3_prefetch_bucket_size": 500_000}
STAGE_3 = {"stage3_param_persistence_threshold": 1000, **BUCKETS}
CASES: dict[str, tuple[str, dict[str, int]]] = {
    **{f"stage {stage}": ("bf16", {"stage": stage, **BUCKETS}) for stage in range(3)},
    "stage 1, fp32": ("fp32", {"stage": 1, **BUCKETS}),
    "stage 3": ("bf16", {"stage": 3, **STAGE_3}),
    "stage 3, few live": ("bf16", {"stage": 3, "stage3_max_live_parameters": 300_000, **STAGE_3}),
    "stage 3, short reuse": ("bf16", {"stage": 3, "stage3_max_reuse_distance": 300_000, **STAGE_3}),
}
MICRO_BATCHES = 2
# Stage 3 prefetches once it has traced a step.
STEPS = 3
# Bytes that a ring of many ranks sends per byte of a tensor, and passes around the ring.
WEIGHTS = {"all_reduce": 2, "all_gather_into_tensor": 1, "reduce_scatter_tensor": 1}

calls = list[tuple[str, int]]()


def count_calls() -> None:
    """Record the collectives with the bytes of their largest tensor. Others than those of `WEIGHTS` must not occur."""

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def count(*arguments: Any, **named: Any) -> Any:
            tensors = [value for value in (*arguments, *named.values()) if isinstance(value, torch.Tensor)]
            calls.append((name, max((tensor.nbytes for tensor in tensors), default=0)))
            return call(*arguments, **named)

        return count

    for name in (*WEIGHTS, "all_gather", "reduce_scatter", "reduce", "broadcast", "barrier", "all_to_all_single"):
        wrapped = counted(name, getattr(dist, name))
        for module in (dist, dist.distributed_c10d):
            setattr(module, name, wrapped)


def measure(precision: str, zero: dict[str, int]) -> dict[str, int]:
    base = PRESETS["tiny"]
    config = dataclasses.replace(
        base,
        precision=precision,  # type: ignore[arg-type]
        model=dataclasses.replace(base.model, vocab_size=VOCAB_SIZE),
        batch=BatchConfig(packs_per_step=2 * MICRO_BATCHES, packs_per_micro_batch=1),
    )
    engine = Engine(Transformer(config.model), config, {"zero_optimization": zero}, world_size=2)
    for _ in range(STEPS):
        calls.clear()
        for _ in range(MICRO_BATCHES):
            engine.forward_backward(BATCH, step_tokens=16)
            engine.end_micro_batch()
    found = {
        "calls": len(calls),
        "passes": sum(WEIGHTS[name] for name, _ in calls),
        "bytes": sum(WEIGHTS[name] * size for name, size in calls),
    }
    calls.clear()
    states = list(engine.parameter_states())
    return {**found, "calls_of_a_save": len(calls), "parameters": len(states)}


def main() -> None:
    count_calls()
    world = read_world()
    with process_group(world, single=True):
        found = {name: measure(*case) for name, case in CASES.items()}
    if world.is_main:
        Path(sys.argv[-1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
