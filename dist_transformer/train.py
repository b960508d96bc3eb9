"""The entry point of every launcher: `python -m dist_transformer.train --preset P --data DATA --run-dir RUN`."""

if __name__ == "__main__":
    from dist_transformer.runtime.interpreter import check_interpreter

    check_interpreter()

import argparse
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import tyro

from dist_transformer.config.presets import PRESETS
from dist_transformer.config.settings import EMBEDDED_CORPUS, TrainConfig
from dist_transformer.config.table3 import VARIANTS, preset_with_variant
from dist_transformer.errors import UserError, exit_on_user_error
from dist_transformer.planning.hardware import peak_flops
from dist_transformer.run.environment import describe_environment
from dist_transformer.runtime.process_group import process_group
from dist_transformer.runtime.streams import outlive_streams
from dist_transformer.runtime.world import World, read_world
from dist_transformer.training.fault_tolerance.launcher_watch import LauncherWatch
from dist_transformer.training.fault_tolerance.signals import INTERRUPTED
from dist_transformer.training.fault_tolerance.watchdog import Phase, Watchdog

if TYPE_CHECKING:
    import torch

_GRACE_SECONDS = 10


def parse_arguments(arguments: list[str]) -> tuple[TrainConfig, bool]:
    """`--preset` and `--variant` choose the defaults; every other setting has a flag of its own name.

    Returns:
        the settings, and whether `--test-mode` was given: data and run folder may then be absent.
    """
    chooser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    chooser.add_argument("--preset", default="base")
    chooser.add_argument("--variant", default="base")
    chooser.add_argument("--test-mode", action="store_true", dest="dry_run")
    # DeepSpeed's launcher adds this one; the environment says the same.
    chooser.add_argument("--local_rank", "--local-rank", type=int)
    chosen, rest = chooser.parse_known_args(arguments)
    preset = preset_with_variant(chosen.preset, chosen.variant)
    description = (
        f"Train a Transformer. --preset {{{','.join(PRESETS)}}} sets the defaults below (now: {chosen.preset}); "
        f"--variant {{{','.join(VARIANTS)}}} changes them as that row of the paper's Table 3 changes its base model "
        f"(now: {chosen.variant}). --test-mode tries the settings for some minutes on one process, on some of --data "
        "or of an embedded corpus: memory, speed and a table of checks; it writes nothing to --run-dir."
    )
    missing = {"data": tyro.MISSING, "run_dir": tyro.MISSING}
    config = tyro.cli(
        TrainConfig,
        default=preset.changed(**({"data": EMBEDDED_CORPUS} if chosen.dry_run else missing)),
        args=rest,
        prog="python -m dist_transformer.train",
        description=description,
    )
    return config, chosen.dry_run


def main() -> None:
    launchers = LauncherWatch()
    outlive_streams(remedy="training goes on without these lines; metrics.jsonl in the run folder has the figures")
    config, dry_run = parse_arguments(sys.argv[1:])
    world = read_world()
    # DeepSpeed looks for an accelerator at import; without a GPU it should not search.
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if dry_run:
        from dist_transformer.training.dry_run import run_dry_run

        with process_group(world, single=True) as device, _failing(Watchdog(world, {}), world):
            run_dry_run(config, world, device)
    elif not train(config, world, launchers):
        raise SystemExit(INTERRUPTED)


def train(config: TrainConfig, world: World, launchers: LauncherWatch) -> bool:
    """Train as one rank of a job: watched, and ready to be stopped.

    Returns:
        whether the run is finished; otherwise it was stopped and is saved.
    """
    from dist_transformer.reporting.reporter import format_seconds
    from dist_transformer.run.folder import next_command
    from dist_transformer.training.assembly import assemble
    from dist_transformer.training.fault_tolerance.preemption import seconds_left

    limits = {
        Phase.SET_UP: 60 * config.timeouts.setup_timeout_minutes,
        Phase.STEP: 60 * config.timeouts.timeout_minutes,
        Phase.EVALUATION: 60 * config.timeouts.evaluation_timeout_minutes,
        Phase.CHECKPOINT: 60 * config.timeouts.checkpoint_timeout_minutes,
    }
    watchdog = Watchdog(world, limits).start(launchers)
    group = process_group(
        world,
        join_minutes=config.timeouts.setup_timeout_minutes,
        timeout_minutes=config.timeouts.collective_timeout_minutes,
        single=True,
    )
    with group as device, _failing(watchdog, world):
        watchdog.enter(Phase.SET_UP)
        trainer = assemble(config, world, device, watchdog, peak_flops=_peak_flops(device, config.precision, world))
        left = seconds_left(config.timeouts.walltime_minutes, age=watchdog.age) if world.is_main else None
        if left is not None:
            trainer.preemption.stop_within(left)
            trainer.reporter.say(f"time limit in {format_seconds(left)}: saves and ends before")
        watchdog.signals.listen()
        finished = trainer.train()
    watchdog.close()
    if finished and world.is_main:
        print(next_command(config.run_dir))
    return finished


def _peak_flops(device: "torch.device", precision: str, world: World) -> float | None:
    """Of all ranks, whose GPUs are taken to be alike; a CPU's is not known."""
    if device.type != "cuda":
        return None
    peak = peak_flops(describe_environment()["gpus"][device.index], precision)
    return None if peak is None else peak * world.size


@contextmanager
def _failing(watchdog: Watchdog, world: World) -> Iterator[None]:
    """Tell the other ranks of an error, and the user of the first one only."""
    try:
        yield
    except UserError as error:
        watchdog.fail(error)
        if not world.is_main:
            # What all ranks found, rank 0 says once: the launcher ends the others when it exits.
            time.sleep(_GRACE_SECONDS)
        raise
    except Exception as error:
        first = watchdog.fail(error)
        if first is not None:
            raise UserError(f"rank {world.rank} ends: {first}") from None
        raise
    except KeyboardInterrupt:
        watchdog.enter(Phase.LEAVING)
        raise


if __name__ == "__main__":
    exit_on_user_error(main)
