"""Run by one rank or two: the bytes that an engine's tensors take, at each ZeRO stage, for the presets tiny and base.

Usage: worker_memory.py OUT. Rank 0 writes OUT; the tests read it.
"""

import dataclasses
import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import numpy as np
import torch

from dist_transformer.config.presets import PRESETS
from dist_transformer.config.settings import BatchConfig
from dist_transformer.model.packed import PackedBatch, pack_side
from dist_transformer.model.transformer import Transformer
from dist_transformer.runtime.process_group import process_group
from dist_transformer.runtime.world import read_world
from dist_transformer.training.engine.ds_config import load_ds_config
from dist_transformer.training.engine.engine import Engine
from dist_transformer.training.engine.memory import state_bytes

ROOT = Path(__file__).resolve().parents[2]
VOCAB_SIZE = 1000
PRECISIONS = ("bf16", "fp32")


def cases(world_size: int) -> list[tuple[str, str, int, str]]:
    """Preset, precision, stage, frozen part; base takes seconds each: one rank alone tries it at the default stage."""
    tiny = [
        ("tiny", precision, stage, part) for precision in PRECISIONS for stage in range(4) for part in ("", "encoder")
    ]
    return tiny + [("base", "bf16", stage, "") for stage in (range(4) if world_size > 1 else (1,))]


def small_batch() -> PackedBatch:
    tokens = np.arange(16) + 4
    side = pack_side(tokens, np.array([8, 8]), size=16, offset_count=3, max_length=8)
    return PackedBatch(source=side, target=side, labels_T=torch.from_numpy(tokens))


def bytes_of_all_tensors() -> int:
    """Count the bytes of all tensors of this process in another way: as storages."""
    storages = {}
    for value in gc.get_objects():
        if issubclass(type(value), torch.Tensor) and value.device.type != "meta":
            for tensor in (value, value.grad if value.is_leaf else None):
                if tensor is not None:
                    storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


def measure(preset: str, precision: str, stage: int, part: str, world_size: int) -> dict[str, Any]:
    base = PRESETS[preset]
    config = dataclasses.replace(
        base,
        precision=precision,
        freeze=(part,) if part else (),
        model=dataclasses.replace(base.model, vocab_size=VOCAB_SIZE),
        batch=BatchConfig(packs_per_step=world_size),
        deepspeed_config=ROOT / "ds_configs" / f"zero{stage}.json",
    )
    gc.collect()
    before = bytes_of_all_tensors()
    model = Transformer(config.model)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    engine = Engine(model, config, load_ds_config(config.deepspeed_config), world_size=world_size)
    del model
    gc.collect()
    between = state_bytes(engine)
    everything = bytes_of_all_tensors() - before
    engine.forward_backward(small_batch(), step_tokens=16)
    before_update = state_bytes(engine)
    update, during = engine.optimizer.step, [0]

    def measured_update(*arguments: Any, **settings: Any) -> Any:
        during[0] = max(during[0], state_bytes(engine))
        return update(*arguments, **settings)

    engine.optimizer.step = measured_update
    engine.end_micro_batch()
    found = {"between": between, "everything": everything, "before_update": before_update, "during_update": during[0]}
    return {"parameters": parameters, **found}


def main() -> None:
    world = read_world()
    with process_group(world, single=True):
        found = {"-".join(map(str, case)): measure(*case, world.size) for case in cases(world.size)}
    if world.is_main:
        Path(sys.argv[-1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
