"""The entry point of every launcher: `python -m dist_transformer.train --preset P --data DATA --run-dir RUN`."""

import argparse
import dataclasses
import os
import sys
import time

import tyro

from dist_transformer.config import PRESETS, TrainConfig
from dist_transformer.distributed import process_group, read_world
from dist_transformer.errors import UserError, exit_on_user_error

_GRACE_SECONDS = 10


def parse_arguments(arguments: list[str]) -> TrainConfig:
    """`--preset` chooses the defaults; every other setting has a flag of its own name."""
    chooser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    chooser.add_argument("--preset", default="base")
    # DeepSpeed's launcher adds this one; the environment says the same.
    chooser.add_argument("--local_rank", "--local-rank", type=int)
    chosen, rest = chooser.parse_known_args(arguments)
    if chosen.preset not in PRESETS:
        raise UserError(f"--preset {chosen.preset} is unknown: choose one of {', '.join(PRESETS)}")
    description = (
        f"Train a Transformer. --preset {{{','.join(PRESETS)}}} sets the defaults below (now: {chosen.preset})."
    )
    return tyro.cli(
        TrainConfig,
        default=dataclasses.replace(PRESETS[chosen.preset], data=tyro.MISSING, run_dir=tyro.MISSING),
        args=rest,
        prog="python -m dist_transformer.train",
        description=description,
    )


def main() -> None:
    config = parse_arguments(sys.argv[1:])
    world = read_world()
    # DeepSpeed looks for an accelerator at import; without a GPU it should not search.
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with process_group(world, timeout_minutes=config.timeout_minutes, single=True) as device:
        from dist_transformer.training.trainer import Trainer

        try:
            Trainer(config, world, device).train()
        except UserError:
            if not world.is_main:
                # What all ranks found, rank 0 says once: the launcher ends the others when it exits.
                time.sleep(_GRACE_SECONDS)
            raise


if __name__ == "__main__":
    exit_on_user_error(main)
