"""Run by one rank or two: the bytes that an engine's tensors take, at each ZeRO stage, for the presets tiny and base.

Usage: worker_memory.py OUT. Rank 0 writes OUT; the tests read it.
"""

import dataclasses
import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch

from dist_transformer.config.presets import PRESETS
from dist_transformer.config.settings import BatchConfig, TrainConfig
from dist_transformer.model.transformer import Transformer
from dist_transformer.runtime.process_group import process_group
from dist_transformer.runtime.world import read_world
from dist_transformer.training.engine.deepspeed_engine import Engine
from dist_transformer.training.engine.ds_config import load_ds_config
from dist_transformer.training.engine.measured_memory import state_bytes
from tests.model.small_batches import BATCH

ROOT = Path(__file__).resolve().parents[2]
VOCAB_SIZE = 1000
PRECISIONS = ("bf16", "fp32")


def cases(world_size: int) -> list[tuple[str, str, int, str]]:
    """Preset, precision, stage, frozen part; base takes seconds each: one rank alone tries it at the default stage."""
    tiny = [
        ("tiny", precision, stage, part) for precision in PRECISIONS for stage in range(4) for part in ("", "encoder")
    ]
    return tiny + [("base", "bf16", stage, "") for stage in (range(4) if world_size > 1 else (1,))]


def bytes_of_all_tensors() -> int:
    """Count the bytes of all tensors of this process in another way: as storages."""
    storages = {}
    for value in gc.get_objects():
        if issubclass(type(value), torch.Tensor) and value.device.type != "meta":
            for tensor in (value, value.grad if value.is_leaf else None):
                if tensor is not None:
                    storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


def config_of(preset: str, precision: str, stage: int, part: str, world_size: int) -> TrainConfig:
    base = PRESETS[preset]
    return dataclasses.replace(
        base,
        precision=precision,
        freeze=(part,) if part else (),
        model=dataclasses.replace(base.model, vocab_size=VOCAB_SIZE),
        batch=BatchConfig(packs_per_step=world_size),
        deepspeed_config=ROOT / "ds_configs" / f"zero{stage}.json",
    )


def measure(config: TrainConfig, world_size: int) -> dict[str, Any]:
    gc.collect()
    before = bytes_of_all_tensors()
    model = Transformer(config.model)
    engine = Engine(model, config, load_ds_config(config.deepspeed_config), world_size=world_size)
    del model
    gc.collect()
    between = state_bytes(engine)
    everything = bytes_of_all_tensors() - before
    engine.forward_backward(BATCH, step_tokens=16)
    before_update = state_bytes(engine)
    update, during = engine.optimizer.step, [0]

    def measured_update(*arguments: Any, **settings: Any) -> Any:
        during[0] = max(during[0], state_bytes(engine))
        return update(*arguments, **settings)

    engine.optimizer.step = measured_update
    engine.end_micro_batch()
    after = bytes_of_all_tensors()
    states = engine.parameter_states()
    next(states)
    gathered = bytes_of_all_tensors() - after
    return {
        "between": between,
        "everything": everything,
        "before_update": before_update,
        "during_update": during[0],
        "at_a_save": between + gathered,
    }


def main() -> None:
    world = read_world()
    with process_group(world, single=True):
        configs = {"-".join(map(str, case)): config_of(*case, world.size) for case in cases(world.size)}
        found = {name: measure(config, world.size) for name, config in configs.items()}
    if world.is_main:
        Path(sys.argv[-1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
