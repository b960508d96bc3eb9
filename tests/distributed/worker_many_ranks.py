"""Rank 0 of 512 ranks, of which 511 do not exist: torch's fake process group returns at once what a rank sent itself.

Usage: worker_many_ranks.py DATA RUN STAGE. It builds the engine, trains two steps and saves both.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from dist_transformer.config.settings import BatchConfig, OptimizerConfig, TrainConfig
from dist_transformer.data.loading import sharing
from dist_transformer.runtime import distributed
from dist_transformer.runtime.node import Node
from dist_transformer.runtime.world import World
from dist_transformer.training.assembly import assemble
from tests.distributed.worker_stages import MODEL, ds_config_path

RANKS = 512


def fake_group(*_: Any, **__: Any) -> dist.ProcessGroup:
    group = dist.new_group(backend="fake")
    assert group is not None
    return group


if __name__ == "__main__":
    data, run_dir, stage = sys.argv[1:]
    os.environ.update(LOCAL_RANK="0", RANK="0", WORLD_SIZE=str(RANKS))
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    distributed.new_cpu_group = fake_group
    # One rank per node: the others of this node would have to answer.
    sharing.join_node = lambda: Node(0, [0], range(RANKS), {})  # type: ignore[attr-defined]
    config = TrainConfig.of(
        data=(data,),
        run_dir=Path(run_dir),
        deepspeed_config=ds_config_path(f"zero{stage}"),
        max_steps=2,
        save_every=1,
        validate_every=0,
        precision="bf16",
        model=MODEL,
        batch=BatchConfig(max_target_tokens=128, packs_per_step=RANKS),
        optimizer=OptimizerConfig(schedule="inverse_sqrt", peak_lr=1e-3, warmup_steps=4),
    )
    assert assemble(config, World(size=RANKS), torch.device("cpu")).train()
